"""Types of the command-line options.

A value that is wrong whatever the files contain is a usage error (exit 2, naming the option). One
that can only be judged by reading the checkpoint or the bundle is a failure (exit 1).
"""

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import Any, ClassVar, TypeVar

import click

from .runtime.errors import MlxconvError

Value = TypeVar("Value")


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A value parsed by `read`, whose MlxconvError becomes a usage error."""

    def __init__(self, name: str, read: Callable[[str], object]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: Any, ctx: Any) -> object:
        """Parse the text; a default may be parsed already."""
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except MlxconvError as error:
            self.fail(str(error), param, ctx)

    def get_metavar(self, param: Any, ctx: Any = None) -> str:
        """The name unchanged; click would write `WXH`."""
        return self.name


class Integer(click.IntRange):
    """An integer from `min`, which help shows, to `most`."""

    name = "integer"

    def __init__(self, min: int, most: int = 1 << 31) -> None:
        super().__init__(min)
        self.most = most

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Parse and check an integer."""
        number = int(super().convert(value, param, ctx))
        if number > self.most:
            self.fail(f"{value} is more than {self.most}", param, ctx)
        return number


class Number(click.FloatRange):
    """A finite float in a range; click's own type accepts infinity and NaN."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Parse and check a float."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class FloatType(click.Choice):  # type: ignore[type-arg]
    """A float dtype by its short or long name."""

    short: ClassVar = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

    def __init__(self) -> None:
        super().__init__([*self.short, *self.short.values()])

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """`bf16` -> bfloat16."""
        chosen = str(super().convert(value, param, ctx))
        return self.short.get(chosen, chosen)

    def get_metavar(self, param: Any, ctx: Any = None) -> str:
        """Only the short names."""
        return f"[{'|'.join(self.short)}]"


def _checked(function: str) -> Callable[[str], str]:
    """A parser that returns the text unchanged once `module:function` accepts it. The module is
    imported on first use."""
    module, _, name = function.partition(":")

    def read(text: str) -> str:
        getattr(import_module(module, __package__), name)(text)
        return text

    return read


def _integer(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _size(text: str) -> tuple[int, int]:
    """`1024x768` -> (1024, 768)."""
    width, height = map(_integer, text.lower().partition("x")[::2])
    if not (width and height):
        raise MlxconvError(f"{text!r} is not WIDTHxHEIGHT in pixels, such as 1024x768")
    return width, height


def _dim(text: str) -> tuple[str, int]:
    """`batch=2` -> ("batch", 2)."""
    name, _, size = text.partition("=")
    if not (name and _integer(size)):
        raise MlxconvError(f"{text!r} is not NAME=SIZE, such as batch=2")
    return name, _integer(size)


def _setting(text: str) -> tuple[str, str]:
    """`blocks.*.attn.**=8` -> (pattern, bits)."""
    pattern, equals, bits = text.rpartition("=")
    if not (equals and pattern and bits):
        raise MlxconvError(f"{text!r} is not PATTERN=BITS, such as blocks.*.attn.**=8")
    from .convert.quantize.policy import parse_precision

    parse_precision(f"{bits}bit" if bits.isdecimal() else bits)
    return pattern, bits


def _numbers(text: str) -> tuple[float, ...]:
    """`1.0,0.7,0.3` -> numbers."""
    try:
        numbers = tuple(float(item) for item in text.split(","))
    except ValueError:
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise MlxconvError(
            f"{text!r} is not a list of numbers separated by commas, such as 1.0,0.7"
        )
    return numbers


def _precision(text: str) -> str:
    """The name of a precision, or an existing policy file, which is read later."""
    if not text.endswith(".toml"):
        return _checked(".convert.quantize.policy:parse_precision")(text)
    if not Path(text).expanduser().is_file():
        raise MlxconvError(f"{text}: no such policy file")
    return text


def _group_size(text: str) -> int:
    from .convert.quantize.policy import AFFINE_GROUPS

    if _integer(text) not in AFFINE_GROUPS:
        raise MlxconvError(f"{text!r} is not one of {', '.join(map(str, sorted(AFFINE_GROUPS)))}")
    return int(text)


def _picture_file(text: str) -> Path:
    from .runtime.generate.picture_files import check_file

    check_file(text)
    return Path(text)


def _class(text: str) -> str:
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(p.isidentifier() for p in module.split("."))):
        raise MlxconvError(f"{text!r} is not MODULE:CLASS, such as mypackage.model:Denoiser")
    return text


def _address(text: str) -> str:
    if not text.lower().startswith(("http://", "https://")):
        raise MlxconvError(f"{text!r} is not an http or https URL")
    return text


def _program(text: str) -> str:
    if which(Path(text).expanduser()) is None:
        raise MlxconvError(f"{text}: no such program")
    return text


CLASS = Parsed("MODULE:CLASS", _class)
COUNT = Integer(1)
DECODER = Parsed("tiny|PATH", _checked(".runtime.generate.decode:check_decoder"))
DIM = Parsed("NAME=SIZE", _dim)
FILE = click.Path(path_type=Path, dir_okay=False)
FLOAT_TYPE = FloatType()
FOLDER = click.Path(path_type=Path, file_okay=False)
FROM_ZERO = Integer(0)
GROUP_SIZE = Parsed("32|64|128", _group_size)
NUMBERS = Parsed("N,N,...", _numbers)
OLD_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
OLD_FOLDER = click.Path(path_type=Path, file_okay=False, exists=True)
OLD_PATH = click.Path(path_type=Path, exists=True)
PICTURE = Parsed("FILE|FOLDER", _checked(".runtime.generate.picture_files:check_target"))
PICTURE_FILE = Parsed("FILE", _picture_file)
POSITIVE = Number(min=0, min_open=True)
PRECISION = Parsed("PRECISION", _precision)
PROGRAM = Parsed("PROGRAM", _program)
REPOSITORY = Parsed("NAMESPACE/NAME", _checked(".convert.publish.preflight:check_repo_id"))
SCALE = Number(min=0)
SCHEDULER = Parsed("NAME", _checked(".runtime.schedulers.config:check_name"))
SEED = Integer(0, 2**64 - 1)
SETTING = Parsed("PATTERN=BITS", _setting)
SHARE = Number(0, 1)
SIZE = Parsed("WxH", _size)
TILE = Parsed("auto|off|MB", _checked(".runtime.generate.tiling:work_of"))
TOKENS = Integer(1, 1 << 15)
UP_TO_200 = click.IntRange(1, 200)  # held-out prompts of the demo
URL = Parsed("URL", _address)
