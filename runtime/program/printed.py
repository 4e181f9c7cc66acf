"""A program as pseudo-Python, to be read."""

from .program import STAGES, Arg, Node, Program, Ref, Weight
from .stages import value_stages


def _show(arg: Arg) -> str:
    match arg:
        case Ref(name):
            return name
        case Weight(name):
            return f"W[{name}]"
        case tuple():
            return "[" + ", ".join(_show(item) for item in arg) + "]"
        case _:
            return repr(arg)


def _show_node(node: Node, stage: str) -> str:
    left = ", ".join(node.out)
    if node.op == "call":
        inputs = ", ".join(_show(a) for a in node.args["inputs"])  # type: ignore[union-attr]
        right = f"{node.args['block']}[{node.args['prefix']}]({inputs})"
    else:
        right = f"{node.op}({', '.join(f'{k}={_show(v)}' for k, v in node.args.items())})"
    types = ", ".join(str(t) for t in node.types if t)
    note = " · ".join(part for part in (types, stage) if part)
    return f"    {left} = {right}" + (f"  # {note}" if note else "")


def show(program: Program) -> str:
    """The program as pseudo-Python, with types and the stage at which each value is known."""
    lines = [f"# {program.class_name}: {program.count_nodes()} nodes"]
    for name, block in program.blocks.items():
        lines.append(f"\ndef {name}({', '.join(block.inputs)}):")
        lines += [_show_node(node, "") for node in block.nodes]
        lines.append(f"    return {', '.join(_show(a) for a in block.outputs)}")
    for entry in program.entries:
        sizes = f"  # sizes {entry.sizes}" if entry.sizes else ""
        inputs = ", ".join(f"{i.name}: {i.type}" for i in entry.inputs)
        lines.append(f"\ndef {entry.name}({inputs}):{sizes}")
        lines += [f"    # traced for {text}" for text in entry.assumptions]
        stages = value_stages(program, entry)
        for node in entry.nodes:
            latest = max((stages[name] for name in node.out), default=0)
            lines.append(_show_node(node, STAGES[latest]))
        lines.append(f"    return {', '.join(_show(a) for a in entry.outputs)}")
    return "\n".join(lines)
