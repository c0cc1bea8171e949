"""The speedups that a job's hints predict, after a plausibility check.

Each number of a hint may be valid and their combination absurd: steps that take no time, or a
speedup of 10^200 with two replicas. A policy compares all jobs, so one infinite speedup would cost
all others their allocations. Hints with impossible speedups are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel import SchedHints, SpeedupFunction, stage_speedups
from pipollux_utils.text import count

MOST_PER_REPLICA = 1e4
"""Largest plausible speedup per replica: far more than stages and caches ever gain."""
_TOLD_APART = 3
"""With more nodes than this, the model differs only by contention between replicas."""


class HintsWorth(NamedTuple):
    """The speedups that a job's hints predict, by number of stages."""

    speedups: Mapping[int, SpeedupFunction]
    """Empty if nothing is known, or the hints are implausible."""
    doubt: str | None = None
    """Why they are implausible: a predicate for the subject "the hints"."""


@lru_cache(maxsize=8192)  # must exceed the number of jobs, or each decision would recompute all
def worth(
    hints: SchedHints, num_stages: int, choices: tuple[int, ...], most_replicas: int
) -> HintsWorth:
    """Return the speedups that hints predict, over one replica of K = `num_stages`; cached."""
    try:
        # An infinite time, which makes a speedup of zero, is valid.
        with np.errstate(all="ignore"):
            speedups = stage_speedups(hints, num_stages, choices)
            # Twice as many, because explanations predict a few more replicas.
            doubts = (_doubt(stages, fn, 2 * most_replicas) for stages, fn in speedups.items())
            doubt = next((reason for reason in doubts if reason), None)
    except (ArithmeticError, ValueError) as error:
        return HintsWorth({}, f"cannot be computed with: {error}")
    if doubt is None and speedups and not _is_worth_something(speedups[num_stages], most_replicas):
        most = "1 replica is" if most_replicas == 1 else f"up to {most_replicas} replicas are all"
        doubt = f"say that {most} worth nothing"
    return HintsWorth({}, doubt) if doubt else HintsWorth(speedups)


def _doubt(stages: int, speedup_fn: SpeedupFunction, most_replicas: int) -> str | None:
    if not math.isfinite(speedup_fn.base_goodput):
        return f"say that one replica trains {speedup_fn.base_goodput} samples a second"
    nodes, replicas = _allocations(most_replicas)
    found = np.asarray(speedup_fn(nodes, replicas))
    # Not `>`: NaN must fail this comparison too.
    wrong = np.flatnonzero(~(found <= MOST_PER_REPLICA * replicas) | (found < 0))
    if not wrong.size:
        return None
    first = wrong[0]
    shape = f"{count(int(replicas[first]), 'replica')} of {count(stages, 'stage')}"
    where = "one node" if nodes[first] == 1 else f"{nodes[first]} nodes"
    return (
        f"say that {shape} on {where} {'has' if replicas[first] == 1 else 'have'} a "
        f"speedup of {found[first]:.3g}; at most {MOST_PER_REPLICA:g} per replica is plausible"
    )


def _is_worth_something(speedup_fn: SpeedupFunction, most_replicas: int) -> bool:
    nodes, replicas = _allocations(most_replicas)
    return bool(np.max(speedup_fn(nodes, replicas)) > 0)


def _allocations(most_replicas: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the nodes and replicas of the allocations to check: large batches take 0.1 s each."""
    sizes = {1, 3, most_replicas} | {2**power for power in range(1, most_replicas.bit_length())}
    nodes = range(1, _TOLD_APART + 1)
    pairs = {(n, r) for r in sizes if r <= most_replicas for n in (*nodes, r) if n <= r}
    found_nodes, found_replicas = np.array(sorted(pairs)).T
    return found_nodes, found_replicas
