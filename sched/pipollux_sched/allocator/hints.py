"""What a job's hints are worth to a policy, once it is known that they can be planned with.

Each number of a hint may be sane and what follows from them absurd: steps that take no time at all,
or two replicas that are worth 10^200. Policies weigh all jobs against each other, so one speedup
that is infinite would cost all others their allocations. Hints whose speedups no machine could
reach are as good as none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel import SchedHints, SpeedupFunction, stage_speedups

__all__ = ["HintsWorth", "worth"]

MOST_PER_REPLICA = 1e4
"""Largest believed speedup over the number of replicas: more than stages and caches ever bring."""
_TOLD_APART = 3
"""Numbers of nodes beyond which the model knows a difference only where replicas contend."""


class HintsWorth(NamedTuple):
    """What a job's hints say it is worth, by its number of stages."""

    speedups: Mapping[int, SpeedupFunction]
    """Empty where nothing is known, or what is said is not believed."""
    doubt: str | None = None
    """Why it is not believed: the end of a sentence that begins with the hints."""


@lru_cache(maxsize=1024)
def worth(
    hints: SchedHints, num_stages: int, choices: tuple[int, ...], most_replicas: int
) -> HintsWorth:
    """Return what hints are worth, and remember: it is asked again until the job says more.

    Args:
        hints: what the job tells.
        num_stages: its own K, one replica of which has speedup 1.
        choices: further K.
        most_replicas: the most that it may get.
    """
    try:
        # That something takes for ever, and so is worth nothing, is no mistake.
        with np.errstate(all="ignore"):
            speedups = stage_speedups(hints, num_stages, choices)
            # Twice as many, as users are told what a few more would be worth.
            doubts = (_doubt(stages, fn, 2 * most_replicas) for stages, fn in speedups.items())
            doubt = next((reason for reason in doubts if reason), None)
    except (ArithmeticError, ValueError) as error:
        return HintsWorth({}, f"cannot be computed with: {error}")
    if doubt is None and speedups and not _is_worth_something(speedups[num_stages], most_replicas):
        doubt = f"say that up to {most_replicas} replicas are all worth nothing"
    return HintsWorth({}, doubt) if doubt else HintsWorth(speedups)


def _doubt(stages: int, speedup_fn: SpeedupFunction, most_replicas: int) -> str | None:
    if not math.isfinite(speedup_fn.base_goodput):
        return f"say that one replica trains {speedup_fn.base_goodput} samples a second"
    nodes, replicas = _allocations(most_replicas)
    found = np.asarray(speedup_fn(nodes, replicas))
    # Not "above": what is not a number is not at most anything either.
    wrong = np.flatnonzero(~(found <= MOST_PER_REPLICA * replicas) | (found < 0))
    if not wrong.size:
        return None
    first = wrong[0]
    where = "one node" if nodes[first] == 1 else f"{nodes[first]} nodes"
    return (
        f"say that {replicas[first]} replicas of {stages} stages on {where} have a "
        f"speedup of {found[first]:.3g}; at most {MOST_PER_REPLICA:g} for each replica is believed"
    )


def _is_worth_something(speedup_fn: SpeedupFunction, most_replicas: int) -> bool:
    nodes, replicas = _allocations(most_replicas)
    return bool(np.max(speedup_fn(nodes, replicas)) > 0)


def _allocations(most_replicas: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of nodes and of replicas of the allocations that are looked at.

    Not all that there are: with batches of a million samples each takes a tenth of a second.
    """
    sizes = {1, 3, most_replicas} | {2**power for power in range(1, most_replicas.bit_length())}
    nodes = range(1, _TOLD_APART + 1)
    pairs = {(n, r) for r in sizes if r <= most_replicas for n in (*nodes, r) if n <= r}
    found_nodes, found_replicas = np.array(sorted(pairs)).T
    return found_nodes, found_replicas
