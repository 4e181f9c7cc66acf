"""The card of a conversion: README.md for people, its front matter for the Hub."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import yaml

from mlxconv.runtime.bundle import read_json
from mlxconv.runtime.files import format_bytes

from ..inspection import Held
from ..report import human_count
from .card_facts import CardFacts, Sample
from .licence import NOTICE_FILE
from .listing import PICTURE_FILE
from .pipeline_tag import pipeline_tag
from .redaction import without_home, without_token
from .snippets import code, how_to_run

MARK = "<!-- This card was written by mlxconv; without this line mlxconv leaves it alone. -->"
_REASONS = (
    ("recipe keeps", "first and last layers and embeddings, few weights that every value passes"),
    ("modulation", "modulation scales and shifts whole layers, so its errors do not average out"),
    ("--keep", "asked for with `--keep`"),
    ("not a linear weight", "convolutions and lookup tables, which are not products with a matrix"),
    ("the model keeps it in", "the model itself computes with these in that precision"),
)


def make_card(facts: CardFacts) -> str:
    """The whole of README.md."""
    sections = [
        _title(facts),
        how_to_run(facts),
        _components(facts),
        _parity(facts),
        _precise(facts),
        _unread(facts),
        _licence(facts),
        _provenance(facts),
        MARK,
    ]
    body = "\n\n".join(section for section in sections if section)
    text = f"---\n{metadata_yaml(facts)}---\n\n{body}\n"
    return without_home(without_token(text))


# ---- front matter --------------------------------------------------------------------------------


def metadata(facts: CardFacts) -> dict[str, Any]:
    """The front matter's entries."""
    copied = facts.manifest.get("source_card") or {}
    tag = copied.get("pipeline_tag") or _ruled_tag(facts)
    entries: dict[str, Any] = {"library_name": "mlx", "pipeline_tag": tag}
    if facts.origin.repo is not None:
        entries |= {"base_model": facts.origin.repo, "base_model_relation": "quantized"}
    entries |= facts.licence.metadata()
    entries["language"] = copied.get("language")
    entries["tags"] = ["mlx", "mlxconv", *([facts.precision] if facts.quantized else [])]
    return {key: value for key, value in entries.items() if value}


def metadata_yaml(facts: CardFacts) -> str:
    """The front matter without its `---` lines."""
    return str(yaml.safe_dump(metadata(facts), sort_keys=False, allow_unicode=True, width=1000))


def _ruled_tag(facts: CardFacts) -> str | None:
    index = facts.bundle.path / "model_index.json"
    entries = read_json(index) if index.is_file() else {}
    names = [name for name, value in entries.items() if isinstance(value, list) and any(value)]
    return pipeline_tag(facts.pipeline, names, _ranks(facts))


def _ranks(facts: CardFacts) -> Counter[int]:
    """Weights by rank, of the autoencoder, or of the denoiser where there is none."""
    coder = next((n for n, h in facts.held.items() if "Autoencoder" in h.class_name), facts.main)
    return Counter(len(tensor["shape"]) for tensor in facts.held[coder].tensors)


# ---- sections ------------------------------------------------------------------------------------


def _title(facts: CardFacts) -> str:
    what = facts.pipeline or facts.held[facts.main].class_name
    runs = " It runs wherever MLX does, without PyTorch." if facts.native else ""
    lines = [
        f"# {facts.repo.partition('/')[2]}",
        "",
        f"{_source_link(facts)}, a {_code(what)}, converted to "
        f"[MLX](https://github.com/ml-explore/mlx) at {facts.precision} by mlxconv: "
        f"{_sizes(facts)}.{runs}",
    ]
    if facts.sample is not None:
        lines += ["", f"![A picture made with this conversion]({PICTURE_FILE})"]
        lines += ["", f"*{_caption(facts.sample)}*"]
    return "\n".join(lines)


def _source_link(facts: CardFacts) -> str:
    url = facts.origin.url
    label = facts.origin.label
    return f"[{_text(label)}](https://huggingface.co/{facts.origin.repo})" if url else _code(label)


def _sizes(facts: CardFacts) -> str:
    size = sum(held.bytes for held in facts.held.values())
    parts = facts.manifest["components"]
    before = [part.get("source_bytes") for part in parts.values()]
    if facts.manifest.get("copied") or any(b is None for b in before):
        return f"{format_bytes(size)} of weights"
    return f"{format_bytes(size)} of weights, from {format_bytes(sum(before))}"


def _caption(sample: Sample) -> str:
    told = [f"“{_text(sample.prompt)}”" if sample.prompt else "Made with this conversion"]
    told += [f"{sample.steps} steps"] if sample.steps else []
    told += [f"seed {sample.seed}"] if sample.seed is not None else []
    return ", ".join(told)


def _components(facts: CardFacts) -> str:
    rows = []
    for name, held in facts.held.items():
        part = facts.manifest["components"].get(name)
        stored = _stored(held) if part else f"{_stored(held)}, as in the source"
        runs = "yes" if part and part["program"] else "no"
        rows.append(
            (
                _code(name),
                _code(held.class_name),
                human_count(held.parameters),
                stored,
                f"{held.bits_per_weight:.2f}",
                format_bytes(held.bytes),
                runs,
            )
        )
    total = sum(held.bytes for held in facts.held.values())
    count = sum(held.parameters for held in facts.held.values())
    rows.append(
        (
            "**all**",
            "",
            human_count(count),
            "",
            f"{8 * total / max(1, count):.2f}",
            format_bytes(total),
            "",
        )
    )
    head = ("component", "class", "parameters", "stored as", "bits per weight", "size", "program")
    return "\n\n".join(
        [
            "## What is in it",
            _table(head, rows, right=(2, 4, 5)),
            "Bits per weight count scales and biases, from the files' headers. A *program* is the "
            "module's forward pass in MLX operations, run without the source's code.",
        ]
    )


def _stored(held: Held) -> str:
    """Precisions by the share of parameters, the largest first."""
    names = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
    total = max(1, sum(held.dtypes.values()))
    shares = sorted(held.dtypes.items(), key=lambda item: -item[1])
    told = [(names.get(dtype, dtype.lower()), count / total) for dtype, count in shares]
    if len(told) == 1 or told[0][1] > 0.9995:
        return told[0][0]
    return ", ".join(f"{name} {100 * share:.3g} %" for name, share in told if share >= 0.0005)


def _parity(facts: CardFacts) -> str:
    measured, head = facts.measured, "## How close it is to the source"
    if measured.rows is None:
        return f"{head}\n\nNot measured: {measured.why}."
    rows = [
        (
            _code(str(row["component"])),
            _compared(row),
            _error(row["rel_l2"]),
            _decibels(row),
            "" if row["threshold"] is None else _error(row["threshold"]),
            "passed" if row["passed"] else "**failed**",
        )
        for row in measured.rows
    ]
    table = _table(
        ("component", "compared", "relative error", "SQNR", "limit", ""), rows, (2, 3, 4)
    )
    references = {
        str(r["reference"]).partition(",")[0] for r in measured.rows if r["tier"] != "weights"
    }
    against = f", against {', '.join(sorted(references))}" if references else ""
    return "\n\n".join(
        [
            head,
            f"Measured on these very files by `mlxconv verify` on {measured.date}{against}. "
            "Relative error is ‖a − b‖ / ‖b‖ over all outputs. Limits: 1e-4 in fp32, in bf16 and "
            "fp16 1.5 times PyTorch's own error; what quantization costs is told, not judged.",
            table,
            f"Random inputs of seed {measured.seed}. {measured.machine}. All figures: "
            "`parity.json`.",
        ]
    )


def _compared(row: Mapping[str, Any]) -> str:
    if row["tier"] == "weights":
        return f"weights ({_text(str(row['name']))})"
    name = _text(str(row["name"]))
    if name.endswith("(runtime)"):
        return f"{name.removesuffix('(runtime)').strip()}: MLX against the same weights in PyTorch"
    told = f": {_text(str(row['note']))}" if row["note"] else ""
    return f"{name}{told}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _decibels(row: Mapping[str, Any]) -> str:
    value = row["sqnr_db"]
    if value is None:
        return "-"
    return "exact" if row["rel_l2"] == 0 else f"{value:.1f} dB"


def _precise(facts: CardFacts) -> str:
    lines = []
    for name, part in facts.manifest["components"].items():
        for group in part.get("kept") or []:
            shown = ", ".join(_code(m) for m in group["modules"][:4])
            more = (
                f" and {len(group['modules']) - 4} more kinds" if len(group["modules"]) > 4 else ""
            )
            kind = _precision(group["dtype"])
            lines.append(f"- {_code(name)}, {_text(kind)}: {shown}{more}: {_reason(group['why'])}.")
    floats = [
        f"`{name}`"
        for name, part in facts.manifest["components"].items()
        if not facts.held[name].quantized
    ]
    if facts.quantized and floats:
        kinds = sorted({_stored(facts.held[name.strip("`")]) for name in floats})
        lines.append(f"- {', '.join(floats)}: not quantized ({'; '.join(kinds)}).")
    if not lines:
        return ""
    return "\n\n".join(["## What stayed precise, and why", "\n".join(lines)])


def _unread(facts: CardFacts) -> str:
    lines = []
    for name, part in facts.manifest["components"].items():
        unread = part.get("unused") or []
        kinds = dict.fromkeys(_code(re.sub(r"\d+", "*", tensor)) for tensor in unread)
        if kinds:
            more = f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else ""
            lines.append(f"- {_code(name)}, {len(unread)}: {', '.join([*kinds][:4])}{more}.")
    if not lines:
        return ""
    return "\n\n".join(["## Tensors of the source that nothing reads", "\n".join(lines)])


def _precision(dtype: str) -> str:
    q, _, group = dtype.partition(" ")
    name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(q, q)
    return f"{name} (group {group[1:]})" if group.startswith("g") else name


def _reason(why: str) -> str:
    return next((told for start, told in _REASONS if why.startswith(start)), _text(why))


def _licence(facts: CardFacts) -> str:
    licence, origin = facts.licence, facts.origin
    label = licence.label
    name = f"[{_text(label)}]({licence.link})" if licence.link else _code(label)
    said = (
        f"as its source, {_source_link(facts)}, states"
        if licence.copied
        else (f"as the publisher states; the card of {_source_link(facts)} states none")
    )
    texts = [f"[{_text(file)}]({quote(file)})" for file in licence.files]
    carried = f" The texts that came with it are here: {', '.join(texts)}." if texts else ""
    lines = [
        "## Licence",
        f"{name}, {said}.{carried} What was changed: [{NOTICE_FILE}]({NOTICE_FILE}).",
    ]
    if origin.gated:
        lines.append(
            "The source is **gated**: its authors ask for an agreement before a download. Their "
            f"terms hold for this conversion too; accept them at {_source_link(facts)}."
        )
    return "\n\n".join([*lines, *licence.obligations])


def _provenance(facts: CardFacts) -> str:
    manifest = facts.manifest
    commit = facts.origin.commit
    at = f", commit [`{commit[:12]}`]({facts.origin.url})" if commit else ""
    versions = _text(", ".join(f"{name} {v}" for name, v in manifest["versions"].items()))
    lines = [f"- Source: {_source_link(facts)}{at}", f"- Versions: {versions}"]
    if manifest.get("variant"):
        lines.append(f"- Weight files: variant {_code(str(manifest['variant']))}")
    methods = sorted({p["method"] for p in manifest["components"].values() if p.get("method")})
    if methods:
        lines.append(f"- Quantized by: {_code(', '.join(methods))}")
    text = "\n".join(lines)
    if manifest.get("command"):
        text += f"\n- Command:\n\n{code('sh', manifest['command'])}"
    return f"## Where it came from\n\n{text}"


# ---- Markdown ------------------------------------------------------------------------------------


def _text(text: str) -> str:
    """Somebody's words as plain text, on one line."""
    plain = " ".join(html.escape(text, quote=False).split())
    return re.sub(r"([\\`*_~\[\]|])", r"\\\1", plain)


def _code(text: str) -> str:
    """Somebody's words as inline code, on one line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table; columns numbered in `right` are right-aligned."""
    rule = ["---:" if i in right else "---" for i in range(len(head))]
    return "\n".join(_lines([head, rule, *rows]))


def _lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in rows:
        yield "| " + " | ".join(_cell(text) for text in row) + " |"


def _cell(text: str) -> str:
    """Numbers keep their units on the same line."""
    return re.sub(r"(?<=\d) (?=[kMGT]?B$|dB$|%)", "\u00a0", text.replace("|", "\\|"))
