"""Each folder imports only what stands above it in the list (docs/ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUNTIME = (
    "errors", "interrupts", "files", "cache_folders", "dtypes", "headers", "ops", "machine",
    "program", "exec", "hub", "bundle", "schedulers", "generate", "bench",
)  # fmt: skip
CONVERT = (
    "report", "templates", "source", "recipe", "trace/patches", "trace", "lower", "quantize",
    "store", "conversion", "inspection", "into_diffusers", "verify", "publish", "catalog", "demo",
    "peers",
)  # fmt: skip
ORDER = [*(f"runtime/{name}" for name in RUNTIME), *(f"convert/{name}" for name in CONVERT)]
# What commands are made of: only the command line imports these, and one of them another.
LEAVES = ("convert/publish", "convert/catalog", "convert/demo", "convert/peers", "runtime/bench")
FILES = sorted(
    path.relative_to(ROOT)
    for top in ("convert", "runtime")
    for path in (ROOT / top).rglob("*.py")
    if path.parent != ROOT / top or path.name != "__init__.py"
)


def place(module: str) -> str:
    """The entry of ORDER that a module, as a path, belongs to."""
    found = [name for name in ORDER if module == name or module.startswith(f"{name}/")]
    assert found, f"{module} has no place in the order"
    return max(found, key=len)


def imported(file: Path, text: str) -> set[str]:
    """Modules of convert/ and runtime/ that a file imports, as paths, inside functions too."""
    found = set()
    package = file.parts[:-1]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            parts = package[: len(package) - node.level + 1] + parts
        elif parts[:1] == ("mlxconv",):
            parts = parts[1:]
        else:
            continue
        for name in node.names:
            module = "/".join((*parts, name.name))
            known = (ROOT / module).is_dir() or (ROOT / f"{module}.py").is_file()
            found.add(module if known else "/".join(parts))
    return {module for module in found if "/" in module}


def wrong(file: Path, text: str) -> list[str]:
    here = place(str(file.with_suffix("")))
    places = {module: place(module) for module in imported(file, text)}
    return [
        module
        for module, there in places.items()
        if ORDER.index(there) > ORDER.index(here) or (there in LEAVES and here not in LEAVES)
    ]


def test_files_import_only_what_stands_above_them() -> None:
    found = {str(file): wrong(file, (ROOT / file).read_text(encoding="utf-8")) for file in FILES}
    assert {file: modules for file, modules in found.items() if modules} == {}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("runtime/program/stages.py", "from ..exec.executor import Executor"),
        ("convert/source/keys.py", "from mlxconv.convert.lower.compile import Compiled"),
        ("convert/trace/export.py", "def f():\n    from ..lower.aten import builder"),
        ("convert/store/plan.py", "from ..publish.card import card"),
        ("runtime/generate/pipeline.py", "from .. import bench"),
    ],
)
def test_the_rule_finds_what_breaks_it(file: str, line: str) -> None:
    assert len(wrong(Path(file), line)) == 1


def circles(uses: dict[str, set[str]]) -> list[list[str]]:
    """The largest groups of modules that import each other, directly or through others."""
    reach = {module: set(found) for module, found in uses.items()}
    for middle in uses:
        for found in reach.values():
            if middle in found:
                found |= reach[middle]
    groups = {frozenset(m for m in reach[one] if one in reach[m]) for one in uses}
    return sorted(sorted(group) for group in groups if group)


def module_of(file: Path) -> str:
    return str(file.with_suffix("")).removesuffix("/__init__")


def test_no_files_import_each_other() -> None:
    modules = {module_of(file) for file in FILES}
    uses = {
        module_of(file): imported(file, (ROOT / file).read_text(encoding="utf-8")) & modules
        for file in FILES
    }
    assert circles(uses) == []


def test_circles_are_found() -> None:
    uses = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(uses) == [["b", "c"], ["d", "e"]]


LIBRARIES = ("torch", "diffusers", "transformers")
CHANGING = frozenset(
    "set_num_threads set_default_dtype register_pytree_node _private_register_pytree_node "
    "_deregister_pytree_node Library register_fake disable_progress_bar".split()
)


def library_changes(text: str) -> list[int]:
    """Lines that assign to an attribute of a library's module or class, or change its state."""
    tree, names, found = ast.parse(text), set[str](), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in node.names:
                origin = node.module if isinstance(node, ast.ImportFrom) else name.name
                if not getattr(node, "level", 0) and (origin or "").split(".")[0] in LIBRARIES:
                    names.add((name.asname or name.name).split(".")[0])
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = [e for t in node.targets for e in getattr(t, "elts", [t])]
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in CHANGING:
                found.append(node.lineno)
            elif called in ("setattr", "delattr", "replaced", "vars"):
                targets = [ast.Attribute(value=arg) for arg in node.args[:1]]
        for target in targets:
            while isinstance(target, (ast.Attribute, ast.Subscript)):
                target = target.value
                if isinstance(target, ast.Name) and target.id in names:
                    found.append(node.lineno)
    return found


def test_libraries_are_changed_in_one_folder() -> None:
    """`convert/trace/patches/` undoes what it changes: tests/convert/trace/test_patches.py."""
    lines = {str(f): library_changes((ROOT / f).read_text(encoding="utf-8")) for f in FILES}
    found = {file: where for file, where in lines.items() if where}
    assert {f for f in found if not f.startswith("convert/trace/patches/")} == set(), found
    assert found  # those that the rule finds in the folder


def test_the_runtime_names_nothing_of_the_converter() -> None:
    named = [
        str(file)
        for file in FILES
        if file.parts[0] == "runtime"
        and ("mlxconv.convert" in (text := (ROOT / file).read_text()) or '"convert",' in text)
    ]
    assert named == []


def test_each_folder_says_what_it_is_for() -> None:
    folders = {file.parent for file in FILES if len(file.parent.parts) > 1}
    texts = {str(f): (ROOT / f / "__init__.py").read_text(encoding="utf-8") for f in folders}
    assert [f for f, text in texts.items() if not ast.get_docstring(ast.parse(text))] == []
