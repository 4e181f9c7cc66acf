"""Classifier-free guidance: predictions with and without the prompt become one.

Ho and Salimans 2022 (arXiv 2207.12598), in the forms that diffusers' pipelines use it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from ..errors import MlxconvError
from ..exec.finite import explained
from ..ops import long_sums
from ..program.program import Entry
from ..program.types import INT
from .staging import Prepared, Staged

Inputs = Mapping[str, Any]
ORIGINS = ("negative", "positive")
RESCALES = ("none", "norm", "std", "limit")


@dataclass(frozen=True)
class Guidance:
    """How far a prediction is moved away from that of the negative prompt, and when.

    scale: g, or one a step. origin "negative": neg + g (pos - neg), off at 1; "positive":
    pos + g (pos - neg), off at 0 (Z-Image). rescale "norm": to the length of pos along the last
    axis (Qwen-Image, Lumina2); "std": a share `amount` of it to the deviation of pos (Lin et al.,
    arXiv 2305.08891, 3.4); "limit": to at most `amount` times the length of pos (Z-Image).
    start, end: the part of the schedule in which it acts, in 0 to 1; outside of it the negative
    prediction is not computed.
    """

    scale: float | Sequence[float] = 1.0
    origin: Literal["negative", "positive"] = "negative"
    rescale: Literal["none", "norm", "std", "limit"] = "none"
    amount: float = 1.0
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("origin", self.origin, ORIGINS),
            ("rescale", self.rescale, RESCALES),
        ):
            if value not in known:
                raise MlxconvError(f"guidance {name}={value!r}: choose one of {', '.join(known)}")
        if not 0 <= self.start <= self.end <= 1:
            raise MlxconvError(
                f"guidance acts from {self.start} to {self.end}: expected 0 <= start <= end <= 1"
            )

    def scales(self, steps: int) -> list[float]:
        """The scale of each step; MlxconvError when their number is another."""
        if not isinstance(self.scale, Sequence):
            return [float(self.scale)] * steps
        if len(self.scale) != steps:
            raise MlxconvError(f"{len(self.scale)} guidance scales for {steps} steps")
        return [float(g) for g in self.scale]

    @property
    def off(self) -> float:
        """The scale at which the negative prediction has no part."""
        return 1.0 if self.origin == "negative" else 0.0

    def active(self, steps: int) -> list[bool]:
        """At which steps the negative prediction is needed."""
        return [
            g != self.off and i / steps >= self.start and (i + 1) / steps <= self.end
            for i, g in enumerate(self.scales(steps))
        ]

    def combine(self, positive: mx.array, negative: mx.array, scale: mx.array) -> mx.array:
        """One prediction (batch, ...) of two, in float32; scale () is an array, so that a compiled
        caller serves every value."""
        pos, neg = positive.astype(mx.float32), negative.astype(mx.float32)
        base = neg if self.origin == "negative" else pos
        return _rescaled(self.rescale, self.amount, base + scale * (pos - neg), pos)


def _rescaled(how: str, amount: float, guided: mx.array, positive: mx.array) -> mx.array:
    axes = tuple(range(1, guided.ndim))
    if how == "norm":
        return guided * (_norm(positive, (-1,)) / _norm(guided, (-1,)))
    if how == "std":
        ratio = _deviation(positive, axes) / _deviation(guided, axes)
        return guided * (amount * ratio + (1 - amount))
    if how == "limit":
        return guided * mx.minimum(amount * _norm(positive, axes) / _norm(guided, axes), 1)
    return guided


def _norm(x: mx.array, axes: tuple[int, ...]) -> mx.array:
    return mx.sqrt(long_sums.total(mx.square(x), axes, True))


def _deviation(x: mx.array, axes: tuple[int, ...]) -> mx.array:
    return mx.sqrt(long_sums.var(x, axes, True, ddof=1))


class Guided:
    """A denoiser with guidance: call it with a step's number and latents, get one prediction.

    positive, negative: the entry's inputs but for the schedule's, with latents for their shapes;
    schedule: as `Staged.prepare` takes it, for one batch. `latents`: the keyword of the latents,
    or what makes the step's keywords of them. `batched`: both predictions in one call, twice the
    batch; one after the other takes less memory. None: batched where the inputs' shapes allow it.
    `prediction`: (output, latents) to what the scheduler takes, of the latents' shape. `batch`:
    samples in one call; the inputs are those of one, and are repeated.
    """

    def __init__(
        self,
        staged: Staged,
        positive: Inputs,
        schedule: Mapping[str, Any],
        negative: Inputs | None = None,
        guidance: Guidance | None = None,
        *,
        latents: str | Callable[[mx.array], Inputs] = "hidden_states",
        batched: bool | None = None,
        prediction: Callable[[mx.array, mx.array], mx.array] = lambda output, latents: output,
        batch: int = 1,
    ) -> None:
        self._inputs = latents if callable(latents) else lambda x: {str(latents): x}
        self._prediction, self._staged = prediction, staged
        self._prompts = [positive] if negative is None else [positive, negative]
        self._rows = rows = {k: mx.array(v) for k, v in schedule.items()}
        steps = min((len(v) for v in rows.values()), default=1)
        self.guidance = guidance or Guidance()
        self._active = [negative is not None and on for on in self.guidance.active(steps)]
        self._scales = [mx.array(g) for g in self.guidance.scales(steps)]
        self._positive: Prepared | None = None
        self._negative: Prepared | None = None
        self._both: Prepared | None = None
        both = None
        if negative is not None and any(self._active) and batched is not False:
            prompts = [negative] * batch + [positive] * batch
            both = _joined(staged, prompts, rows, _GUIDANCE if batched else None)
        if both is not None:
            self._both = staged.prepare(both, _tiled(rows, 2 * batch))
        elif any(self._active):
            assert negative is not None
            self._negative = staged.prepare(*_repeated(staged, negative, rows, batch))
        if both is None or not all(self._active):
            self._positive = staged.prepare(*_repeated(staged, positive, rows, batch))
        self._combine = mx.compile(self.guidance.combine)

    @property
    def batched(self) -> bool:
        """Whether both predictions are made in one call."""
        return self._both is not None

    def __call__(self, step: int, latents: mx.array) -> mx.array:
        """The prediction (batch, ...) at a step, lazily; float32 where it is guided."""
        return self._prediction(self._guided(step, latents), latents)

    def fault_at(self, step: int, latents: mx.array) -> str:
        """Where a prediction that is not finite went wrong, and what to do: see `denoise`."""
        row = {k: v[step] for k, v in self._rows.items()}

        def again() -> None:
            for prompt in self._prompts[: 1 + self._active[step]]:
                for one in mx.split(latents, len(latents)):
                    self._staged.unstaged({**prompt, **row, **self._inputs(one)})

        return explained(again, self._staged.component.dtype)

    def _guided(self, step: int, latents: mx.array) -> mx.array:
        if not self._active[step]:
            assert self._positive is not None
            return _first(self._positive(step, **self._inputs(latents)))
        if self._both is not None:
            twice = self._inputs(mx.concatenate([latents, latents]))
            negative, positive = mx.split(_first(self._both(step, **twice)), 2)
        else:
            assert self._positive is not None
            assert self._negative is not None
            given = self._inputs(latents)
            negative, positive = (
                _first(model(step, **given)) for model in (self._negative, self._positive)
            )
        return self._combine(positive, negative, self._scales[step])


def _first(output: Any) -> mx.array:
    found: mx.array = output[0] if isinstance(output, tuple) else output
    return found


# ---- several samples in one batch ----------------------------------------------------------------

_GUIDANCE = "guidance in one batch: {}; pad both prompts alike, or guide sequentially"
_PICTURES = "several pictures in one batch: {}; leave batch (--batch) out"


def _repeated(
    staged: Staged, prompt: Inputs, rows: Mapping[str, mx.array], batch: int
) -> tuple[Inputs, dict[str, mx.array]]:
    """The inputs of one sample, and the schedule's, for so many."""
    if batch == 1:
        return prompt, dict(rows)
    joined = _joined(staged, [prompt] * batch, rows, _PICTURES)
    assert joined is not None
    return joined, _tiled(rows, batch)


def _joined(
    staged: Staged, prompts: Sequence[Inputs], rows: Mapping[str, mx.array], refusal: str | None
) -> dict[str, Any] | None:
    """The inputs of several samples as one batch; where they do not fit, an error or None."""
    last = prompts[-1]
    entry = staged.entry_for({**last, **{k: v[0] for k, v in rows.items()}})
    try:
        if not _batches(entry):
            raise _Unequal("its batch is built in")
        return {k: _join(entry, k, [p.get(k, v) for p in prompts]) for k, v in last.items()}
    except _Unequal as error:
        if refusal is not None:
            raise MlxconvError(refusal.format(error)) from None
        return None


def _tiled(rows: Mapping[str, mx.array], batch: int) -> dict[str, mx.array]:
    """A schedule's inputs (steps, 1) for a larger batch; (steps,) has none (UNets)."""
    return {k: v if v.ndim == 1 else mx.tile(v, [1, batch]) for k, v in rows.items()}


class _Unequal(Exception):
    """Inputs do not fit into one batch."""


def _join(entry: Entry, path: str, values: Sequence[Any]) -> Any:
    last = values[-1]
    if isinstance(last, Mapping):
        return {k: _join(entry, f"{path}.{k}", [v[k] for v in values]) for k in last}
    if isinstance(last, (list, tuple)):
        if len({len(v) for v in values}) > 1:
            raise _Unequal(f"{path} has {len(values[0])} and {len(last)} items")
        return [_join(entry, f"{path}.{i}", each) for i, each in enumerate(zip(*values))]
    item = next((i for i in entry.inputs if i.path == path), None)
    if item is None or item.type == INT:
        return last
    arrays = [mx.array(value) for value in values]
    alike = len({tuple(array.shape) for array in arrays}) == 1
    if (item.type.dims or ("",))[0] in _batches(entry):
        if not alike:
            raise _Unequal(f"{path} is {tuple(arrays[0].shape)} and {tuple(arrays[-1].shape)}")
        return mx.concatenate(arrays)
    if not alike or not all(bool(mx.array_equal(array, arrays[-1])) for array in arrays):
        raise _Unequal(f"{path} differs, and has no axis of the batch")
    return last


def _batches(entry: Entry) -> set[str]:
    """What the entry calls the batch: the first size of the inputs that change each step."""
    moving = (i.type.dims for i in entry.inputs if i.stage in ("step", "schedule"))
    return {dims[0] for dims in moving if dims and not dims[0].isdigit()}
