"""Schedulers by the names of user interfaces: `DPM++ 2M Karras` for a class and its options.

Which name stands for which class and option is the table in diffusers' documentation (Schedulers,
"k-diffusion"); `NAME:option=value,option=value` sets any other option of the class.
"""

import json
from typing import Any

from ..errors import MlxconvError

_SOLVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpm++2m": ("DPMSolverMultistepScheduler", {}),
    "dpm++2msde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpm++3m": ("DPMSolverMultistepScheduler", {"solver_order": 3}),
    "eulera": ("EulerAncestralDiscreteScheduler", {}),
    "plms": ("PNDMScheduler", {"skip_prk_steps": True}),
}
_SPACINGS: dict[str, dict[str, Any]] = {
    "karras": {"use_karras_sigmas": True},
    "exponential": {"timestep_spacing": "linspace", "use_exponential_sigmas": True},
    "beta": {"timestep_spacing": "linspace", "use_beta_sigmas": True},
    "sgmuniform": {"timestep_spacing": "trailing"},
    "simple": {"timestep_spacing": "trailing"},
    "trailing": {"timestep_spacing": "trailing"},
}
KNOWN = (
    f"known names: {', '.join(_SOLVERS)} or a class, then one of {', '.join(_SPACINGS)}, "
    "such as 'DPM++ 2M Karras'"
)


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """`DPM++ 2M Karras` or `Class:option=value,...` -> a class's name and its options.

    The name may be any: whoever reads it knows which there are. MlxconvError for an option that
    is not written as `name=value`.
    """
    name, _, options = text.partition(":")
    plain = name.lower().translate(str.maketrans("", "", " -_"))
    spacing = next((s for s in _SPACINGS if plain.endswith(s) and plain != s), "")
    solver = plain.removesuffix(spacing)
    class_name, own = _SOLVERS.get(solver, (name if not spacing else solver, {}))
    return class_name, {**own, **_SPACINGS.get(spacing, {}), **_options(options, text)}


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
