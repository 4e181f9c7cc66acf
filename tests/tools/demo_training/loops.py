"""A training loop that can be interrupted: the same seed ends at the same weights."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, int], Tensor]  # of a model at a step; draws its own data from the step


@dataclass(frozen=True)
class Schedule:
    """AdamW with linear warm-up and cosine decay. `exact_from`: the share of steps in bf16."""

    steps: int
    rate: float
    warmup: int = 100
    decay: float = 0.01  # of weights
    average: float = 0.998  # of the exponential moving average of weights
    exact_from: float = 0.0  # steps before this share of all compute in bf16, later ones in fp32

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        share = min(step / self.steps, 1.0)
        rise = min((step + 1) / max(self.warmup, 1), 1.0)
        return self.rate * rise * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))


class Log:
    """Rows `stage,step,seconds,loss` in a file and on stderr."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self.say, self.stopped = path, say, False
        if not path.exists():
            path.write_text("stage,step,seconds,loss\n", encoding="utf-8")

    def add(self, stage: str, step: int, seconds: float, loss: float) -> None:
        """One row; seconds since the stage began, interruptions not counted."""
        if self.stopped:
            raise KeyboardInterrupt
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{stage},{step},{seconds:.0f},{loss:.5f}\n")
        self.say(f"{stage} {step} {seconds:.0f}s loss {loss:.5f}")

    @contextmanager
    def stopping_all(self) -> Iterator[None]:
        """When the block fails or is interrupted, loops in other threads end at their next row."""
        try:
            yield
        except BaseException:
            self.stopped = True
            raise


def train(
    name: str, model: nn.Module, loss_of: Loss, schedule: Schedule, folder: Path, log: Log,
    every: int = 100,
) -> nn.Module:  # fmt: skip
    """Train the model in fp32 master weights and return its averaged weights.

    The state lies in `folder/NAME.pt` after each `every` steps, and is taken up from there.
    """
    state, began = folder / f"{name}.pt", time.perf_counter()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.rate, betas=(0.9, 0.99), weight_decay=schedule.decay
    )
    averaged = copy.deepcopy(model).requires_grad_(False)
    first, before = _resume(state, model, averaged, optimizer)
    worker, losses = _worker(model, first, schedule), list[float]()
    for step in range(first, schedule.steps):
        if worker is not model and step >= schedule.exact_from * schedule.steps:
            worker = model
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate_at(step)
        loss = loss_of(worker, step)
        loss.backward()  # type: ignore[no-untyped-call]
        _hand_over(worker, model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _take_over(worker, model)
        _average(averaged, model, min(schedule.average, (step + 1) / (step + 10)))
        losses.append(loss.item())
        if (step + 1) % every == 0 or step + 1 == schedule.steps:
            seconds = before + time.perf_counter() - began
            _save(state, model, averaged, optimizer, step + 1, seconds)
            log.add(name, step + 1, seconds, sum(losses) / len(losses))
            losses.clear()
    return averaged


def _worker(model: nn.Module, step: int, schedule: Schedule) -> nn.Module:
    """The model itself, or a bf16 copy of it that computes the gradients."""
    if step >= schedule.exact_from * schedule.steps:
        return model
    return copy.deepcopy(model).to(torch.bfloat16)


def _hand_over(worker: nn.Module, model: nn.Module) -> None:
    if worker is not model:
        for theirs, ours in zip(worker.parameters(), model.parameters(), strict=True):
            ours.grad = None if theirs.grad is None else theirs.grad.float()
            theirs.grad = None


@torch.no_grad()
def _take_over(worker: nn.Module, model: nn.Module) -> None:
    if worker is not model:
        for theirs, ours in zip(worker.parameters(), model.parameters(), strict=True):
            theirs.copy_(ours)


@torch.no_grad()
def _average(averaged: nn.Module, model: nn.Module, keep: float) -> None:
    for mean, now in zip(averaged.parameters(), model.parameters(), strict=True):
        mean.lerp_(now, 1 - keep)


def _save(
    path: Path, model: nn.Module, averaged: nn.Module, optimizer: torch.optim.Optimizer, step: int,
    seconds: float,
) -> None:  # fmt: skip
    partial = path.with_suffix(".partial")
    torch.save({
        "model": model.state_dict(), "averaged": averaged.state_dict(),
        "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds,
    }, partial)  # fmt: skip
    partial.rename(path)


def _resume(
    path: Path, model: nn.Module, averaged: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """The step and the seconds where an interrupted run stopped."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    averaged.load_state_dict(state["averaged"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]), float(state["seconds"])
