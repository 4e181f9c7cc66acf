"""A recipe for a class that has none: found by running its forward on tensors without data.

What an argument looks like follows from its name, as diffusers' classes use names: a timestep is
one number a sample, text embeddings are (batch, tokens, width). What a name does not tell, a run
does: each width starts as a number that occurs nowhere else, the error that follows names it
beside the one expected, and a layout that gets the forward further is better than one that does
not. No weight is read and nothing is computed, so a try takes milliseconds.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from mlxconv.runtime.errors import MlxconvError

from ..recipe.reading import parse_recipe, recipe_names
from ..recipe.recipe import Recipe
from .fake_module import Untouchable, build_module, merged_config
from .patches.lean import quiet

_TRIES = 400
# Widths that are not known yet: primes that no model has as a size.
_UNKNOWN = (3517, 3527, 3529, 3533, 3539, 3541, 3547, 3557, 3559, 3571, 3581, 3583)
_TEXT = r"^(encoder|text|txt|prompt|cap|caption|context|cond|cross|class).*"


@dataclass(frozen=True)
class _Guess:
    """What one argument might be: its axes (dims, or "?" for a width to find), and its kind."""

    axes: tuple[str, ...]
    kind: str = "normal"  # normal, time, guidance, ids, tokens, labels, mask, size
    width: int | None = None


@dataclass(frozen=True)
class _Rule:
    """Arguments by name, with the layouts to try, the likeliest first."""

    name: str
    guesses: tuple[_Guess, ...]


def _guesses(*layouts: str, kind: str = "normal") -> tuple[_Guess, ...]:
    return tuple(_Guess(tuple(layout.split()), kind) for layout in layouts)


def _positions(tokens: str) -> tuple[_Guess, ...]:
    axes = (f"{tokens} 3", f"{tokens} 4")
    return _guesses(*axes, *(f"batch {a}" for a in axes), f"batch {tokens}", kind="ids")


_IMAGE = _guesses(
    "batch ? height width",
    "batch image_tokens ?",
    "batch ? frames height width",
    "batch frames ? height width",
    "batch ? length",
    "batch ?",
)
_TOKENS = _guesses("batch text_tokens ?", "batch ?", "batch batch text_tokens ?")
_RULES = (
    _Rule(r"^(hidden_states|sample|x|z|latents?|img|.*latents?|noisy.*)$", _IMAGE),
    _Rule(r"^(timesteps?|t|time|sigmas?|.*_timesteps?)$", _guesses("batch", kind="time")),
    _Rule(r"^.*guidance.*$", _guesses("batch", kind="guidance")),
    _Rule(r"^input_ids$", _guesses("batch text_tokens", kind="tokens")),
    _Rule(
        r"^attention_mask$",
        (
            *_guesses("batch text_tokens", kind="token_mask"),
            *_guesses("batch image_tokens", kind="mask"),
        ),
    ),
    _Rule(r"^(class_labels|labels)$", _guesses("batch", kind="labels")),
    _Rule(r"^(txt|text|encoder|prompt).*ids$", _positions("text_tokens")),
    _Rule(r"^.*ids$", _positions("image_tokens")),
    _Rule(_TEXT + "mask$", _guesses("batch text_tokens", kind="mask")),
    _Rule(r"^.*mask$", _guesses("batch text_tokens", "batch image_tokens", kind="mask")),
    _Rule(r"^(pooled.*|y|.*_pooled.*|vector.*)$", _guesses("batch ?", "batch text_tokens ?")),
    _Rule(
        r"^(height|width|frames|num_frames|post_patch_(height|width))$", _guesses("", kind="size")
    ),
    _Rule(_TEXT, _TOKENS),
)
_OTHER = _guesses(
    "batch ?", "batch text_tokens ?", "batch", "batch ? height width", "batch image_tokens ?"
)
# Arguments that may be None and yet carry the model's input.
_EXPECTED = re.compile(r"^(hidden_states|sample|x|timesteps?|t|encoder_hidden_states|input_ids)$")


_Given = dict[str, _Guess]
_Place = tuple[int, int]  # modules that returned, line of the forward
_Try = tuple[_Place, str]
_NOWHERE = (0, 0)


# --- deriving ---------------------------------------------------------------------------------


def derive_recipe(
    cls: type[nn.Module], config: Mapping[str, Any], library: str = "diffusers"
) -> tuple[Recipe, str]:
    """The recipe of a class at one configuration, and its text as TOML.

    Raises MlxconvError where no layout of the arguments takes the forward to its end: it says how
    far the best one came, and why not further.
    """
    search = _Search(cls, config)
    found = search.run()
    text = _Text(cls, config, library, found, search).toml()
    return parse_recipe(text, f"the recipe derived for {cls.__name__}"), text


def new_recipe(class_name: str, config: Path | None = None, *, derive: bool = False) -> str:
    """The text of the shipped recipe of a class, or of one derived for it.

    class_name: of diffusers or transformers, or `module:Class`. config: a config.json, or a folder
    that has one; by default the constructor's defaults. derive: do so even where one is shipped.
    """
    from mlxconv.runtime.files import read_json

    from ..source.model_class import constructing, named_class

    module, colon, name = class_name.rpartition(":")
    if not derive and class_name in recipe_names():
        shipped = files("mlxconv").joinpath("recipes", f"{class_name}.toml")
        return shipped.read_text(encoding="utf-8")
    if colon:
        cls: Any = named_class(module, name)
    else:
        module, cls = _library_class(class_name)
    file = config / "config.json" if config is not None and config.is_dir() else config
    values = read_json(file) if file is not None else {}
    if hasattr(cls, "config_class"):
        with constructing(cls):
            values = cls.config_class.from_dict(values).to_dict()
    else:
        known = inspect.signature(cls).parameters
        values = {k: v for k, v in values.items() if k in known}
    return derive_recipe(cls, values, module)[1]


def _library_class(class_name: str) -> tuple[str, Any]:
    """The library that has a model class of this name, and the class."""
    import transformers

    from ..source.model_class import close_classes, is_model, library_version

    for library in (diffusers, transformers):
        found = getattr(library, class_name, None)
        if is_model(found):
            return library.__name__, found
    installed = " and ".join(map(library_version, ("diffusers", "transformers")))
    raise MlxconvError(
        f"{class_name}: no model class of {installed}"
        f"{close_classes(class_name, diffusers, transformers)}; "
        f"a class of your own is named MODULE:{class_name}"
    )


class _Search:
    """Tries arguments on a module without data until its forward runs."""

    def __init__(self, cls: type[nn.Module], config: Mapping[str, Any]) -> None:
        self.cls, self.config = cls, merged_config(cls, config)
        self.module, self.mode = _shallow(cls, config)
        self.dims = _dims(self.config)
        self.tries = 0
        self.signature = [
            p
            for p in inspect.signature(self.module.forward).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        names = [p.name for p in self.signature]
        self.unknown: dict[str, int] = dict(
            zip(names, _UNKNOWN * (1 + len(names) // len(_UNKNOWN)))
        )

    def run(self) -> _Given:
        """The arguments that work. Each in turn gets the layout that goes furthest."""
        given = {p.name: self.guesses(p.name)[0] for p in self.signature if self.starts(p)}
        reached, error, given = self.settle(given)
        improved = True
        while error and improved:
            improved = False
            for trial in self.neighbours(given, error):
                further, why, settled = self.settle(trial)
                if not why or further > reached:
                    reached, error, given, improved = further, why, settled, True
                    break
        if error:
            raise MlxconvError(
                f"{self.cls.__name__}: no recipe could be derived; its forward gets as far as "
                f"line {reached[1]} with {_shown(given)}{self.left_out(given)}, then: {error}. "
                "Write one (docs/ADDING_A_MODEL.md) and pass it by --recipe FILE"
            )
        return self.with_mask(self.read(given))

    def vocabulary(self) -> int:
        """How many token ids there are."""
        found = getattr(self.module, "get_input_embeddings", lambda: None)()
        return int(getattr(found, "num_embeddings", self.config.get("vocab_size", 100)))

    def read(self, given: _Given) -> _Given:
        """Without the optional arguments that the forward never looks at."""
        optional = [
            p.name
            for p in self.signature
            if p.name in given and p.default is not inspect.Parameter.empty
        ]
        return {k: v for k, v in given.items() if k not in optional or self.reads(given, k)}

    def reads(self, given: _Given, name: str) -> bool:
        """Whether the forward fails when nothing can be done with the argument."""
        return bool(self.attempt(given, untouchable=name)[1])

    def with_mask(self, given: _Given) -> _Given:
        """A class that takes token ids takes their mask, where it has one."""
        if not any(guess.kind == "tokens" for guess in given.values()):
            return given
        masked = {**given, "attention_mask": self.guesses("attention_mask")[0]}
        known = any(p.name == "attention_mask" for p in self.signature)
        return masked if known and not self.attempt(masked)[1] else given

    def left_out(self, given: _Given) -> str:
        """The arguments that were not passed, for messages."""
        names = [p.name for p in self.signature if p.name not in given and p.name != "return_dict"]
        return f" and without {', '.join(names)}" if names else ""

    def starts(self, parameter: inspect.Parameter) -> bool:
        if parameter.name == "return_dict":
            return False
        needed = parameter.default is inspect.Parameter.empty
        embedded = "guidance" in parameter.name and bool(self.config.get("guidance_embeds"))
        return needed or embedded or bool(_EXPECTED.match(parameter.name))

    def guesses(self, name: str) -> tuple[_Guess, ...]:
        rule = next((rule for rule in _RULES if re.match(rule.name, name)), None)
        found = rule.guesses if rule else _OTHER
        if (
            rule is _RULES[0]
            and "patch_size" not in self.config
            and "sample_size" not in self.config
        ):
            found = (found[1], found[0], *found[2:])
        return found

    def neighbours(self, given: _Given, error: str) -> Iterator[_Given]:
        """One argument in another layout; then one more; then one less."""
        for name in given:
            for guess in self.guesses(name):
                if guess.axes != given[name].axes:
                    yield {**given, name: guess}
        for parameter in self.signature:
            if parameter.name not in given and self.may_be_tensor(parameter):
                for guess in self.guesses(parameter.name):
                    yield {**given, parameter.name: guess}
        ids = [p.name for p in self.signature if p.name.endswith("ids") and self.may_be_tensor(p)]
        for layout in range(2):  # positions of text and image belong together
            yield {**given, **{name: self.guesses(name)[layout] for name in ids}}
        for parameter in self.signature:
            if parameter.name in given and parameter.default is not inspect.Parameter.empty:
                yield {k: v for k, v in given.items() if k != parameter.name}

    def may_be_tensor(self, parameter: inspect.Parameter) -> bool:
        told = str(parameter.annotation)
        return parameter.default is None and ("Tensor" in told or "empty" in told or "int" in told)

    def settle(self, given: _Given) -> tuple[_Place, str, _Given]:
        """Run, and put right the widths that errors name; modules done, error, arguments."""
        best = (*self.attempt(given), given)
        for _ in range(3 * len(given)):
            trials = [(*self.attempt(t), t) for t in self.corrected(best[2], best[1])]
            better = [t for t in trials if self.is_better(t, best)]
            if not best[1] or not better:
                break
            best = max(better, key=lambda t: (not t[1], t[0]))
        return best

    def is_better(
        self, trial: tuple[_Place, str, _Given], best: tuple[_Place, str, _Given]
    ) -> bool:
        """Further, or stopped by another width that is not known yet."""
        now, before = _unknown_in(trial[1]), _unknown_in(best[1])
        return not trial[1] or trial[0] > best[0] or (trial[0] == best[0] and bool(now - before))

    def corrected(self, given: _Given, error: str) -> Iterator[_Given]:
        """The arguments with a width that the error names replaced by another number in it."""
        numbers = [int(n) for n in re.findall(r"\d+", error)]
        likely = [n for n in dict.fromkeys(numbers) if n > 1 and not _unknown_in(str(n))]
        for name, guess in given.items():
            own = self.unknown[name]
            # A patch of four pixels shows four times the width.
            times = {n // own for n in numbers if n and n % own == 0}
            if guess.width is None and "?" in guess.axes:
                for width in {n // t for t in times for n in likely if n % t == 0}:
                    yield {**given, name: replace(guess, width=width)}

    def attempt(
        self,
        given: Mapping[str, _Guess],
        dims: Mapping[str, int] | None = None,
        untouchable: str = "",
    ) -> _Try:
        """How far the forward comes, and why no further; empty when all is well."""
        self.tries += 1
        if self.tries > _TRIES:
            return _NOWHERE, f"{_TRIES} layouts were tried"
        done: list[int] = []
        sizes = {**self.dims, **(dims or {})}
        handle = nn.modules.module.register_module_forward_hook(lambda *_: done.append(1))
        try:
            with quiet(), self.mode, torch.no_grad():
                kwargs = {name: self.value(name, guess, sizes) for name, guess in given.items()}
                if any(p.name == "return_dict" for p in self.signature):
                    kwargs["return_dict"] = False
                if untouchable:
                    kwargs[untouchable] = Untouchable()
                self.module(**kwargs)
        except Exception as error:  # whatever a class raises on inputs that do not fit
            lines = str(error).strip().splitlines()
            line = self.line(error)
            return (len(done), line), f"{type(error).__name__}: {lines[0] if lines else ''}"
        finally:
            handle.remove()
        return (len(done), 0), ""

    def line(self, error: Exception) -> int:
        """The line of the class's own forward where it was left."""
        file = inspect.getsourcefile(self.cls)
        frames = traceback.extract_tb(error.__traceback__)
        own = [f.lineno or 0 for f in frames if f.filename == file and f.name == "forward"]
        return own[0] if own else 0

    def value(self, name: str, guess: _Guess, dims: Mapping[str, int]) -> Any:
        if guess.kind == "size":
            return dims.get(name.removeprefix("post_patch_").removeprefix("num_"), 1)
        sizes = [self.size(name, guess, axis, dims) for axis in guess.axes]
        kinds = {
            **dict.fromkeys(("tokens", "labels", "token_mask"), torch.int64),
            "mask": torch.bool,
        }
        dtype = {"time": torch.float32, "guidance": torch.float32}.get(guess.kind, torch.bfloat16)
        return torch.empty(sizes, dtype=kinds.get(guess.kind, dtype))

    def size(self, name: str, guess: _Guess, axis: str, dims: Mapping[str, int]) -> int:
        if axis == "?":
            return guess.width or int(self.unknown[name])
        return dims[axis] if axis in dims else int(axis)


def _unknown_in(error: str) -> frozenset[int]:
    numbers = {int(n) for n in re.findall(r"\d+", error)}
    return frozenset(u for u in _UNKNOWN if any(n and n % u == 0 for n in numbers))


def _shown(given: Mapping[str, _Guess]) -> str:
    return ", ".join(
        f"{name} ({', '.join(str(guess.width or a) if a == '?' else a for a in guess.axes)})"
        for name, guess in given.items()
    )


def _shallow(cls: type[nn.Module], config: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """The module with two blocks a list where that can be built: what fails, fails early."""
    fewer = {
        key: 2
        for key, value in merged_config(cls, config).items()
        if re.search(r"(layers|depth|blocks)$", key) and type(value) is int and value > 2
    }
    try:
        return build_module(cls, {**config, **fewer})
    except MlxconvError:
        return build_module(cls, config)


def _dims(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes to run at, multiples of the patch, and of what a UNet or a VAE halves them by."""
    step = _step(config)
    return {
        "batch": 2,
        "height": 6 * step,
        "width": 4 * step,
        "frames": 5,
        "length": 8 * step,
        "image_tokens": 26,
        "text_tokens": 11,
    }


def _step(config: Mapping[str, Any]) -> int:
    patch = config.get("patch_size")
    sizes = [n for n in (patch if isinstance(patch, (list, tuple)) else [patch]) if type(n) is int]
    levels = config.get("block_out_channels") or config.get("down_block_types")
    halvings = len(levels) - 1 if isinstance(levels, (list, tuple)) else 0
    step: int = max([1, *sizes]) << max(0, halvings)
    return step


# --- writing it down --------------------------------------------------------------------------

_STAGES = {"time": "schedule"} | dict.fromkeys(("guidance", "ids", "mask", "token_mask"), "prompt")
_CHECKS = {"batch": "[1, 3]", "image_tokens": "[35]", "text_tokens": "[7]", "frames": "[9]"}


@dataclass(frozen=True)
class _Text:
    """The TOML of what a search found."""

    cls: type[nn.Module]
    config: Mapping[str, Any]
    library: str
    found: Mapping[str, _Guess]
    search: _Search

    def toml(self) -> str:
        used = dict.fromkeys(
            axis for guess in self.found.values() for axis in guess.axes if axis in self.search.dims
        )
        left = [
            p.name
            for p in self.search.signature
            if p.name not in self.found and p.name != "return_dict"
        ]
        lines = ["# Derived from the forward's arguments by mlxconv; check what it passes."]
        if left:
            lines.append(f"# Not passed: {', '.join(left)}.")
        lines += [f'class = "{self.cls.__name__}"']
        if self.library != "diffusers":
            lines.append(f'library = "{self.library}"')
        lines += ["", "[dims]", *(self.dim(name) for name in used)]
        lines += ["", "[programs.forward.inputs]"]
        lines += [self.input(n, g) for n, g in self.found.items() if g.kind != "size"]
        lines += ["", "[programs.forward.arguments]"]
        if any(p.name == "return_dict" for p in self.search.signature):
            lines.append("return_dict = false")
        lines += [f'{n} = "{n.split("_")[-1]}"' for n, g in self.found.items() if g.kind == "size"]
        keep, modulation = precise_modules(self.search.module)
        lines += ["", "[precision]", f"keep = {_strings(keep)}"]
        if modulation:
            lines.append(f"modulation = {_strings(modulation)}")
        return "\n".join(lines) + "\n"

    def dim(self, name: str) -> str:
        size, step = self.search.dims[name], _step(self.search.config)
        checks = {
            "height": [4 * step, 9 * step],
            "width": [7 * step, 3 * step],
            "length": [6 * step],
        }
        other = checks.get(name) or [int(n) for n in re.findall(r"\d+", _CHECKS[name])]
        works = [n for n in other if not self.search.attempt(self.found, {name: n})[1]]
        if not works:
            return f"{name} = {{ trace = {size}, fixed = true }}"
        return f"{name} = {{ trace = {size}, check = {works} }}"

    def input(self, name: str, guess: _Guess) -> str:
        shape = [self.axis(axis, guess) for axis in guess.axes]
        fields = [f"shape = [{', '.join(shape)}]"]
        fields += {
            "time": ["value = [0.5, 0.25, 0.75]", 'dtype = "float32"'],
            "guidance": ["value = 4.0", 'dtype = "float32"'],
            "ids": ["integers = [0, 16]"],
            "tokens": [
                f"integers = [0, {self.search.vocabulary()}]",
                'dtype = "int64"',
            ],
            "labels": [
                f"integers = [0, {self.search.config.get('num_classes', 10)}]",
                'dtype = "int64"',
            ],
            "mask": ['mask = "ragged"', 'dtype = "bool"'],
            "token_mask": ['mask = "ragged"', 'dtype = "int64"'],
        }.get(guess.kind, [])
        stage = _STAGES.get(guess.kind) or ("prompt" if self.is_text(name, guess) else None)
        fields += [f'stage = "{stage}"'] if stage else []
        return f"{name} = {{ {', '.join(fields)} }}"

    def is_text(self, name: str, guess: _Guess) -> bool:
        return "text_tokens" in guess.axes or name.startswith("pooled")

    def axis(self, axis: str, guess: _Guess) -> str:
        """A dim by its name, a width by the configuration's name for it where that is unique."""
        if axis != "?":
            return f'"{axis}"' if axis in self.search.dims else axis
        if guess.width is None:  # any will do
            return "8"
        keys = [k for k, v in self.search.config.items() if type(v) is int and v == guess.width]
        return f'"{keys[0]}"' if len(keys) == 1 else str(guess.width)


def _strings(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def precise_modules(module: nn.Module) -> tuple[list[str], list[str]]:
    """Globs of what stays precise: linears outside of blocks, and adaLN's linears inside.

    A block is a member of a module list, at any depth. adaLN is told by the names of its modules.
    """
    lists = {path for path, child in module.named_modules() if isinstance(child, nn.ModuleList)}
    with_blocks = {path.split(".")[0] for path in lists}
    keep: dict[str, None] = {}
    modulation: dict[str, None] = {}
    for path, child in module.named_modules():
        if not isinstance(child, nn.Linear):
            continue
        parts = path.split(".")
        above = {".".join(parts[:i]) for i in range(1, len(parts))}
        if not (above & lists or any(part.isdigit() for part in parts[1:2])):
            whole = len(parts) == 1 or parts[0] in with_blocks
            keep[path if whole else f"{parts[0]}.**"] = None
        elif re.search(r"(^|\.)[\w]*(ada|mod|norm)[\w]*\.", path, re.IGNORECASE):
            members = {i for i in range(1, len(parts)) if ".".join(parts[:i]) in lists | {parts[0]}}
            modulation[
                ".".join(
                    "*" if part.isdigit() and i in members else part for i, part in enumerate(parts)
                )
            ] = None
    return list(keep), list(modulation)
