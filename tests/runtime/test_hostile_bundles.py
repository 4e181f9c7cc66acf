"""A bundle is data from anywhere: it is run or refused, in bounded time and memory."""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxconv.runtime.bundle import LoadedComponent, load_component, open_bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.staging import Staged

from ..bundles import PROGRAM, WEIGHTS, change_json, read_json
from ..bundles import copy as copied
from ..conftest import Bundles

SECONDS, MEBIBYTES = 5.0, 400
Change = Callable[[Any], Any]


@pytest.fixture
def bundle(flux_bundle: Bundles, tmp_path: Path) -> Iterator[Path]:
    """One that may be spoiled. Whatever is done to it ends soon, and does not fill the memory."""
    path = copied(flux_bundle("4bit"), tmp_path)
    before, began = _peak(), time.process_time()
    yield path
    assert time.process_time() - began < SECONDS
    assert _peak() - before < MEBIBYTES


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def inputs(component: LoadedComponent) -> dict[str, mx.array]:
    """What the tiny transformer takes: two rows of three tokens, a prompt of four."""
    sizes = {"batch": 1, "image_tokens": 6, "text_tokens": 4}
    found = {}
    for item in component.program.entry("forward").inputs:
        known = [sizes.get(size) or int(size) for size in item.type.dims or ()]
        found[item.path] = mx.full(known, 0.5)
    return found


def run(bundle: Path, given: dict[str, mx.array] | None = None) -> None:
    """Everything that happens to a program: opened, called, split by stage, prepared."""
    component = load_component(bundle, "transformer")
    given = inputs(component) if given is None else given
    mx.eval(component(**given))
    Staged(component).begin(given)


# ---- programs ---------------------------------------------------------------------------------


def node(op: str, args: dict[str, Any], out: tuple[str, ...] = ("h",)) -> list[Any]:
    return [op, list(out), args, "", []]


def first(*nodes: list[Any]) -> Change:
    """The forward begins with these nodes."""

    def change(data: Any) -> None:
        data["entries"][0]["nodes"][:0] = nodes

    return change


def doubling(blocks: int) -> Change:
    """Each block calls the next one twice."""

    def change(data: Any) -> None:
        for i in range(blocks):
            data["blocks"][f"b{i}"] = _block(_call(f"b{i + 1}"), _call(f"b{i + 1}"))
        data["blocks"][f"b{blocks}"] = _block()
        data["entries"][0]["nodes"].insert(0, _call("b0"))

    return change


def _call(block: str) -> list[Any]:
    return node("call", {"block": f"={block}", "inputs": [], "prefix": "="}, ())


def _block(*nodes: list[Any]) -> dict[str, Any]:
    return {"inputs": [], "outputs": [], "taps": {}, "nodes": list(nodes)}


def circle(data: Any) -> None:
    data["blocks"].update(one=_block(_call("two")), two=_block(_call("one")))


def nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


def assuming(text: str) -> Change:
    def change(data: Any) -> None:
        data["entries"][0]["assumptions"] = [text]

    return change


SQUARINGS = [
    node("mul", {"a": f"%n{i}", "b": f"%n{i}"}, (f"n{i + 1}",)) for i in range(70)
]  # fmt: skip
PROGRAMS: dict[str, tuple[Change, str]] = {
    "a huge array": (
        first(node("full", {"shape": [2**30, 2**30, 2**30], "value": 0, "dtype": "=float32"})),
        "this machine has",
    ),
    "a huge axis": (
        first(node("full", {"shape": [2**40], "value": 0, "dtype": "=float32"})),
        "shape is 1099511627776, expected",
    ),
    "a huge range": (
        first(node("arange", {"start": 0, "stop": 2**50, "step": 1, "dtype": "=float32"})),
        "elements are more than",
    ),
    "endless steps": (
        first(node("arange", {"start": 0, "stop": 1, "step": 1e-300, "dtype": "=float32"})),
        "elements are more than",
    ),
    "too many points": (
        first(node("linspace", {"start": 0, "stop": 1, "count": 2**50, "dtype": "=float32"})),
        "elements are more than",
    ),
    "a number that grows": (
        first(node("size_floor", {"x": 3}, ("n0",)), *SQUARINGS),
        "beyond 64 bits",
    ),
    "a power of sizes": (first(node("pow", {"a": 10, "b": 2**40})), "a power or shift"),
    "a shift of sizes": (first(node("left_shift", {"a": 1, "b": 2**40})), "a power or shift"),
    "text for a number": (first(node("mul", {"a": "=x", "b": 2**40})), "arrays or numbers"),
    "a list for a number": (first(node("mul", {"a": [0], "b": 2**40})), "arrays or numbers"),
    "a number of many digits": (first(node("neg", {"x": 10**400})), "beyond 64 bits"),
    "a million slices": (
        first(
            node("full", {"shape": [2**27], "value": 0, "dtype": "=bool"}, ("w",)),
            node("unbind", {"x": "%w", "axis": 0}),
        ),
        "elements are more than",
    ),
    "a deep argument": (first(node("neg", {"x": nested(200)})), "nested deeper"),
    "blocks that double": (doubling(40), "runs [0-9]+ nodes a call"),
    "blocks nested deep": (doubling(60), "nested deeper than 50"),
    "a circle of blocks": (circle, "calls itself"),
    "too many nodes": (first(*[node("neg", {"x": 1})] * 100_001), "nodes, more than"),
    "an op of Python": (first(node("__import__", {"name": "=os"})), "unknown op"),
    "an attribute for a dtype": (
        first(node("cast", {"x": 1, "dtype": "=load"})),
        "unknown dtype",
    ),
    "an assumption of Python": (assuming("__import__('os')"), "no condition on its inputs"),
    "an assumption on other things": (assuming("secret > 4"), "no condition on its inputs"),
    "an assumption without end": (assuming("1+" * 10**6 + "1"), "no condition on its inputs"),
    "a deep assumption": (assuming("(" * 480 + ")" * 480), "does not parse"),
    "an assumption on no axis": (assuming("hidden_states[99] > 1"), "recipe expression .*range"),
    "results that are not there": (
        first(node("neg", {"x": 1}, ("h", "k"))),
        "names 2 results",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_refused(name: str, bundle: Path) -> None:
    change, message = PROGRAMS[name]
    change_json(bundle / "transformer" / PROGRAM, change)
    with pytest.raises(MlxconvError, match=message):
        run(bundle)


def test_json_that_never_ends(bundle: Path) -> None:
    for text, message in (("[" * 10**6, "not JSON"), ('{"a":' * 10**5, "not JSON")):
        (bundle / "transformer" / PROGRAM).write_text(text, encoding="utf-8")
        with pytest.raises(MlxconvError, match=message):
            run(bundle)


def test_a_file_larger_than_any_program_is_not_read(bundle: Path) -> None:
    for file in (bundle / "mlxconv.json", bundle / "transformer" / PROGRAM):
        whole = file.read_bytes()
        with file.open("r+b") as stream:
            stream.truncate(10 << 30)  # sparse: 10 GB that take no room
        with pytest.raises(MlxconvError, match=f"{file.name}: has 10737418240 bytes"):
            run(bundle)
        file.write_bytes(whole)


# ---- names and weight files -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../transformer", "/etc", "a/b", "a\\b", "..", ".git", "", "a:b"])
def test_a_component_is_a_folder_of_the_bundle(name: str, bundle: Path) -> None:
    def rename(manifest: Any) -> None:
        manifest["components"] = {name: manifest["components"]["transformer"]}

    change_json(bundle / "mlxconv.json", rename)
    with pytest.raises(MlxconvError, match="not a folder inside this one"):
        open_bundle(bundle)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(copied=[["vae"]]), "is not a folder inside this one"),
        (lambda m: m.update(copied=None), "copied is None, not a list"),
        (lambda m: m.update(source_card=[]), r"source_card is \[\], not a dict"),
        (lambda m: m.update(revision=5), "revision is 5, not a str"),
        (lambda m: m["components"].update(transformer=5), "transformer: 5 is not a table"),
        (lambda m: m["components"]["transformer"].update(unused=5), "transformer: unused is 5"),
    ],
)
def test_the_manifest_holds_what_its_keys_say(
    change: Callable[[Any], None], says: str, bundle: Path
) -> None:
    change_json(bundle / "mlxconv.json", change)
    with pytest.raises(MlxconvError, match=rf"mlxconv\.json: .*{says}"):
        open_bundle(bundle)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
def test_a_shard_is_a_file_of_its_folder(name: str, bundle: Path) -> None:
    def rename(index: Any) -> None:
        index["weight_map"][next(iter(index["weight_map"]))] = name

    change_json(bundle / "transformer" / f"{WEIGHTS}.index.json", rename)
    with pytest.raises(MlxconvError, match="not a file of this folder"):
        run(bundle)


def header(change: Change) -> Callable[[Path], None]:
    """Rewrite a weight file's header; the data stay."""

    def rewrite(file: Path) -> None:
        whole = file.read_bytes()
        (length,) = struct.unpack("<Q", whole[:8])
        data = json.loads(whole[8 : 8 + length])
        text = json.dumps(change(data) or data).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])

    return rewrite


def _tensor(**fields: Any) -> Callable[[Path], None]:
    def change(data: Any) -> None:
        next(v for k, v in data.items() if k != "__metadata__").update(fields)

    return header(change)


HEADERS: dict[str, Callable[[Path], None]] = {
    "a shape larger than its data": _tensor(shape=[2**20, 2**20]),
    "a shape that overflows": _tensor(shape=[2**62, 4, 2]),
    "offsets beyond the file": _tensor(data_offsets=[0, 2**50]),
    "offsets backwards": _tensor(data_offsets=[64, 0]),
    "negative sizes": _tensor(shape=[-1, -8]),
    "an unknown dtype": _tensor(dtype="F1024"),
    "a length of everything": lambda f: f.write_bytes(b"\xff" * 7 + b"\x0f" + f.read_bytes()[8:]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_weight_file_is_refused(name: str, bundle: Path) -> None:
    HEADERS[name](bundle / "transformer" / WEIGHTS)
    with pytest.raises(MlxconvError, match=WEIGHTS):
        run(bundle)


# ---- anything at all --------------------------------------------------------------------------

ODD = (2**62, 10**6, -1, 0, [], {}, "", "x" * 999, None, True, 1e308, float("nan"), [[1]], "%x",
       "@x", "=x", "../../etc/passwd", [10**5] * 8, [2**20, 2**20])  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in data if isinstance(data, dict) else range(len(data)):
        yield (*path, key)
        if isinstance(data[key], (dict, list)):
            yield from places(data[key], (*path, key))


def spoiled(data: Any, chance: random.Random) -> Any:
    """The data with one place left out, moved, or made odd."""
    data = copy.deepcopy(data)
    paths = list(places(data))
    *parents, key = chance.choice(paths)
    parent, other = data, data
    for step in parents:
        parent = parent[step]
    for step in chance.choice(paths):
        other = other[step]
    kind = chance.random()
    if kind < 0.15:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(other if kind < 0.35 else chance.choice(ODD))
    return data


@pytest.mark.parametrize("file", ["program.json", "config.json", f"{WEIGHTS}.index.json"])
def test_whatever_a_file_says_it_is_run_or_refused(file: str, bundle: Path) -> None:
    target, chance = bundle / "transformer" / file, random.Random(7)
    whole, given = read_json(target), inputs(load_component(bundle, "transformer"))
    refused = 0
    for _ in range(40):
        target.write_text(json.dumps(spoiled(whole, chance)), encoding="utf-8")
        try:
            run(bundle, given)
        except MlxconvError:
            refused += 1
    assert 8 < refused < 40
