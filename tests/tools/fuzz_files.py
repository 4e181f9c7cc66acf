"""Runs commands on damaged checkpoints and bundles: `python -m tests.tools.fuzz_files --count 500`.

Whatever is wrong with a file, a command says it in a sentence: `MlxconvError`, exit 1. Any other
exception is a find: a user would read "unexpected; please report it". Damage i of a seed is always
the same (`--first i --count 1`).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ODD = (None, True, False, 0, -1, 5, 2**31, 2**62, 10**30, 0.5, float("nan"), float("inf"), "", "x",
       "é\u0000", "x" * 5000, "../x", [], [[]], [1], ["x"], {}, {"a": 1}, [None], "float16", "int8",
       [0, 0], [-1, 4], [4, 4], "FluxPipeline", "AutoencoderKL")  # fmt: skip
RAW = (b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 50_000,
       b"1" * 5_000, b'"text"', b'{"\xc3\x28": 1}')  # fmt: skip
SKIPPED = {".md", ".txt"}


@dataclass(frozen=True)
class Find:
    number: int
    command: str
    damage: str
    reason: str


def subjects(folder: Path) -> Path:
    """A tiny pipeline, its bundle, and a text encoder with its bundle; made where they are not."""
    from mlxconv.convert.catalog.figures import tiny_checkpoint
    from mlxconv.convert.conversion import convert
    from mlxconv.convert.recipe.reading import load_recipe

    from ..conftest import _pipeline

    if not (folder / "done").exists():
        convert(_pipeline(folder / "pipeline"), folder / "pipeline-mlx", "4bit")
        tiny_checkpoint(load_recipe("CLIPTextModel"), None, folder / "clip")
        convert(folder / "clip", folder / "clip-mlx", "8bit")
        (folder / "done").touch()
    return folder


def commands(at: Path) -> list[tuple[Path, list[str]]]:
    """What is damaged, and what is run on it."""
    clip, clip_mlx = at / "clip", at / "clip-mlx"
    pipe, pipe_mlx = at / "pipeline", at / "pipeline-mlx"
    out = str(at / "out")
    return [
        (clip, ["convert", str(clip), "-o", out, "--q", "8bit"]),
        (clip, ["inspect", str(clip)]),
        (pipe, ["convert", str(pipe), "-o", out, "--dry-run"]),
        (pipe, ["inspect", str(pipe)]),
        (clip_mlx, ["inspect", str(clip_mlx)]),
        (clip_mlx, ["verify", str(clip_mlx), "--against", str(clip)]),
        (clip, ["verify", str(clip_mlx), "--against", str(clip)]),
        (pipe_mlx, ["inspect", str(pipe_mlx)]),
        (pipe_mlx, ["generate", str(pipe_mlx), "a cat", "-o", str(at / "x.png"), "--steps", "1",
                    "--size", "32x32"]),
        (pipe_mlx, ["upload", str(pipe_mlx), "somebody/something", "--dry-run"]),
    ]


def quick(count: int) -> list[int]:
    """The first numbers of commands that neither trace nor run a model."""
    runs = [arguments for _, arguments in commands(Path())]
    light = [i for i, a in enumerate(runs) if a[0] == "inspect" or "--dry-run" in a]
    return [base + i for base in range(0, count, len(runs)) for i in light]


def damage(folder: Path, chance: random.Random) -> str:
    """Change one file of a folder; what was done."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix not in SKIPPED)
    file = chance.choice([f for f in files if f.suffix == ".json"] * 2 + files)
    name, kind = file.relative_to(folder), chance.random()
    if kind < 0.05:
        file.unlink()
        return f"{name} removed"
    if kind < 0.10:
        file.unlink()
        file.mkdir()
        return f"{name} a folder"
    if kind < 0.14:
        file.unlink()
        file.symlink_to(chance.choice(["nowhere", file.name, "/dev/null"]))
        return f"{name} a link"
    if kind < 0.22:
        file.write_bytes(chance.choice(RAW))
        return f"{name} {file.read_bytes()[:12]!r}"
    if kind < 0.27:
        os.truncate(file, chance.randrange(file.stat().st_size + 1))
        return f"{name} cut short"
    if file.suffix == ".json":
        return f"{name} {_json(file, chance)}"
    return f"{name} {_header(file, chance)}"


def _json(file: Path, chance: random.Random) -> str:
    data = json.loads(file.read_text(encoding="utf-8"))
    paths = list(_places(data))
    if not paths:
        return "as it is"
    *parents, key = chance.choice([p for p in paths if len(p) < 4] or paths)
    parent = data
    for step in parents:
        parent = parent[step]
    if chance.random() < 0.15:
        del parent[key]
        said = f"{[*parents, key]} removed"
    else:
        parent[key] = copy.deepcopy(chance.choice(ODD))
        said = f"{[*parents, key]} = {parent[key]!r:.40}"
    file.write_text(json.dumps(data), encoding="utf-8")
    return said


def _header(file: Path, chance: random.Random) -> str:
    whole = file.read_bytes()
    if file.suffix != ".safetensors" or chance.random() < 0.3:
        place = chance.randrange(min(len(whole), 400))
        file.write_bytes(whole[:place] + chance.randbytes(1) + whole[place + 1 :])
        return f"byte {place}"
    (length,) = struct.unpack("<Q", whole[:8])
    data = json.loads(whole[8 : 8 + length])
    name = chance.choice([k for k in data if k != "__metadata__"])
    key = chance.choice(("dtype", "shape", "data_offsets", "name", "all"))
    odd: Any = chance.choice((*ODD, "F64", "I8", "BOOL", "F8_E4M3", [2**40], [0, 8], [8, 0]))
    if key == "name":
        data["x" * 300 if chance.random() < 0.5 else ""] = data.pop(name)
    elif key == "all":
        data[name] = odd
    else:
        data[name][key] = odd
    text = json.dumps(data).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    return f"header {name} {key} = {odd!r:.40}"


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if not isinstance(data, (dict, list)):
        return
    for key in data if isinstance(data, dict) else range(min(len(data), 20)):
        yield (*path, key)
        if len(path) < 5:
            yield from _places(data[key], (*path, key))


def one(base: Path, seed: int, number: int) -> tuple[str, Find | None]:
    """How a command ended on a damaged copy, and what it should not have done."""
    import click
    from click.testing import CliRunner

    from mlxconv.cli import cli
    from mlxconv.runtime.errors import MlxconvError

    chance = random.Random(f"{seed}/{number}")
    with tempfile.TemporaryDirectory(prefix="fuzz-files-") as scratch:
        at = Path(scratch)
        all_commands = commands(at)
        target, arguments = all_commands[number % len(all_commands)]
        for name in {target.name, *(Path(a).name for a in arguments if a.startswith(scratch))}:
            if (base / name).is_dir():
                shutil.copytree(base / name, at / name)
        said = damage(target, chance)
        began = time.process_time()
        result = CliRunner().invoke(cli, arguments)
        spent = time.process_time() - began
    error = result.exception
    command = f"{arguments[0]} {target.name}"
    if error is None or isinstance(error, SystemExit):
        return f"exit {result.exit_code}", None
    if isinstance(error, (MlxconvError, click.ClickException)) and spent < 60:
        return "said", None
    if isinstance(error, OSError) and error.strerror:
        return "system", None
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/mlxconv/" in f.filename]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else "?"
    return "find", Find(number, command, said, f"{type(error).__name__} {error!s:.160} at {where}")


def fuzz(
    base: Path, numbers: Iterable[int], seed: int = 0,
    on_find: Callable[[Find], None] = lambda find: None,
) -> tuple[Counter[str], list[Find]]:  # fmt: skip
    counts: Counter[str] = Counter()
    finds = []
    for number in numbers:
        outcome, find = one(base, seed, number)
        counts[outcome] += 1
        if find is not None:
            finds.append(find)
            on_find(find)
    return counts, finds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    bundles = Path(tempfile.gettempdir()) / "fuzz-files"
    parser.add_argument("--base", type=Path, default=bundles, help="Made there, or kept.")
    options = parser.parse_args()
    counts, finds = fuzz(
        subjects(options.base), range(options.first, options.first + options.count), options.seed,
        lambda f: print(f.number, f.command, "|", f.damage, "|", f.reason, flush=True),
    )  # fmt: skip
    print(dict(counts), f"{len(finds)} finds", flush=True)
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
