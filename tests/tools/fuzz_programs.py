"""Runs mutated bundles and reports every process that dies: `python -m tests.tools.fuzz_programs`.

A bundle is data from anywhere; whatever it says, running it ends in a result or a `MlxconvError`.
Mutation i of a seed is always the same, so that a find can be run again (`--only i`). Worker
processes run many mutations each; when one dies by a signal, the mutation it was at is a find and
a fresh process goes on behind it. So are an exception of another kind, more than `SECONDS` of CPU
time, and more than `MEBIBYTES` of memory beyond what was held before.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

SECONDS, MEBIBYTES = 5.0, 400
HANG = 120.0  # seconds of the wall's clock without progress
CLASSES = {  # class: precision
    "FluxTransformer2DModel": "4bit",
    "UNet2DConditionModel": "fp32",
    "AutoencoderKL": "bf16",
    "AutoencoderOobleck": "fp32",
    "CLIPTextModel": "8bit",
    "T5EncoderModel": "fp32",
    "Qwen2_5_VLForConditionalGeneration": "4bit",
}
DIMS = {"batch": 1, "text_tokens": 4, "image_tokens": 6, "latent_height": 3, "latent_width": 2,
        "height": 24, "width": 16, "latents": 3, "samples": 32}  # fmt: skip
WEIGHTS, INDEX, PROGRAM = "model.safetensors", "model.safetensors.index.json", "program.json"


def build(folder: Path, classes: Sequence[str] = tuple(CLASSES)) -> list[Path]:
    """Folders of tiny converted components; those that are there already are kept."""
    found = []
    for name in classes:
        if not (folder / name).exists():
            _convert(name, folder)
        found.extend(sorted(f.parent for f in (folder / name).rglob(PROGRAM)))
    return found


def _convert(name: str, folder: Path) -> None:
    from mlxconv.convert.catalog.figures import tiny_checkpoint
    from mlxconv.convert.conversion import convert
    from mlxconv.convert.recipe.reading import load_recipe

    with tempfile.TemporaryDirectory() as scratch:
        source = tiny_checkpoint(load_recipe(name), None, Path(scratch) / name)
        convert(source, folder / name, CLASSES[name])


# ---- mutations ----------------------------------------------------------------------------------

INTS = (0, 0, 0, 1, -1, 2, 3, 5, 7, -2, -3, 64, 1000, -1000, 4096, 10**6, 2**31 - 1, -(2**31),
        2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))  # fmt: skip
FLOATS = (0.0, -1.0, 0.5, 1e-300, 1e308, {"float": "nan"}, {"float": "inf"}, {"float": "-inf"}, 3.7)
DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64", "uint8", "uint32", "bool",
          "complex64", "compute")  # fmt: skip
WORDS = ("edge", "reflect", "circular", "replicate", "constant", "", "ij,jk->ik", "ab->ba", "bad")
OTHERS = (None, True, False, [], [[1]], [[0, 0]], [1, 2], [0], [-1], [0, 0, 0, 0], [1, 0, 2, 3],
          [10**5] * 8, [2**20, 2**20], [2, 3, 4], [1, 1, 1, 1], [-1, -1])  # fmt: skip


class Mutator:
    """Changes one place of a component's files; all choices come from one generator."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def literal(self) -> Any:
        """Any argument that is no value."""
        kind = self.chance.random()
        if kind < 0.5:
            return self.chance.choice(INTS)
        if kind < 0.6:
            return self.chance.choice(FLOATS)
        if kind < 0.75:
            return [self.chance.choice(INTS[:15]) for _ in range(self.chance.randrange(5))]
        if kind < 0.85:
            return f"={self.chance.choice(DTYPES + WORDS)}"
        return copy.deepcopy(self.chance.choice(OTHERS))

    def program(self, data: Any) -> str:
        """One change of a program; what it was."""
        bodies = [*data["entries"], *data["blocks"].values()]
        body = self.chance.choices(bodies, [len(b["nodes"]) + 1 for b in bodies])[0]
        if not body["nodes"]:
            return "nothing"
        changes: list[tuple[float, Callable[[Any, Any], str]]] = [
            (5, self._argument), (4, self._insert), (2, self._value), (1, self._op),
            (1, self._order), (1, self._parameter), (0.5, self._constants), (0.5, self._input),
            (0.3, self._anything),
        ]  # fmt: skip
        change = self.chance.choices([c for _, c in changes], [w for w, _ in changes])[0]
        return change(data, body)

    def _argument(self, data: Any, body: Any) -> str:
        """A literal in a node's arguments, or a part of one."""
        node = self.chance.choice(body["nodes"])
        if not node[2]:
            return "nothing"
        key = self.chance.choice(list(node[2]))
        new = self.literal()
        old = node[2][key]
        if isinstance(old, list) and old and self.chance.random() < 0.7:
            old[self.chance.randrange(len(old))] = new
        else:
            node[2][key] = new
        return f"{node[0]} -> {node[1]}: {key}={node[2][key]!r:.60}"

    def _value(self, data: Any, body: Any) -> str:
        """An argument is another value or weight."""
        node = self.chance.choice(body["nodes"])
        if not node[2]:
            return "nothing"
        key = self.chance.choice(list(node[2]))
        node[2][key] = self._any_value(data, body)
        return f"{node[0]} -> {node[1]}: {key}={node[2][key]!r}"

    def _any_value(self, data: Any, body: Any) -> str:
        names = [f"%{n}" for node in body["nodes"] for n in node[1]]
        names += [f"%{i if isinstance(i, str) else i[0]}" for i in body["inputs"]]
        if self.chance.random() < 0.3:
            own = [a for n in body["nodes"] for a in n[2].values() if isinstance(a, str)]
            held = [a for a in own if a[:1] == "@"]
            held += [f"@{n}" for n in (*data["parameters"], *data["constants"])][:50]
            names = held or names
        return self.chance.choice(names)

    def _insert(self, data: Any, body: Any) -> str:
        """A node of any op in front of another, which reads its result."""
        from mlxconv.runtime.ops import OPS

        at = self.chance.randrange(len(body["nodes"]))
        op = self.chance.choice(sorted(OPS))
        before = {"entries": [], "nodes": body["nodes"][:at], "inputs": body["inputs"]}
        args = {}
        for name, parameter in inspect.signature(OPS[op]).parameters.items():
            if parameter.default is not parameter.empty and self.chance.random() < 0.5:
                continue
            args[name] = self._fitting(str(parameter.annotation), name, data, before)
        node = [op, [f"fuzz{at}"], args, "", []]
        body["nodes"].insert(at, node)
        reader = body["nodes"][at + 1]
        if reader[2] and self.chance.random() < 0.8:
            reader[2][self.chance.choice(list(reader[2]))] = f"%fuzz{at}"
        elif body["outputs"]:
            body["outputs"][0] = f"%fuzz{at}"
        return f"insert {op} {args!r:.200}"

    def _fitting(self, annotation: str, name: str, data: Any, body: Any) -> Any:
        """An argument of the kind that the op declares, mostly."""
        if self.chance.random() < 0.05:
            return self.literal()
        if "array" in annotation or annotation.endswith("_empty'>") or "Value" in annotation:
            if "Sequence" in annotation:
                return [self._any_value(data, body) for _ in range(self.chance.randrange(1, 4))]
            return self._any_value(data, body)
        if "Sequence[Sequence" in annotation:
            count = self.chance.randrange(1, 5)
            return [[self.chance.choice(INTS[:15]) for _ in range(2)] for _ in range(count)]
        if "Sequence" in annotation:
            count = self.chance.randrange(1, 5)
            return [self.chance.choice(INTS if self.chance.random() < 0.2 else INTS[:12])
                    for _ in range(count)]  # fmt: skip
        if "str" in annotation:
            return f"={self.chance.choice(DTYPES if name == 'dtype' else WORDS)}"
        if "bool" in annotation:
            return self.chance.random() < 0.5
        if "Any" in annotation:
            return self._any_value(data, body)
        return self.chance.choice(INTS if self.chance.random() < 0.5 else INTS[:12])

    def _op(self, data: Any, body: Any) -> str:
        from mlxconv.runtime.ops import OPS

        node = self.chance.choice(body["nodes"])
        old = node[0]
        alike = [o for o, f in OPS.items() if set(node[2]) <= set(inspect.signature(f).parameters)]
        node[0] = self.chance.choice(sorted(alike) or sorted(OPS))
        return f"{old} -> {node[0]} {node[2]!r:.100}"

    def _order(self, data: Any, body: Any) -> str:
        nodes = body["nodes"]
        a, b = self.chance.randrange(len(nodes)), self.chance.randrange(len(nodes))
        if self.chance.random() < 0.5:
            nodes[a], nodes[b] = nodes[b], nodes[a]
            return f"swap nodes {a}, {b}"
        nodes[a][2], nodes[b][2] = nodes[b][2], nodes[a][2]
        return f"swap arguments of {nodes[a][0]} and {nodes[b][0]}"

    def _parameter(self, data: Any, body: Any) -> str:
        if not data["parameters"]:
            return "nothing"
        name = self.chance.choice(list(data["parameters"]))
        kind = self.chance.randrange(3)
        kinds = ("linear", "conv", "conv_transpose", "other", "x")
        shape = [self.chance.choice(INTS) for _ in range(2)]
        new = (self.chance.choice(kinds), self.chance.choice(DTYPES), shape)[kind]
        data["parameters"][name][kind] = new
        return f"parameter {name}: {new!r}"

    def _constants(self, data: Any, body: Any) -> str:
        if not data["constants"]:
            return "nothing"
        name = self.chance.choice(list(data["constants"]))
        data["constants"][name] = self.chance.choice(DTYPES)
        return f"constant {name}: {data['constants'][name]}"

    def _input(self, data: Any, body: Any) -> str:
        entry = self.chance.choice(data["entries"])
        if not entry["inputs"]:
            return "nothing"
        item = self.chance.choice(entry["inputs"])
        shape = item[2].partition("[")[2]
        item[2] = self.chance.choice([f"{self.chance.choice(DTYPES)}[{shape}", "int", "float32[]"])
        return f"input {item[0]}: {item[2]}"

    def _anything(self, data: Any, body: Any) -> str:
        """One place left out, moved, or made odd."""
        paths = list(_places(data))
        *parents, key = self.chance.choice(paths)
        parent = data
        for step in parents:
            parent = parent[step]
        if self.chance.random() < 0.3:
            del parent[key]
        else:
            parent[key] = self.literal()
        return f"{[*parents, key]} odd"

    def header(self, file: Path) -> str:
        """A tensor's shape, dtype or place in the weight file, which stays a valid one."""
        whole = file.read_bytes()
        (length,) = struct.unpack("<Q", whole[:8])
        data = json.loads(whole[8 : 8 + length])
        name = self.chance.choice([k for k in data if k != "__metadata__"])
        entry = data[name]
        kind = self.chance.randrange(5)
        if kind == 0:
            self.chance.shuffle(entry["shape"])
        elif kind == 1:
            entry["shape"] = self._factors(math.prod(entry["shape"]))
        elif kind == 2:
            alike = {"F32": ("I32", "U32"), "U32": ("I32", "F32"), "BF16": ("F16", "I16"),
                     "I32": ("F32", "U32")}.get(entry["dtype"], ("F32",))  # fmt: skip
            entry["dtype"] = self.chance.choice(alike)
        elif kind == 3:
            other = self.chance.choice([k for k in data if k != "__metadata__"])
            data[name], data[other] = data[other], data[name]
        else:
            low, high = entry["data_offsets"]
            noise = self.chance.randbytes(high - low)
            at = 8 + length + low
            whole = whole[:at] + noise + whole[at + high - low :]
        text = json.dumps(data).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        return f"header {name}: {kind} {data[name]}"

    def _factors(self, count: int) -> list[int]:
        divisors = [n for n in range(1, min(count, 65)) if count % n == 0] or [1]
        n = self.chance.choice(divisors)
        return self.chance.choice([[count], [n, count // n], [count // n, n], [1, n, count // n]])

    def config(self, data: Any) -> str:
        """The table that says how weights were quantized."""
        table = data.get("quantization")
        if not table or self.chance.random() < 0.2:
            data["quantization"] = {"group_size": self.chance.choice(INTS[:12]), "bits": 4}
        else:
            key = self.chance.choice(("group_size", "bits", "mode"))
            modes, numbers = ("mxfp4", "nvfp4", "mxfp8", "x"), (*INTS[:17], 32, 16, 8, 4, 6)
            table[key] = self.chance.choice(modes if key == "mode" else numbers)
        return f"quantization {data['quantization']!r:.80}"

    def inputs(self, values: dict[str, Any]) -> str:
        """A keyword input's values, shape or dtype."""
        import mlx.core as mx

        name = self.chance.choice(list(values))
        x = values[name]
        if not isinstance(x, mx.array):
            values[name] = self.chance.choice(INTS)
        elif self.chance.random() < 0.5:
            odd = self.chance.choice((*INTS, math.nan, math.inf, -math.inf, 1e30))
            values[name] = mx.full(x.shape, odd, mx.float32).astype(x.dtype)
        elif self.chance.random() < 0.5:
            shape = list(x.shape) or [1]
            shape[self.chance.randrange(len(shape))] = self.chance.choice((0, 1, 2, 3, 17, 33))
            values[name] = mx.zeros(shape, x.dtype)
        else:
            values[name] = x.astype(getattr(mx, self.chance.choice(("int32", "bool_", "uint8"))))
        return f"input {name}"


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in data if isinstance(data, dict) else range(len(data)):
        yield (*path, key)
        if isinstance(data[key], (dict, list)):
            yield from _places(data[key], (*path, key))


# ---- running one --------------------------------------------------------------------------------


@dataclass
class Subject:
    """A worker's own copy of a component, restored behind each mutation."""

    folder: Path
    whole: dict[str, bytes] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from mlxconv.runtime.bench.examples import Sizes, make_example
        from mlxconv.runtime.bundle import load_component

        names = (PROGRAM, WEIGHTS, "config.json")
        self.whole = {name: (self.folder / name).read_bytes() for name in names}
        component = load_component(self.folder)
        for name in component.entries:
            items = [e for e in component.program.entries if e.name == name]
            names = {size for e in items for i in e.inputs for size in i.type.dims or ()}
            sizes = Sizes(None, {n: size for n, size in DIMS.items() if n in names})
            example = make_example(component.program, component.config, name, sizes)
            self.given[name] = example.at_step(0)

    def restore(self) -> None:
        for name, data in self.whole.items():
            (self.folder / name).write_bytes(data)


def mutate(subject: Subject, chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Change the component's files and inputs; what was changed, and the inputs."""
    mutator, said = Mutator(chance), []
    given = {name: dict(values) for name, values in subject.given.items()}
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        kind = chance.random()
        if kind < 0.8:
            file = subject.folder / PROGRAM
            data = json.loads(file.read_text())
            try:
                said.append(mutator.program(data))
            except (KeyError, TypeError, IndexError, AttributeError, ValueError):
                said.append("nothing more")  # an earlier change left no such place
            file.write_text(json.dumps(data))
        elif kind < 0.9:
            try:
                said.append(mutator.header(subject.folder / WEIGHTS))
            except (KeyError, TypeError):
                said.append("nothing more")
        elif kind < 0.93:
            data = json.loads((subject.folder / "config.json").read_text())
            said.append(mutator.config(data))
            (subject.folder / "config.json").write_text(json.dumps(data))
        else:
            said.append(mutator.inputs(given[chance.choice(list(given))]))
    return "; ".join(said), given


def execute(folder: Path, given: dict[str, Any], chance: random.Random) -> None:
    """Open the component and run one of its entries: whole, streamed, or by stages."""
    import mlx.core as mx

    from mlxconv.runtime.bundle import load_component
    from mlxconv.runtime.generate.staging import Staged

    way = chance.random()
    component = load_component(folder, stream=way < 0.1)
    name = chance.choice(list(given))
    if way < 0.7:
        mx.eval(component.executor(name, **given[name]))
        return
    begun = Staged(component, name, compile="off").begin(given[name])
    mx.eval(begun.at({})(0, **given[name]))


def one(
    subject: Subject, seed: int, number: int, announce: Callable[[str], None] = print
) -> tuple[str, str]:
    """What became of a mutation (`ran`, `refused`, or the fault), and what it was.

    `announce` gets what was changed before it is run.
    """
    from mlxconv.runtime.errors import MlxconvError

    chance = random.Random(f"{seed}/{number}")
    said = ""
    before, began = _reset_peak(), time.process_time()
    try:
        said, given = mutate(subject, chance)
        said = f"{subject.folder.name}: {said}"
        announce(said)
        execute(subject.folder, given, chance)
        outcome = "ran"
    except MlxconvError:
        outcome = "refused"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"[:300]
    finally:
        subject.restore()
    spent, grown = time.process_time() - began, (_peak() - before) / 1024
    if spent > SECONDS:
        outcome = f"{spent:.1f} s"
    if grown > MEBIBYTES:
        outcome = f"{grown:.0f} MiB"
    return outcome, said


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _reset_peak() -> int:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


# ---- many ---------------------------------------------------------------------------------------


_LANE = 1024  # bytes of the shared memory in which a worker says where it is


def _say(at: mmap.mmap, lane: int, number: int, said: str = "") -> None:
    text = said.encode()[: _LANE - 12]
    record = struct.pack("<qI", number, len(text)) + text
    at[_LANE * lane : _LANE * lane + len(record)] = record


def _said(at: mmap.mmap, lane: int) -> tuple[int, str]:
    number, length = struct.unpack_from("<qI", at, _LANE * lane)
    text = at[_LANE * lane + 12 : _LANE * lane + 12 + length]
    return number, text.decode(errors="replace")


@dataclass
class Find:
    """A mutation that ended in neither a result nor a refusal; the state before its process died
    may be an earlier one's doing."""

    number: int
    outcome: str
    said: str = ""


def _worker(
    folders: list[Path], seed: int, numbers: Sequence[int], at: mmap.mmap, lane: int, out: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.setsid()
    root = Path(tempfile.mkdtemp(prefix=f"lane{lane}-", dir=folders[0].parents[1]))
    try:
        subjects = [
            Subject(Path(shutil.copytree(f, root / f"{i}-{f.parent.name}")))
            for i, f in enumerate(folders)
        ]
        for number in numbers:
            _say(at, lane, number)
            announce = partial(_say, at, lane, number)
            outcome, said = one(subjects[number % len(subjects)], seed, number, announce)
            out.send((number, outcome, said))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    out.close()


def _supervise(
    folders: list[Path], seed: int, numbers: list[int], at: mmap.mmap, lane: int,
    report: Callable[[int, str, str], None],
) -> Iterator[None]:
    """One lane: a process after the other until all numbers are done. Yields while it waits."""
    context = multiprocessing.get_context("fork")
    while numbers:
        receiver, sender = context.Pipe(duplex=False)
        _say(at, lane, -1)
        process = context.Process(
            target=_worker, args=(folders, seed, numbers, at, lane, sender)
        )
        process.start()
        sender.close()
        last, heard = -1, time.monotonic()
        while True:
            if receiver.poll(0.05):
                try:
                    last, outcome, said = receiver.recv()
                except EOFError:
                    break
                heard = time.monotonic()
                report(last, outcome, said)
            elif time.monotonic() - heard > HANG:
                process.kill()
            yield
        process.join()
        number, said = _said(at, lane)
        if process.exitcode == 0:
            return
        if number == -1:
            raise RuntimeError(f"the worker did not start (exit code {process.exitcode})")
        code = -(process.exitcode or 0)
        name = signal.Signals(code).name if code > 0 else f"exit code {process.exitcode}"
        if number != last:
            report(number, f"died: {name}", said)
        numbers = [n for n in numbers if n > max(number, last)]


def fuzz(
    folders: list[Path], count: int, seed: int = 0, jobs: int = 2, first: int = 0,
    on_find: Callable[[Find], None] = lambda find: None,
) -> tuple[Counter[str], list[Find]]:  # fmt: skip
    """Run mutations `first` to `first + count`; how many ended how, and the finds."""
    counts: Counter[str] = Counter()
    finds: list[Find] = []

    def report(number: int, outcome: str, said: str) -> None:
        counts[outcome if outcome in ("ran", "refused") else "found"] += 1
        if outcome not in ("ran", "refused"):
            finds.append(Find(number, outcome, said))
            on_find(finds[-1])

    at = mmap.mmap(-1, _LANE * jobs)
    numbers = range(first, first + count)
    lanes = [
        _supervise(folders, seed, list(numbers[lane::jobs]), at, lane, report)
        for lane in range(jobs)
    ]
    while lanes:
        for lane in list(lanes):
            if next(lane, lanes) is lanes:
                lanes.remove(lane)
    return counts, finds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="Run this mutation alone, in this process.")
    bundles = Path(tempfile.gettempdir()) / "fuzz-bundles"
    parser.add_argument("--bundles", type=Path, default=bundles, help="Made there, or kept.")
    options = parser.parse_args()
    # In a process of its own: one that has used MLX cannot be forked.
    builder = multiprocessing.get_context("spawn").Process(target=build, args=(options.bundles,))
    builder.start()
    builder.join()
    folders = build(options.bundles)
    if options.only is not None:
        shutil.copytree(options.bundles, options.bundles.with_name("only"), dirs_exist_ok=True)
        moved = build(options.bundles.with_name("only"))
        print(*one(Subject(moved[options.only % len(moved)]), options.seed, options.only))
        return 0
    counts, finds = fuzz(
        folders, options.count, options.seed, options.jobs, options.first,
        lambda find: print(find.number, find.outcome, "|", find.said, flush=True),
    )  # fmt: skip
    print(dict(counts), f"{len(finds)} finds", flush=True)
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
