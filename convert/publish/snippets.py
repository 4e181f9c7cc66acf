"""How to run a bundle: the code of its card."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter

from mlxconv.runtime.bundle import read_json
from mlxconv.runtime.exec.weights import Specs

from .card_facts import CardFacts, Sample

_PROMPT = "a cat on a red sofa"


def how_to_run(facts: CardFacts) -> str:
    """The section, with code that runs as it stands once the bundle is published."""
    parts = ["## How to run it"]
    if facts.native:
        parts += _native(facts)
    elif facts.pipeline:
        parts += _inside_diffusers(facts)
    else:
        parts += _one_component(facts)
    return "\n\n".join([*parts, *_plain_mlx(facts)])


def _native(facts: CardFacts) -> list[str]:
    """As the sample picture was made, where there is one."""
    made = facts.sample or Sample()
    prompt = made.prompt or _PROMPT
    options, arguments = [f"-o picture.png --seed {made.seed or 0}"], [f"seed={made.seed or 0}"]
    if made.steps:
        options.append(f"--steps {made.steps}")
        arguments.append(f"steps={made.steps}")
    if made.prompt and made.size:
        width, height = made.size
        options.append(f"--size {width}x{height}")
        arguments.append(f"width={width}, height={height}")
    command = f"mlxconv generate {facts.repo} {shlex.quote(prompt)} {' '.join(options)}"
    call = ", ".join([json.dumps(prompt, ensure_ascii=False), *arguments])
    lines = [
        "import mlxconv",
        "",
        f'pipeline = mlxconv.load("{facts.repo}")',
        f"pictures = pipeline({call})",
        'pictures.images[0].save("picture.png")',
    ]
    return [
        code("sh", f"pip install mlxconv\n{command}"),
        "In Python:",
        code("python", "\n".join(lines)),
    ]


def _inside_diffusers(facts: CardFacts) -> list[str]:
    source = facts.origin.repo or facts.origin.label
    at = f', revision="{facts.origin.commit}"' if facts.origin.repo and facts.origin.commit else ""
    return [
        "In diffusers, its modules replaced by these:",
        code("sh", "pip install 'mlxconv[convert]'"),
        code(
            "python",
            f"import diffusers\nimport mlxconv\n\n"
            f"pipe = diffusers.{facts.pipeline}.from_pretrained({json.dumps(source)}{at})\n"
            f'mlxconv.into_diffusers(pipe, "{facts.repo}")',
        ),
        "Call `pipe` as usual; its modules now run in MLX.",
    ]


def _one_component(facts: CardFacts) -> list[str]:
    if not facts.manifest["components"][facts.main]["program"]:
        return ["These are weights without a program: load them into a model of yours."]
    return [
        code("sh", "pip install mlxconv"),
        code(
            "python",
            f'import mlxconv\n\nmodel = mlxconv.load_component("{facts.repo}", '
            f'"{facts.main}")\nfor entry in model.program.entries:\n'
            "    print(entry.name, [(i.name, i.type) for i in entry.inputs])",
        ),
        f"Call it with the keyword names of `{facts.held[facts.main].class_name}.forward`, as "
        "`mx.array`.",
    ]


def _plain_mlx(facts: CardFacts) -> list[str]:
    lines = [
        "from pathlib import Path",
        "",
        "import mlx.core as mx",
        "from huggingface_hub import snapshot_download",
        "",
        f'folder = Path(snapshot_download("{facts.repo}", allow_patterns="{facts.main}/*"))',
        "weights = {}",
        f'for file in sorted((folder / "{facts.main}").glob("model*.safetensors")):',
        "    weights |= mx.load(str(file))",
    ]
    return [
        "The weights alone, with nothing but MLX (names are the source's, convolutions are "
        "channels-last):",
        code("python", "\n".join([*lines, *_dequantize(facts)])),
    ]


def _dequantize(facts: CardFacts) -> list[str]:
    """Lines that make one quantized matrix dense again."""
    config = read_json(facts.bundle.path / facts.main / "config.json")
    known = {tensor["name"] for tensor in facts.held[facts.main].tensors}
    modules = sorted(n.removesuffix(".scales") for n in known if n.endswith(".scales"))
    if not modules:
        return []
    spec = Specs(config["quantization"], facts.main)
    common = Counter(spec.of(m) for m in modules).most_common(1)[0][0]
    module = next(m for m in modules if spec.of(m) == common)
    parts = ["weight", "scales", *(["biases"] if f"{module}.biases" in known else [])]
    mode = "" if common.mode == "affine" else f', mode="{common.mode}"'
    return [
        "",
        f"# One matrix, dense again; `quantization` in {facts.main}/config.json has them all.",
        f"parts = [weights[{json.dumps(module + '.')} + part] for part in {json.dumps(parts)}]",
        f"matrix = mx.dequantize(*parts, group_size={common.group_size}, bits={common.bits}{mode})",
    ]


def code(language: str, text: str) -> str:
    """A block of code in Markdown, its fence longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
