"""program.json: written, read and validated; whatever a file says is checked here.

The form is versioned; a newer version or an unknown op is refused with what to do.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import MlxconvError
from ..files import read_text
from .expressions import names_in
from .program import (
    FORMAT,
    MAX_DEPTH,
    MAX_INT,
    MAX_NODES,
    MAX_RUN,
    MAX_TEXT,
    VERSION,
    Arg,
    Block,
    Body,
    Entry,
    Input,
    Node,
    Parameter,
    Program,
    Ref,
    Weight,
    refs,
)
from .types import parse_type


def _encode(arg: Arg) -> Any:
    match arg:
        case Ref(name):
            return f"%{name}"
        case Weight(name):
            return f"@{name}"
        case tuple():
            return [_encode(item) for item in arg]
        case str():
            return f"={arg}"
        case float() if not math.isfinite(arg):
            return {"float": repr(arg)}
        case _:
            return arg


def _decode(data: Any, depth: int = 0) -> Arg:
    if depth > MAX_DEPTH:
        raise MlxconvError(f"an argument is nested deeper than {MAX_DEPTH}")
    match data:
        case str() if data[:1] == "%":
            return Ref(data[1:])
        case str() if data[:1] == "@":
            return Weight(data[1:])
        case str() if data[:1] == "=":
            return data[1:]
        case list():
            return tuple(_decode(item, depth + 1) for item in data)
        case {"float": str(text)}:
            return float(text)
        case int() if abs(data) > MAX_INT:
            raise MlxconvError(f"a number beyond 64 bits: {data!s:.30}...")
        case None | bool() | int() | float():
            return data
    raise MlxconvError(f"not an argument: {data!r:.80}")


def _encode_node(node: Node) -> list[Any]:
    args = {key: _encode(value) for key, value in node.args.items()}
    return [node.op, list(node.out), args, node.module, [str(t) for t in node.types]]


def _decode_node(data: Any) -> Node:
    op, out, args, module, types = data
    decoded = {k: _decode(v) for k, v in args.items()}
    return Node(
        _text(op), _texts(out), decoded, _text(module), tuple(map(parse_type, _texts(types)))
    )


def _decode_input(name: str, path: str, type: str, *rest: str) -> Input:
    return Input(name, path, parse_type(type), *rest)


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise MlxconvError(f"not a name: {data!r:.80}")
    return data


def _texts(data: Any) -> tuple[str, ...]:
    if not isinstance(data, list):
        raise MlxconvError(f"not a list of names: {data!r:.80}")
    return tuple(_text(item) for item in data)


def _encode_body(body: Body) -> dict[str, Any]:
    return {
        "nodes": [_encode_node(node) for node in body.nodes],
        "outputs": [_encode(arg) for arg in body.outputs],
        "taps": {path: list(names) for path, names in body.taps.items()},
    }


def _body_fields(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "nodes": [_decode_node(node) for node in data["nodes"]],
        "outputs": tuple(_decode(arg) for arg in data["outputs"]),
        "taps": {path: _texts(names) for path, names in data["taps"].items()},
    }


def to_json(program: Program) -> str:
    """The program as JSON: one node a line, so that a diff of two programs can be read."""
    entries = [
        {
            "name": e.name,
            "sizes": e.sizes,
            "literals": e.literals,
            "arguments": list(e.arguments),
            "assumptions": list(e.assumptions),
            "inputs": [[i.name, i.path, str(i.type), i.stage, i.kinds] for i in e.inputs],
            **_encode_body(e),
        }
        for e in program.entries
    ]
    blocks = {k: {"inputs": list(b.inputs), **_encode_body(b)} for k, b in program.blocks.items()}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "class": program.class_name,
        "entries": entries,
        "blocks": blocks,
        "parameters": {k: [p.kind, p.dtype, p.shape] for k, p in program.parameters.items()},
        "constants": program.constants,
    }
    return _lines(document) + "\n"


def _lines(data: Any, depth: int = 0) -> str:
    """JSON with dictionaries and lists of nodes broken into lines, everything else compact."""
    pad = "\n" + " " * (depth + 1)
    if isinstance(data, dict) and data and depth < 4:
        items = (f"{json.dumps(k)}: {_lines(v, depth + 1)}" for k, v in data.items())
        return "{" + pad + f",{pad}".join(items) + "\n" + " " * depth + "}"
    if isinstance(data, list) and data and isinstance(data[0], (list, dict)) and depth < 4:
        return "[" + pad + f",{pad}".join(_lines(v, depth + 1) for v in data) + "]"
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str, where: str = "program") -> Program:
    """Parse and validate. MlxconvError names `where` and what is wrong with it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MlxconvError(f"{where}: not JSON ({error}); convert the component again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise MlxconvError(f"{where}: not a {FORMAT} file; convert the component again")
    if data.get("version") != VERSION:
        raise MlxconvError(
            f"{where}: program format {data.get('version')!r}, this mlxconv reads {VERSION}; "
            "upgrade mlxconv (`pip install -U mlxconv`) or convert the component again"
        )
    try:
        program = _parse(data)
    except MlxconvError as error:
        raise MlxconvError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise MlxconvError(
            f"{where}: malformed ({type(error).__name__}: {error}); convert the component again"
        ) from error
    validate(program, where)
    return program


def _parse(data: dict[str, Any]) -> Program:
    entries = [
        Entry(
            **_body_fields(e),
            name=_text(e["name"]),
            sizes={str(k): int(v) for k, v in e["sizes"].items()},
            literals=dict(e["literals"]),
            arguments=_texts(e.get("arguments", [])),
            assumptions=_texts(e.get("assumptions", [])),
            inputs=tuple(_decode_input(*_texts(fields)) for fields in e["inputs"]),
        )
        for e in data["entries"]
    ]
    blocks = {
        k: Block(**_body_fields(b), inputs=_texts(b["inputs"])) for k, b in data["blocks"].items()
    }
    parameters = {
        name: Parameter(tuple(int(n) for n in shape), str(dtype), str(kind))
        for name, (kind, dtype, shape) in data["parameters"].items()
    }
    constants = {str(k): str(v) for k, v in data["constants"].items()}
    return Program(str(data["class"]), entries, blocks, parameters, constants)


def load_program(path: Path) -> Program:
    """Read a program file. MlxconvError when it is missing, broken, or of a newer format."""
    return from_json(read_text(path), str(path))


# ---- validation ---------------------------------------------------------------------------------


def validate(program: Program, where: str = "program") -> None:
    """Ops known, values defined before use, calls of blocks that are there, work bounded."""
    from ..ops import OPS

    if program.count_nodes() > MAX_NODES:
        raise MlxconvError(f"{where}: has {program.count_nodes()} nodes, more than {MAX_NODES}")
    _check_calls(program, where)
    for entry in program.entries:
        names = {item.name for item in entry.inputs}
        wrong = [a for a in entry.assumptions if len(a) > MAX_TEXT or not names_in(a) <= names]
        if wrong:
            raise MlxconvError(
                f"{where}: program {entry.name}: {wrong[0]!r:.80} is no condition on its inputs; "
                "convert the component again"
            )
    for label, body in _labelled(program):
        known = {i.name for i in body.inputs} if isinstance(body, Entry) else set(_inputs(body))
        for node in body.nodes:
            at = f"{where}: {label}, node {node.op} {','.join(node.out)}"
            if node.op == "call":
                _check_call(program, node, at)
            elif node.op not in OPS:
                raise MlxconvError(
                    f"{at}: unknown op {node.op!r}; upgrade mlxconv or convert the component again"
                )
            else:
                _check_arguments(node, at)
            missing = set(refs(node.args.values())) - known
            if missing:
                raise MlxconvError(f"{at}: reads {sorted(missing)} before it is computed")
            if not known.isdisjoint(node.out) or len(set(node.out)) < len(node.out):
                raise MlxconvError(f"{at}: gives two values the same name")
            known.update(node.out)
        missing = set(refs(body.outputs)) - known
        if missing:
            raise MlxconvError(f"{where}: {label}: output {sorted(missing)} is never computed")


def _check_arguments(node: Node, at: str) -> None:
    """Arguments that the op takes, and numbers among them that are in its limits."""
    from ..ops import OPS, limits_of, problem

    own = inspect.signature(OPS[node.op]).parameters
    unknown = sorted(set(node.args) - set(own))
    missing = [k for k, p in own.items() if p.default is p.empty and k not in node.args]
    if unknown or missing:
        raise MlxconvError(
            f"{at}: takes {', '.join(own)}, given {', '.join(node.args) or 'nothing'}"
        )
    if any(isinstance(node.args.get(name), (str, tuple)) for name in ("a", "b")):
        raise MlxconvError(f"{at}: a and b are arrays or numbers")
    wrong = problem(limits_of(OPS[node.op], node.op), node.args)
    if wrong:
        raise MlxconvError(f"{at}: {wrong}")


def _inputs(body: Body) -> tuple[str, ...]:
    return body.inputs if isinstance(body, Block) else ()


def _labelled(program: Program) -> Iterator[tuple[str, Body]]:
    for entry in program.entries:
        yield f"program {entry.name}", entry
    for name, block in program.blocks.items():
        yield f"block {name}", block


def _check_call(program: Program, node: Node, at: str) -> None:
    name, inputs = node.args.get("block"), node.args.get("inputs")
    if not isinstance(node.args.get("prefix"), str):
        raise MlxconvError(f"{at}: has no prefix")
    if not isinstance(name, str) or name not in program.blocks:
        raise MlxconvError(f"{at}: calls unknown block {name!r}")
    block = program.blocks[name]
    if not isinstance(inputs, tuple) or len(inputs) != len(block.inputs):
        raise MlxconvError(f"{at}: block {name} takes {len(block.inputs)} inputs")
    if len(node.out) != len(block.outputs):
        raise MlxconvError(f"{at}: block {name} gives {len(block.outputs)} outputs")


def _check_calls(program: Program, where: str) -> None:
    """No block calls itself, and an entry does not run more than MAX_RUN nodes."""
    runs: dict[str, int] = {}

    def count(name: str, path: tuple[str, ...]) -> int:
        if name in path:
            raise MlxconvError(f"{where}: block {name} calls itself")
        if len(path) > 50:
            raise MlxconvError(f"{where}: blocks are nested deeper than 50")
        if name not in runs:
            runs[name] = total(program.blocks[name], (*path, name))
        return runs[name]

    def total(body: Body, path: tuple[str, ...] = ()) -> int:
        called = (str(n.args.get("block")) for n in body.nodes if n.op == "call")
        inside = sum(count(name, path) for name in called if name in program.blocks)
        return len(body.nodes) + inside

    for block in program.blocks:
        count(block, ())
    most = max((total(entry) for entry in program.entries), default=0)
    if most > MAX_RUN:
        raise MlxconvError(f"{where}: runs {most} nodes a call, more than {MAX_RUN}")
