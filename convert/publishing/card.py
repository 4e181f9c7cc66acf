"""The card of a conversion: README.md for people, its front matter for the Hub."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from mlxconv.runtime.bundle import Bundle, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.families import FAMILIES
from mlxconv.runtime.weights import Specs

from ..inspection import Held, inspect
from ..report import human_bytes, human_count
from .licence import NOTICE_FILE, Licence
from .listing import PICTURE_FILE
from .measured import Measured
from .pipeline_tag import pipeline_tag
from .redaction import without_home, without_token
from .source_card import Origin

MARK = "<!-- This card was written by mlxconv; without this line mlxconv leaves it alone. -->"
_PROMPT = "a cat on a red sofa"
_REASONS = (
    ("recipe keeps", "first and last layers and embeddings, few weights that every value passes"),
    ("modulation", "it scales and shifts whole layers, so its errors do not average out"),
    ("--keep", "asked for with `--keep`"),
    ("not a linear weight", "convolutions and lookup tables, which are not products with a matrix"),
    ("the model keeps it in", "the model itself computes with these in that precision"),
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A picture made with the bundle, and how, where its file tells (`mlxconv generate` does)."""

    prompt: str | None = None
    steps: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class CardFacts:
    """Everything a card says. `held` are the bundle's components as their headers have them."""

    repo: str
    bundle: Bundle
    origin: Origin
    licence: Licence
    measured: Measured
    sample: Sample | None = None
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def manifest(self) -> dict[str, Any]:
        """The bundle's mlxconv.json."""
        return self.bundle.manifest

    @property
    def pipeline(self) -> str | None:
        """The pipeline's class; None for a bundle of single components."""
        name = self.manifest.get("pipeline")
        return None if name is None else str(name)

    @property
    def main(self) -> str:
        """The component with most parameters among those quantized, or among all converted."""
        converted: list[str] = list(self.manifest["components"])
        quantized = [name for name in converted if self.held[name].quantized]
        return max(quantized or converted, key=lambda name: self.held[name].parameters)

    @property
    def native(self) -> bool:
        """Whether mlxconv runs the whole pipeline by itself."""
        parts = self.manifest["components"].values()
        whole = not self.manifest.get("copied") and all(part["program"] for part in parts)
        return self.pipeline in FAMILIES and whole


def card_facts(
    repo: str, bundle: Bundle, origin: Origin, licence: Licence, measured: Measured
) -> CardFacts:
    """The facts for the card of a bundle; its sample picture is asked how it was made."""
    picture = bundle.path / PICTURE_FILE
    sample = read_sample(picture) if picture.is_file() else None
    held = inspect(bundle.path).components
    return CardFacts(repo, bundle, origin, licence, measured, sample, held)


def read_sample(picture: Path) -> Sample:
    """What a PNG tells of how it was made. MlxconvError when it is not a PNG."""
    try:
        with Image.open(picture, formats=["PNG"]) as image:
            text = str(image.info.get("mlxconv", "{}"))
            image.verify()
    except (OSError, SyntaxError, ValueError) as error:
        raise MlxconvError(f"{picture}: not a PNG that can be read ({error})") from error
    try:
        told = json.loads(text)
        return Sample(told.get("prompt"), told.get("steps"), told.get("seed"))
    except (ValueError, AttributeError):
        return Sample()


def make_card(facts: CardFacts) -> str:
    """The whole of README.md."""
    sections = [
        _title(facts), _how_to_run(facts), _components(facts), _parity(facts), _precise(facts),
        _licence(facts), _provenance(facts), MARK,
    ]  # fmt: skip
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
    entries["tags"] = ["mlx", "mlxconv", *([] if _is_float(facts) else [_bits(facts)])]
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
    tensors = inspect(facts.bundle.path, tensors=True).components[coder].tensors
    return Counter(len(tensor["shape"]) for tensor in tensors)


# ---- sections ------------------------------------------------------------------------------------


def _title(facts: CardFacts) -> str:
    source = _source_link(facts)
    what = f"a `{facts.pipeline}`" if facts.pipeline else f"a `{facts.held[facts.main].class_name}`"
    lines = [
        f"# {facts.repo.partition('/')[2]}",
        "",
        f"{source}, {what}, converted to [MLX](https://github.com/ml-explore/mlx) at "
        f"{_bits(facts)} by mlxconv: {_sizes(facts)}. It runs on Apple silicon, and on Linux, "
        "without PyTorch." if facts.native else
        f"{source}, {what}, converted to [MLX](https://github.com/ml-explore/mlx) at "
        f"{_bits(facts)} by mlxconv: {_sizes(facts)}.",
    ]  # fmt: skip
    if facts.sample is not None:
        lines += ["", f"![A picture made with this conversion]({PICTURE_FILE})"]
        lines += ["", f"*{_caption(facts.sample)}*"]
    return "\n".join(lines)


def _source_link(facts: CardFacts) -> str:
    url = facts.origin.url
    label = facts.origin.label
    return f"[{label}](https://huggingface.co/{facts.origin.repo})" if url else f"`{label}`"


def _sizes(facts: CardFacts) -> str:
    size = sum(held.bytes for held in facts.held.values())
    parts = facts.manifest["components"]
    before = [part.get("source_bytes") for part in parts.values()]
    if facts.manifest.get("copied") or any(b is None for b in before):
        return f"{human_bytes(size)} of weights"
    return f"{human_bytes(size)} of weights, from {human_bytes(sum(before))}"


def _caption(sample: Sample) -> str:
    told = [f"“{sample.prompt}”" if sample.prompt else "Made with this conversion"]
    told += [f"{sample.steps} steps"] if sample.steps else []
    told += [f"seed {sample.seed}"] if sample.seed is not None else []
    return ", ".join(told)


def _bits(facts: CardFacts) -> str:
    """The main component's precision as people write it: `4-bit`, `bf16`, `mxfp4`."""
    q = str(facts.manifest["components"][facts.main]["q"]).split()[0]
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return short.get(q) or (f"{q[:-3]}-bit" if q.endswith("bit") else q)


def _is_float(facts: CardFacts) -> bool:
    return _bits(facts) in ("bf16", "fp16", "fp32")


def _how_to_run(facts: CardFacts) -> str:
    parts = ["## How to run it"]
    if facts.native:
        parts += _native(facts)
    elif facts.pipeline:
        parts += _inside_diffusers(facts)
    else:
        parts += _one_component(facts)
    return "\n\n".join([*parts, *_plain_mlx(facts)])


def _native(facts: CardFacts) -> list[str]:
    sample = facts.sample or Sample()
    prompt, steps = sample.prompt or _PROMPT, sample.steps
    more = f" --steps {steps}" if steps else ""
    arguments = f"{prompt!r}, seed=0" + (f", steps={steps}" if steps else "")
    return [
        _code("sh", f"pip install mlxconv\nmlxconv generate {facts.repo} {shlex.quote(prompt)} "
              f"-o picture.png{more}"),
        "In Python:",
        _code("python", f"import mlxconv\n\npipeline = mlxconv.load(\"{facts.repo}\")\n"
              f"pictures = pipeline({arguments})\npictures.images[0].save(\"picture.png\")"),
    ]  # fmt: skip


def _inside_diffusers(facts: CardFacts) -> list[str]:
    source = facts.origin.repo or facts.origin.label
    at = f', revision="{facts.origin.commit}"' if facts.origin.repo and facts.origin.commit else ""
    return [
        "In diffusers, its modules replaced by these:",
        _code("sh", "pip install 'mlxconv[convert]'"),
        _code("python", f"import diffusers\nimport mlxconv\n\n"
              f"pipe = diffusers.{facts.pipeline}.from_pretrained(\"{source}\"{at})\n"
              f"mlxconv.into_diffusers(pipe, \"{facts.repo}\")"),
        "Call `pipe` as ever: what it calls runs in MLX now.",
    ]  # fmt: skip


def _one_component(facts: CardFacts) -> list[str]:
    if not facts.manifest["components"][facts.main]["program"]:
        return ["These are weights without a program: load them into a model of yours."]
    return [
        _code("sh", "pip install mlxconv"),
        _code("python", f"import mlxconv\n\nmodel = mlxconv.load_component(\"{facts.repo}\", "
              f"\"{facts.main}\")\nfor entry in model.program.entries:\n"
              "    print(entry.name, [(i.name, i.type) for i in entry.inputs])"),
        f"Call it with the keyword names of `{facts.held[facts.main].class_name}.forward`, as "
        "`mx.array`.",
    ]  # fmt: skip


def _plain_mlx(facts: CardFacts) -> list[str]:
    lines = [
        "from pathlib import Path", "", "import mlx.core as mx",
        "from huggingface_hub import snapshot_download", "",
        f"folder = Path(snapshot_download(\"{facts.repo}\", allow_patterns=\"{facts.main}/*\"))",
        "weights = {}",
        f"for file in sorted((folder / \"{facts.main}\").glob(\"model*.safetensors\")):",
        "    weights |= mx.load(str(file))",
    ]  # fmt: skip
    return [
        "The weights alone, with nothing but MLX (names are the source's, convolutions are "
        "channels-last):",
        _code("python", "\n".join([*lines, *_dequantize(facts)])),
    ]


def _dequantize(facts: CardFacts) -> list[str]:
    """Lines that make one quantized matrix dense again."""
    config = read_json(facts.bundle.path / facts.main / "config.json")
    names = inspect(facts.bundle.path, tensors=True).components[facts.main].tensors
    known = {tensor["name"] for tensor in names}
    modules = sorted(n.removesuffix(".scales") for n in known if n.endswith(".scales"))
    if not modules:
        return []
    spec = Specs(config["quantization"], facts.main)
    common = Counter(spec.of(m) for m in modules).most_common(1)[0][0]
    module = next(m for m in modules if spec.of(m) == common)
    parts = ["weight", "scales", *(["biases"] if f"{module}.biases" in known else [])]
    mode = "" if common.mode == "affine" else f', mode="{common.mode}"'
    return [
        "", f"# One matrix, dense again; `quantization` in {facts.main}/config.json has them all.",
        f"parts = [weights[f\"{module}.{{part}}\"] for part in {tuple(parts)!r}]".replace("'", '"'),
        f"matrix = mx.dequantize(*parts, group_size={common.group_size}, bits={common.bits}{mode})",
    ]  # fmt: skip


def _components(facts: CardFacts) -> str:
    rows = []
    for name, held in facts.held.items():
        part = facts.manifest["components"].get(name)
        stored = _stored(held) if part else f"{_stored(held)}, as in the source"
        runs = "yes" if part and part["program"] else "no"
        rows.append(
            (f"`{name}`", f"`{held.class_name}`", human_count(held.parameters), stored,
             f"{held.bits_per_weight:.2f}", human_bytes(held.bytes), runs)
        )  # fmt: skip
    total = sum(held.bytes for held in facts.held.values())
    count = sum(held.parameters for held in facts.held.values())
    rows.append(("**all**", "", human_count(count), "", f"{8 * total / max(1, count):.2f}",
                 human_bytes(total), ""))  # fmt: skip
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
        (f"`{row['component']}`", _compared(row), _error(row["rel_l2"]), _decibels(row),
         "" if row["threshold"] is None else _error(row["threshold"]),
         "passed" if row["passed"] else "**failed**")
        for row in measured.rows
    ]  # fmt: skip
    table = _table(
        ("component", "compared", "relative error", "SQNR", "limit", ""), rows, (2, 3, 4)
    )
    references = sorted({r["reference"] for r in measured.rows if r["tier"] != "weights"})
    against = f", against {', '.join(references)}" if references else ""
    return "\n\n".join(
        [
            head,
            f"Measured on these very files by `mlxconv verify` on {measured.date}{against}. "
            "Relative error is ‖a − b‖ / ‖b‖ over all outputs.",
            table,
            f"Random inputs of seed {measured.seed}. {measured.machine}. All figures: "
            "`parity.json`.",
        ]
    )


def _compared(row: Mapping[str, Any]) -> str:
    if row["tier"] == "weights":
        return f"weights ({row['name']})"
    name = str(row["name"])
    if name.endswith("(runtime)"):
        return f"{name.removesuffix('(runtime)').strip()}: MLX against the same weights in PyTorch"
    told = f": {row['note']}" if row["note"] else ""
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
            shown = ", ".join(f"`{m}`" for m in group["modules"][:4])
            more = (
                f" and {len(group['modules']) - 4} more kinds" if len(group["modules"]) > 4 else ""
            )
            kind = _precision(group["dtype"])
            lines.append(f"- `{name}`, {kind}: {shown}{more}: {_reason(group['why'])}.")
    floats = [
        f"`{name}`" for name, part in facts.manifest["components"].items()
        if not facts.held[name].quantized
    ]  # fmt: skip
    if not _is_float(facts) and floats:
        kinds = sorted({_stored(facts.held[name.strip("`")]) for name in floats})
        lines.append(f"- {', '.join(floats)}: not quantized ({'; '.join(kinds)}).")
    if not lines:
        return ""
    return "\n\n".join(["## What stayed precise, and why", "\n".join(lines)])


def _precision(dtype: str) -> str:
    q, _, group = dtype.partition(" ")
    name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(q, q)
    return f"{name} (group {group[1:]})" if group.startswith("g") else name


def _reason(why: str) -> str:
    return next((told for start, told in _REASONS if why.startswith(start)), why)


def _licence(facts: CardFacts) -> str:
    licence, origin = facts.licence, facts.origin
    name = f"[{licence.label}]({licence.link})" if licence.link else f"`{licence.label}`"
    said = f"as its source, {_source_link(facts)}, states" if licence.copied else (
        f"as the publisher states; the card of {_source_link(facts)} states none"
    )  # fmt: skip
    texts = [f"[{file}]({file})" for file in licence.files]
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
    versions = ", ".join(f"{name} {found}" for name, found in manifest["versions"].items())
    lines = [f"- Source: {_source_link(facts)}{at}", f"- Versions: {versions}"]
    if manifest.get("variant"):
        lines.append(f"- Weight files: variant `{manifest['variant']}`")
    methods = sorted({p["method"] for p in manifest["components"].values() if p.get("method")})
    if methods:
        lines.append(f"- Quantized by: `{', '.join(methods)}`")
    text = "\n".join(lines)
    if manifest.get("command"):
        text += f"\n- Command:\n\n{_code('sh', manifest['command'])}"
    return f"## Where it came from\n\n{text}"


# ---- Markdown ------------------------------------------------------------------------------------


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table; columns numbered in `right` are right-aligned."""
    rule = ["---:" if i in right else "---" for i in range(len(head))]
    return "\n".join(_lines([head, rule, *rows]))


def _lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
