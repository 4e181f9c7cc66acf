"""The card of a conversion: README.md for people, its front matter for the Hub."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from mlxconv.runtime.bundle import read_json
from mlxconv.runtime.dtypes import BY_CODE
from mlxconv.runtime.exec.weights import Specs
from mlxconv.runtime.files import format_bytes

from ..inspection import Held
from ..report import human_count
from ..templates import render
from ..verify.record import PARITY_FILE
from .card_facts import FLOATS, CardFacts
from .licence import NOTICE_FILE
from .listing import PICTURE_FILE
from .pipeline_tag import pipeline_tag
from .redaction import without_home, without_token

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
    from huggingface_hub import ModelCard, ModelCardData

    entries = metadata(facts)
    front = ModelCardData(**entries).to_yaml(original_order=[*entries])
    parts = facts.manifest["components"]
    body = render(
        "publish/card.md.jinja",
        _FILTERS,
        facts=facts,
        files={"picture": PICTURE_FILE, "parity": PARITY_FILE, "notice": NOTICE_FILE},
        matrix=_one_matrix(facts),
        references=_references(facts.measured.rows or []),
        unread=_unread(parts),
        versions=", ".join(f"{name} {v}" for name, v in facts.manifest["versions"].items()),
        methods=sorted({part["method"] for part in parts.values() if part.get("method")}),
        mark=MARK,
        fence=_fence,
        row=_row,
        **_precise(facts),
    )
    card = ModelCard(f"---\n{front}\n---\n\n{body}")
    return without_home(without_token(str(card)))


def metadata(facts: CardFacts) -> dict[str, Any]:
    """The front matter's entries, for `ModelCardData`."""
    copied = facts.manifest.get("source_card") or {}
    entries: dict[str, Any] = {
        "library_name": "mlx",
        "pipeline_tag": copied.get("pipeline_tag") or _ruled_tag(facts),
        "base_model": facts.origin.repo,
        "base_model_relation": "quantized" if facts.origin.repo is not None else None,
        **facts.licence.metadata(),
        "language": copied.get("language"),
        "tags": ["mlx", "mlxconv", *([facts.precision] if facts.quantized else [])],
    }
    return {key: value for key, value in entries.items() if value}


def _ruled_tag(facts: CardFacts) -> str | None:
    index = facts.bundle.path / "model_index.json"
    entries = read_json(index) if index.is_file() else {}
    names = [name for name, value in entries.items() if isinstance(value, list) and any(value)]
    # Weights by rank, of the autoencoder, or of the denoiser where there is none.
    coder = next((n for n, h in facts.held.items() if "Autoencoder" in h.class_name), facts.main)
    ranks = Counter(len(tensor["shape"]) for tensor in facts.held[coder].tensors)
    return pipeline_tag(facts.pipeline, names, ranks)


# ---- what the template shows ---------------------------------------------------------------------


def _one_matrix(facts: CardFacts) -> dict[str, Any] | None:
    """A quantized matrix of the commonest precision, to show how one is made dense again."""
    config = read_json(facts.bundle.path / facts.main / "config.json")
    known = {tensor["name"] for tensor in facts.held[facts.main].tensors}
    modules = sorted(n.removesuffix(".scales") for n in known if n.endswith(".scales"))
    if not modules:
        return None
    specs = Specs(config["quantization"], facts.main)
    common = Counter(specs.of(m) for m in modules).most_common(1)[0][0]
    module = next(m for m in modules if specs.of(m) == common)
    parts = ["weight", "scales", *(["biases"] if f"{module}.biases" in known else [])]
    return {"module": module, "parts": parts, "spec": common}


def _references(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({str(r["reference"]).partition(",")[0] for r in rows if r["tier"] != "weights"})


def _precise(facts: CardFacts) -> dict[str, Any]:
    """`kept`: groups of what was not quantized, with the reason; `floats`: whole components."""
    kept = []
    for name, part in facts.manifest["components"].items():
        for group in part.get("kept") or []:
            ours = next((t for start, t in _REASONS if group["why"].startswith(start)), None)
            kept.append(
                {
                    "component": name,
                    "kind": _precision(group["dtype"]),
                    "modules": group["modules"],
                    "reason": ours or group["why"],
                    "quoted": ours is None,
                }
            )
    converted = facts.manifest["components"] if facts.quantized else ()
    floats = [name for name in converted if not facts.held[name].quantized]
    kinds = sorted({_stored(facts.held[name]) for name in floats})
    return {"kept": kept, "floats": floats, "float_kinds": kinds}


def _precision(dtype: str) -> str:
    q, _, group = dtype.partition(" ")
    return f"{FLOATS.get(q, q)} (group {group[1:]})" if group.startswith("g") else FLOATS.get(q, q)


def _unread(parts: Mapping[str, Any]) -> list[tuple[str, int, list[str]]]:
    """Components with tensors that nothing reads: how many, and their names by kind."""
    unread = {name: part.get("unused") or [] for name, part in parts.items()}
    return [
        (name, len(tensors), [*dict.fromkeys(re.sub(r"\d+", "*", tensor) for tensor in tensors)])
        for name, tensors in unread.items()
        if tensors
    ]


# ---- filters -------------------------------------------------------------------------------------


def _text(text: str) -> str:
    """Somebody's words as plain text, on one line."""
    plain = " ".join(html.escape(text, quote=False).split())
    return re.sub(r"([\\`*_~\[\]|])", r"\\\1", plain)


def _code(text: str) -> str:
    """Somebody's words as inline code, on one line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def _fence(language: str, caller: Callable[[], str]) -> str:
    """A block of code, its fence longer than any in the text."""
    text = caller().strip("\n")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}\n"


def _row(*cells: str) -> str:
    """A row of a table. Numbers keep their units on the same line."""
    shown = (re.sub(r"(?<=\d) (?=[kMGT]?B$|dB$|%)", "\u00a0", c.replace("|", "\\|")) for c in cells)
    return f"| {' | '.join(shown)} |"


def _listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more kinds" if len(names) > most else ""
    return ", ".join(_code(name) for name in names[:most]) + more


def _stored(held: Held) -> str:
    """Precisions by the share of parameters, the largest first."""
    names = {code: FLOATS[dtype.name] for code, dtype in BY_CODE.items() if dtype.name in FLOATS}
    total = max(1, sum(held.dtypes.values()))
    ordered = sorted(held.dtypes.items(), key=lambda item: -item[1])
    shares = [(names.get(dtype, dtype.lower()), count / total) for dtype, count in ordered]
    if len(shares) == 1 or shares[0][1] > 0.9995:
        return shares[0][0]
    return ", ".join(f"{name} {100 * share:.3g} %" for name, share in shares if share >= 0.0005)


def _compared(row: Mapping[str, Any]) -> str:
    name = _text(str(row["name"]))
    if row["tier"] == "weights":
        return f"weights ({name})"
    if name.endswith("(runtime)"):
        return f"{name.removesuffix('(runtime)').strip()}: MLX against the same weights in PyTorch"
    return f"{name}: {_text(str(row['note']))}" if row["note"] else name


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _decibels(row: Mapping[str, Any]) -> str:
    if row["sqnr_db"] is None:
        return "-"
    return "exact" if row["rel_l2"] == 0 else f"{row['sqnr_db']:.1f} dB"


_FILTERS: dict[str, Callable[..., str]] = {
    "text": _text,
    "code": _code,
    "listed": _listed,
    "stored": _stored,
    "compared": _compared,
    "error": _error,
    "decibels": _decibels,
    "bytes": format_bytes,
    "human": human_count,
    "sh": shlex.quote,
    "json": lambda value: json.dumps(value, ensure_ascii=False),
    "url": quote,
}
