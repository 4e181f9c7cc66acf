"""scheduler_config.json: read, checked, and moved from one class to another."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, MlxconvError
from ..files import read_json
from .names import EVEN, SPACINGS, USUAL_NAMES, Named, parsed, usual_names
from .options import MOST_STEPS
from .sigmas import RESPACINGS
from .table import FOREIGN, SCHEDULERS, Row, short

CONFIG = "scheduler_config.json"
# DPM-Solver and UniPC call a flow's shift `flow_shift`, the others `shift`.
_FAMILIES = {
    "CogVideoX": "cogvideox",
    "EDM": "edm",
    "CosineDPM": "edm",
    "SCM": "trig",
    "FlowM": "flow",
    "LTXEuler": "flow",
    "Helios": "flow",
}
_SYNONYMS = {"shift": "flow_shift", "flow_shift": "shift"}


@dataclass(frozen=True)
class Scheduler:
    """A supported class with all of its options. config: the file's own; source: where it lies.

    even: a flow's levels are even from 1 to 1 / steps before they are shifted (`simple`).
    """

    name: str
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    source: str
    even: bool = False

    @property
    def row(self) -> Row:
        return SCHEDULERS[self.name]

    @property
    def unused(self) -> dict[str, Any]:
        """What the file holds that this class does not read, as in diffusers: worth a line."""
        read = self.row.reads.keys()
        return {
            key: value
            for key, value in _public(self.config).items()
            if not read & {key, _SYNONYMS.get(key, key)}
        }


def read_scheduler(folder: str | Path, name: str | None = None) -> Scheduler:
    """The scheduler of a `scheduler/` folder, or of a checkpoint's or a bundle's that has one.

    name: another class for the same options (`with_class`). Raises MlxconvError for a class or a
    value that is not supported, naming those that are and fit.
    """
    file = _config_file(Path(folder))
    return scheduler_of(read_json(file), source=str(file), name=name)


def scheduler_of(
    config: Mapping[str, Any],
    *,
    source: str = CONFIG,
    name: str | None = None,
) -> Scheduler:
    """As `read_scheduler`, of a config as a dict."""
    stored = config.get("_class_name")
    if not isinstance(stored, str):
        raise MlxconvError(f"{source}: expected a class under _class_name, found {stored!r}")
    options = _public(config)
    family, asked = _family(stored, options), parsed(stored if name is None else name)
    if name is not None:
        _check_class(asked)
    name = _fitting(asked.class_for(family), family, source)
    row = SCHEDULERS[name]
    if name != stored:
        options = _translated(options, row, family)
    changed = _asked_options(asked, row, family, f"{source}: {name}")
    if any(changed.get(key) for key in RESPACINGS):  # it takes the place of another spacing
        options = {key: value for key, value in options.items() if key not in RESPACINGS}
    options |= changed
    if options.get("invert_sigmas") and "invert_sigmas" not in row.options:
        raise MlxconvError(f"{source}: {name} cannot run time backwards, as invert_sigmas asks")
    even = family == "flow" and asked.spacing == EVEN
    return Scheduler(name, _checked(options, row, name, source), config, source, even)


def with_class(scheduler: Scheduler, name: str) -> Scheduler:
    """Another class with the same options: diffusers' `from_config`.

    name: a class, whole or short, or a name such as `DPM++ 2M Karras`; options may follow it, as
    `NAME:use_karras_sigmas=true,solver_order=3` (`names.parsed`). What the file holds is kept
    where the new class knows it; the rest takes the new defaults. Unlike diffusers, a flow stays a
    flow: DPM-Solver and UniPC then take flow sigmas, and `shift` is called `flow_shift` there.
    """
    return scheduler_of(scheduler.config, source=scheduler.source, name=name)


def fitting(family: str) -> list[str]:
    """The supported classes for a family of checkpoints: see `Row.families`."""
    return [name for name, row in SCHEDULERS.items() if family in row.families]


def _config_file(folder: Path) -> Path:
    for file in (folder, folder / CONFIG, folder / "scheduler" / CONFIG):
        if file.is_file():
            return file
    raise MlxconvError(f"{folder}: no {CONFIG} here, nor under scheduler/: is it a bundle?")


def _family(name: str, options: Mapping[str, Any]) -> str:
    """What the model was trained on, which no scheduler can change."""
    for start, family in _FAMILIES.items():
        if name.startswith(start):
            return family
    flows = options.get("use_flow_sigmas") or options.get("prediction_type") == "flow_prediction"
    shifts = "beta_start" not in options and ("shift" in options or "base_shift" in options)
    return "flow" if flows or shifts else "beta"


def check_name(text: str) -> None:
    """ArgumentError for a name, or an option behind it, that no model's scheduler has."""
    asked = parsed(text)
    _check_class(asked)
    known = {option for row in SCHEDULERS.values() for option in row.reads}
    for unknown in sorted(asked.options.keys() - known):
        near = difflib.get_close_matches(unknown, sorted(known), 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ArgumentError(f"scheduler {text!r}: no class reads an option {unknown}{hint}")


def _check_class(asked: Named) -> None:
    if asked.solver is None and not any(_ways(asked.class_name)):
        raise ArgumentError(
            f"scheduler {asked.text!r} is not known; there are {', '.join(USUAL_NAMES)}, behind "
            f"which {SPACINGS} may stand, as in 'DPM++ 2M Karras', and diffusers' class names"
        )


def _ways(name: str) -> tuple[str | None, str | None]:
    """What a name stands for, on a flow (`euler` is FlowMatchEuler there) and elsewhere."""
    if name in SCHEDULERS:
        return name, name
    known = {short(each): each for each in SCHEDULERS}
    return known.get("flowmatch" + short(name)), known.get(short(name))


def _fitting(name: str, family: str, source: str) -> str:
    """The class, by its full name or without `Scheduler`, `Discrete` and `Multistep`."""
    of_flow, other = _ways(name)
    found = of_flow or other if family == "flow" else other
    fits = ", ".join([*usual_names(family), *fitting(family)])
    if found is None:
        raise MlxconvError(
            f"{source}: scheduler {name} is not supported; those that fit: {fits}; behind a name "
            f"may stand {SPACINGS}, as in 'DPM++ 2M Karras'"
        )
    if family not in SCHEDULERS[found].families:
        raise MlxconvError(
            f"{source}: {found} does not fit a {family} model; those that fit: {fits}"
        )
    return found


def _asked_options(asked: Named, row: Row, family: str, where: str) -> dict[str, Any]:
    """What a name changes; MlxconvError where its solver has no such levels or options."""
    changed = asked.options_for(row.reads, family)
    if changed is None:
        others = {name: replace(asked, solver=name) for name in usual_names(family)}
        rows = {name: SCHEDULERS[other.class_for(family)] for name, other in others.items()}
        have = [n for n in others if others[n].options_for(rows[n].reads, family) is not None]
        raise MlxconvError(
            f"scheduler {asked.text!r}: {asked.solver or asked.class_name} has no {asked.spacing} "
            f"levels; of this kind of model {', '.join(have) or 'no other'} has"
        )
    unknown = sorted(changed.keys() - row.reads.keys())
    if unknown:
        raise MlxconvError(
            f"{where} reads no option {', '.join(unknown)}; it reads: "
            f"{', '.join(sorted(row.reads))}"
        )
    return changed


def _translated(options: dict[str, Any], row: Row, family: str) -> dict[str, Any]:
    """A flow's options under the names that the new class has for them. What is None in one class
    and a choice in the other takes the other's default."""
    options = {
        key: value
        for key, value in options.items()
        if value is not None or key not in row.reads or None in (row.reads[key].choices or (None,))
    }
    if family != "flow":
        return options
    renamed = {
        key if key in row.options else _SYNONYMS.get(key, key): value
        for key, value in options.items()
    }
    if "use_flow_sigmas" in row.options:
        renamed |= {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    return renamed


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _checked(given: Mapping[str, Any], row: Row, name: str, source: str) -> dict[str, Any]:
    """All options of the class: as given, else their defaults."""
    known = FOREIGN.union(*(other.options for other in SCHEDULERS.values()))
    unknown = sorted(set(given) - known)
    if unknown:
        raise MlxconvError(
            f"{source}: {name} has no option {', '.join(unknown)}; it has: "
            f"{', '.join(sorted(row.options))}"
        )
    options = {**row.options, **{k: v for k, v in given.items() if k in row.options}}
    for key, option in row.reads.items():
        if option.type is bool and options[key] is None:
            options[key] = False
        option.check(options[key], key, f"{source}: {name}")
    _check_exclusive(options, f"{source}: {name}")
    return options


def _check_exclusive(options: Mapping[str, Any], where: str) -> None:
    asked = [key for key in RESPACINGS if options.get(key)]
    if len(asked) > 1:
        raise MlxconvError(f"{where}: {' and '.join(asked)} exclude each other: set one")
    if not 1 <= options.get("num_train_timesteps", 1) <= MOST_STEPS:
        raise MlxconvError(f"{where}: num_train_timesteps must be 1 to {MOST_STEPS}")
    flowless = "use_flow_sigmas" in options and not options["use_flow_sigmas"]
    if flowless and options.get("shift_terminal") is not None:
        raise MlxconvError(f"{where}: shift_terminal needs use_flow_sigmas")
