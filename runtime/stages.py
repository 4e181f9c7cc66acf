"""When each value of a program is known, and so what share of the weights each stage needs."""

import math
from collections.abc import Mapping

from .program import STAGES, Body, Entry, Node, Program, latest_stage, weights

Stages = Mapping[str, int]  # index into STAGES


def weight_stages(program: Program, entry: Entry) -> dict[str, int]:
    """The latest stage that reads each weight of an entry, by index into `STAGES`."""
    found: dict[str, int] = {}
    stages = {i.name: STAGES.index(i.stage) for i in entry.inputs}
    _walk(program, entry, stages, "", found)
    return found


def shares(program: Program) -> dict[str, float]:
    """Share of the parameters that each stage is the last to read, over all entries."""
    latest: dict[str, int] = {}
    for entry in program.entries:
        for name, stage in weight_stages(program, entry).items():
            latest[name] = max(stage, latest.get(name, 0))
    sizes = {name: math.prod(p.shape) for name, p in program.parameters.items()}
    total = sum(sizes[name] for name in latest if name in sizes) or 1
    held = [0] * len(STAGES)
    for name, stage in latest.items():
        held[stage] += sizes.get(name, 0)
    return {stage: count / total for stage, count in zip(STAGES, held)}


def _walk(
    program: Program, body: Body, stages: dict[str, int], prefix: str, found: dict[str, int]
) -> None:
    for node in body.nodes:
        if node.op == "call":
            block = program.blocks[str(node.args["block"])]
            inner = dict(zip(block.inputs, _given(node, stages)))
            path = prefix + str(node.args["prefix"]) + "."
            _walk(program, block, inner, path, found)
        out = _outputs(program, node, stages)
        for name in weights(node.args.values()):
            found[prefix + name] = max(*out, 0, found.get(prefix + name, 0))
        stages.update(zip(node.out, out))


def _given(node: Node, stages: Stages) -> list[int]:
    """The stage of each input of a call."""
    inputs = node.args["inputs"]
    return [latest_stage((arg,), stages) for arg in inputs] if isinstance(inputs, tuple) else []


def _outputs(program: Program, node: Node, stages: Stages) -> list[int]:
    """The stage of each output; a block's may be known at different stages."""
    if node.op != "call":
        return [latest_stage(node.args.values(), stages)] * len(node.out)
    block = program.blocks[str(node.args["block"])]
    inner = dict(zip(block.inputs, _given(node, stages)))
    for each in block.nodes:
        inner.update(zip(each.out, _outputs(program, each, inner)))
    return [latest_stage((output,), inner) for output in block.outputs]
