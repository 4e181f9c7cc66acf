"""The options of a conversion, and what is known of each component before it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxconv.runtime.program.program import Parameter

from ..lower.compile import Compiled, Size
from ..quantize.policy import Policy
from ..recipe.recipe import Recipe
from ..source.checkpoint import Checkpoint, Component, KeyMatch
from .plan import WeightPlan


@dataclass(frozen=True)
class ConvertOptions:
    """The arguments of `convert`; the CLI's options have the same names."""

    q: str = "bf16"
    group_size: int | None = None
    components: tuple[str, ...] = ()
    text_encoder_q: str | None = None
    vae_q: str | None = None
    keep: tuple[str, ...] = ()
    set: tuple[tuple[str, str], ...] = ()
    sizes: tuple[Size, ...] = ()
    recipe: Path | None = None
    model_class: str | None = None
    method: str = "refit"
    target_size: float | None = None
    variant: str | None = None
    weights_only: bool = False
    force: bool = False
    dry_run: bool = False
    trace: bool = False  # in a dry run too
    revision: str | None = None
    verify_checksums: bool = False
    low_disk: bool = False
    allow_unused: bool = False


@dataclass
class Job:
    """One component on its way: what is known before anything is written."""

    component: Component
    config: dict[str, Any]
    recipe: Recipe | None
    compiled: Compiled | None
    match: KeyMatch
    parameters: dict[str, Parameter]
    found: dict[str, str]
    policy: Policy
    plan: WeightPlan
    note: str = ""
    derived: str = ""  # the recipe's text, where it was derived


@dataclass
class Run:
    """A conversion: its options, and what it learned on the way."""

    checkpoint: Checkpoint
    options: ConvertOptions
    recipe: Recipe | None
    warnings: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda text: None
    use_cache: bool = False  # of programs, see `program_cache`


def is_vae(component: Component) -> bool:
    """Whether `--vae-q` is for this component."""
    return "autoencoder" in component.class_name.lower() or component.name.startswith("vae")
