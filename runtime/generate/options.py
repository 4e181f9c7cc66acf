"""The keywords of a pipeline call, in mlxconv's names and in those that diffusers has for them."""

import difflib
import inspect
import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from PIL import Image

from ..errors import ArgumentError
from .denoise import Callback, LoopSettings, Progress
from .families.parts import Inputs
from .phases import Listener

Preview = Callable[[Image.Image, Progress], None]

DIFFUSERS_NAMES = {
    "generator": "seed",
    "guidance_scale": "guidance",
    "max_sequence_length": "tokens",
    "negative_prompt": "negative",
    "num_images_per_prompt": "count",
    "num_inference_steps": "steps",
    "true_cfg_scale": "cfg",
}
_INSTEAD = {"size": "give width= and height="}
_LOOP = LoopSettings()
# What decides a picture beside the prompts, its size, its steps and its seed.
_RECORDED = (
    "guidance",
    "cfg",
    "cfg_end",
    "tokens",
    "scheduler",
    "sigmas",
    "timesteps",
    "decoder",
    "conditioning",
)
_RANDOM_SEEDS = 2**32  # torch uses 32 bits of a seed


@dataclass(frozen=True)
class Options:
    """Keywords of `Pipeline.__call__`, which explains them."""

    prompt: str | Sequence[str] | None = None
    _: KW_ONLY
    negative: str | None = None
    steps: int | None = None
    guidance: float | None = None
    cfg: float | None = None
    cfg_end: float = 1.0
    width: int | None = None
    height: int | None = None
    seed: int | Sequence[int] | None = None
    count: int = 1
    batch: int = 1
    tokens: int | None = None
    scheduler: str | None = None
    sigmas: Sequence[float] | None = None
    timesteps: Sequence[float] | None = None
    decoder: str | Path | None = None
    tile: str | int = "auto"
    preview: Preview | None = None
    callback: Callback | None = None
    listener: Listener | None = None
    embeddings: Inputs | None = None
    negative_embeddings: Inputs | None = None
    conditioning: Mapping[str, Sequence[int]] | None = None
    loop: LoopSettings = _LOOP

    @property
    def prompts(self) -> list[str]:
        """One or several; an empty one where there are embeddings instead."""
        given = [self.prompt or ""] if isinstance(self.prompt, str | None) else list(self.prompt)
        if not given or not all(isinstance(each, str) for each in given):
            raise ArgumentError(f"prompt is {self.prompt!r:.80}: a string, or a list of strings")
        return given

    def recorded(self) -> dict[str, Any]:
        """The keywords, as they were given, without which a picture cannot be made again."""
        return {name: getattr(self, name) for name in _RECORDED}

    def seeds(self) -> list[list[int]]:
        """The seed of each picture, by prompt."""
        if self.count < 1:
            raise ArgumentError(f"count is {self.count}: at least 1")
        prompts = len(self.prompts)
        if isinstance(self.seed, Sequence) and not isinstance(self.seed, str):
            return _shared_out([_seed(each) for each in self.seed], prompts, self.count)
        first = secrets.randbelow(_RANDOM_SEEDS) if self.seed is None else _seed(self.seed)
        return [list(range(first, first + self.count))] * prompts


def _shared_out(seeds: list[int], prompts: int, count: int) -> list[list[int]]:
    each = len(seeds) // prompts
    if not seeds or each * prompts != len(seeds) or count not in (1, each):
        pictures = f"{prompts * count} pictures" + (f" of {prompts} prompts" * (prompts > 1))
        raise ArgumentError(f"{len(seeds)} seeds for {pictures}: give one seed, or one per image")
    return [seeds[i : i + each] for i in range(0, len(seeds), each)]


def _seed(given: Any) -> int:
    """A seed, or that of a fresh torch.Generator on the CPU, whose noise is the same."""
    if hasattr(given, "initial_seed"):
        return _seed_of_generator(given)
    try:
        seed = operator.index(given)
    except TypeError:
        raise ArgumentError(
            f"seed is {given!r:.80}: an integer, or a torch.Generator on the CPU"
        ) from None
    if seed < 0:
        raise ArgumentError(f"seed is {seed}: 0 or more")
    return seed


def _seed_of_generator(given: Any) -> int:
    if str(given.device) != "cpu":
        raise ArgumentError(
            f"the generator is on {given.device}, whose noise differs: create it with "
            "torch.Generator('cpu'), or pass seed"
        )
    seed: int = given.initial_seed()
    fresh = type(given)(device="cpu").manual_seed(seed)
    if not bool((fresh.get_state() == given.get_state()).all()):
        raise ArgumentError("the generator has drawn numbers before: pass a new one, or seed")
    return seed


def several(given: Any) -> tuple[Any, ...]:
    """One name or a sequence of them, as a tuple."""
    return (given,) if isinstance(given, str) else tuple(given)


# ---- a dataclass as a signature ------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])


def spelled_out(options: type) -> Callable[[Function], Function]:
    """A function of `**options` whose signature names the fields of a dataclass instead.

    TypeError for unknown keywords, with the nearest known one.
    """

    def decorated(function: Function) -> Function:
        own = inspect.signature(function)
        *named, _ = own.parameters.values()
        fields = inspect.signature(options).parameters.values()
        more = [field.replace(kind=field.KEYWORD_ONLY) for field in fields]
        added = [field for field in more if field.name not in own.parameters]
        signature = own.replace(parameters=[*named, *added])

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **_renamed(kwargs, signature.parameters, {}))

        called.__signature__ = signature  # type: ignore[attr-defined]
        return cast(Function, called)

    return decorated


P = ParamSpec("P")
Self = TypeVar("Self")
Made = TypeVar("Made")
Taken = TypeVar("Taken")


def takes(
    options: Callable[P, Taken], aliases: Mapping[str, str]
) -> Callable[[Callable[[Self, Taken], Made]], Callable[Concatenate[Self, P], Made]]:
    """A method of one dataclass -> a method whose keywords are the dataclass's fields.

    aliases: other names for them. TypeError for unknown keywords, with the nearest known one.
    """
    own = inspect.signature(options)

    def decorated(method: Callable[[Self, Taken], Made]) -> Callable[Concatenate[Self, P], Made]:
        @wraps(method)
        def called(self: Self, *args: Any, **kwargs: Any) -> Made:
            given = own.bind(*args, **_renamed(kwargs, own.parameters, aliases))
            return method(self, options(*given.args, **given.kwargs))

        first, *_ = inspect.signature(method).parameters.values()
        signature = own.replace(
            parameters=[first, *own.parameters.values()],
            return_annotation=inspect.signature(method).return_annotation,
        )
        called.__signature__ = signature  # type: ignore[attr-defined]
        return cast(Callable[Concatenate[Self, P], Made], called)

    return decorated


def _renamed(
    given: Mapping[str, Any], known: Mapping[str, Any], aliases: Mapping[str, str]
) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for keyword, value in given.items():
        name = aliases.get(keyword, keyword)
        if name not in known:
            near = difflib.get_close_matches(keyword, [*known, *aliases], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            if keyword in _INSTEAD and "width" in known:
                hint = _INSTEAD[keyword]
            raise TypeError(f"unknown keyword {keyword!r}; {hint}")
        if name in renamed:
            other = next(k for k in given if aliases.get(k, k) == name and k != keyword)
            raise TypeError(f"{other!r} and {keyword!r} are the same: give one of them")
        renamed[name] = value
    return renamed
