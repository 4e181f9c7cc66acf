"""Schedulers by the names of user interfaces: `DPM++ 2M Karras` for a class and its options.

Which name stands for which class and option is the table in diffusers' documentation (Schedulers,
"k-diffusion"), and for a flow its flow-matching counterpart. `NAME:option=value,option=value` sets
any other option of the class.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import MlxconvError
from .table import class_for

_LATENT = {"clip_sample": False}  # what these classes do by default is for pixels in -1 to 1
# A name, the solver that stands in its class's name (`class_for`), and options of that class. Not
# `DPM++ 3M SDE`: diffusers' third order of that solver does not converge, nor does ours, its equal.
_SOLVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Euler": ("euler", {}),
    "Euler a": ("eulerancestral", {}),
    "Heun": ("heun", {}),
    "DPM++ 2M": ("dpmsolver", {}),
    "DPM++ 2M SDE": ("dpmsolver", {"algorithm_type": "sde-dpmsolver++"}),
    "DPM++ 3M": ("dpmsolver", {"solver_order": 3}),
    "UniPC": ("unipc", {}),
    "DDIM": ("ddim", _LATENT),
    "DDPM": ("ddpm", _LATENT),
    "PLMS": ("pndm", {"skip_prk_steps": True}),
    "LCM": ("lcm", {}),
    "TCD": ("tcd", {}),
    "SCM": ("scm", {}),
}
USUAL_NAMES = tuple(_SOLVERS)
EVEN = "simple"
# Spacings of noise levels, each as options of a class; which it is, the last of them says.
_SPACINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "karras": ({"use_karras_sigmas": True}, {"sigma_schedule": "karras"}),
    "exponential": (
        {"timestep_spacing": "linspace", "use_exponential_sigmas": True},
        {"sigma_schedule": "exponential"},
    ),
    "beta": ({"timestep_spacing": "linspace", "use_beta_sigmas": True},),
    EVEN: ({"timestep_spacing": "trailing"},),
}
SPACINGS = ", ".join(_SPACINGS)  # what may follow a name
_ALIASES = {**{name: name for name in _SPACINGS}, "sgmuniform": EVEN, "trailing": EVEN}


@dataclass(frozen=True)
class Named:
    """A name taken apart. solver: of `_SOLVERS`; None: `class_name` is a class's. spacing: of noise
    levels, of `_SPACINGS`. options: written behind the name."""

    text: str
    solver: str | None
    class_name: str
    spacing: str | None
    options: Mapping[str, Any]

    def class_for(self, family: str) -> str:
        """The class for such a model; MlxconvError names the solvers that there are for it."""
        found = class_for(_SOLVERS[self.solver][0], family) if self.solver else self.class_name
        if found is None:
            raise MlxconvError(
                f"scheduler {self.text!r}: {self.solver} does not fit a {family} model; those that "
                f"fit: {', '.join(usual_names(family))}"
            )
        return found

    def options_for(self, known: Collection[str], family: str) -> dict[str, Any] | None:
        """The options that the name stands for; None where the class has no such spacing.

        known: the options that the class reads. The levels of a flow are no option of a class: see
        `Scheduler.even`.
        """
        own = _SOLVERS[self.solver][1] if self.solver else {}
        spaced: dict[str, Any] | None = {}
        if self.spacing and not (self.spacing == EVEN and family == "flow"):
            ways = (way for way in _SPACINGS[self.spacing] if [*way][-1] in known)
            spaced = next(ways, None)
        if spaced is None:
            return None
        return {k: v for k, v in {**own, **spaced}.items() if k in known} | {**self.options}


def usual_names(family: str) -> list[str]:
    """The names that fit such a model."""
    return [name for name, (solver, _) in _SOLVERS.items() if class_for(solver, family)]


def parsed(text: str) -> Named:
    """`DPM++ 2M Karras` or `Class:option=value,...`, taken apart.

    The name may be any: whoever reads it knows which classes there are. MlxconvError for an option
    that is not written as `name=value`.
    """
    name, _, options = text.partition(":")
    plain = _plain(name)
    spacing = next((s for s in _ALIASES if plain.endswith(s) and plain != s), "")
    solver = plain.removesuffix(spacing)
    usual = {_plain(known): known for known in _SOLVERS}.get(solver)
    class_name = solver if spacing else name
    return Named(text, usual, class_name, _ALIASES.get(spacing), _options(options, text))


def _plain(name: str) -> str:
    return name.lower().translate(str.maketrans("", "", " -_"))


def _options(text: str, whole: str) -> dict[str, Any]:
    found = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and key.strip() and value.strip()):
            raise MlxconvError(
                f"scheduler {whole!r}: {item!r} is not option=value, such as use_karras_sigmas=true"
            )
        found[key.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    """A JSON value, else the text itself: `true`, `2`, `trailing`. Python's True counts too."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return None if text == "None" else text
