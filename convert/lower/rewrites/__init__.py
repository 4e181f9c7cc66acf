"""Program -> program: the same function in fewer, larger operations.

`rewrite` applies a table of small rules until nothing changes. None of them changes the result in
fp32 by more than the order of a sum; in lower precision each rounds where the original did, or
less often.
"""

from collections.abc import Mapping

from mlxconv.runtime.program.program import Entry, Parameter

from .activations import ACTIVATIONS
from .cleanup import CLEANUP, LATE
from .graph import Rules, apply
from .modulation import expand_before_split
from .norms import NORMS
from .projections import fuse_linears
from .rotary import ROTARY
from .sharing import drop_dead, lift_sizes, number, share_common, share_sizes

__all__ = ["rewrite"]

_STEPS: tuple[Rules, ...] = (CLEANUP, NORMS, ROTARY, ACTIVATIONS)
_ROUNDS = 20


def rewrite(entry: Entry, parameters: Mapping[str, Parameter]) -> Entry:
    """The entry with every rewrite applied. Its inputs, outputs and taps mean what they did."""
    entry = lift_sizes(share_sizes(drop_dead(entry)))
    entry = _settle(_STEPS, entry, parameters)
    entry = expand_before_split(entry)
    entry = _settle((CLEANUP, LATE), entry, parameters)
    return number(fuse_linears(entry, parameters))


def _settle(steps: tuple[Rules, ...], entry: Entry, parameters: Mapping[str, Parameter]) -> Entry:
    """Apply the steps in order, again and again, until none of their rules fires."""
    for _ in range(_ROUNDS):
        fired = False
        for rules in steps:
            entry, changed = apply(rules, entry, parameters)
            entry = share_common(drop_dead(entry))
            fired = fired or changed
        if not fired:
            break
    return entry
