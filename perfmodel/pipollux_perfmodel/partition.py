"""The best contiguous cut of layers into stages.

A GPipe pipeline runs at the pace of its slowest stage, T_pipe = Σ c_k + (M - 1)·max c_k, and Σ c_k
does not depend on the cut; so the best balance is the one whose slowest stage is fastest. Dynamic
programming over prefixes finds it exactly:

    best[k][j] = min over i < j of max(best[k-1][i], cost of layers i … j-1)

in O(K·L²) for L layers, milliseconds for a hundred of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Cut layers into stages so that the slowest stage is as fast as can be.

    Args:
        costs: seconds of each layer (any unit will do), in order.
        num_stages: number of stages; each gets at least one layer.

    Returns:
        The number of layers of each stage, in order (torchgpipe's `balance`).

    Raises:
        ValueError: when there are fewer layers than stages, or a cost is negative or not finite.

    Example:
        >>> partition([1, 1, 1, 3], 2)
        [3, 1]
    """
    _check(costs, num_stages)
    num_layers = len(costs)
    prefix = np.concatenate(([0.0], np.cumsum(np.asarray(costs, dtype=float))))
    best: NDArray[np.float64] = prefix.copy()
    best[0] = np.inf
    cuts: list[NDArray[np.int64]] = []
    for stage in range(2, num_stages + 1):
        best, cut = _add_stage(best, prefix, stage)
        cuts.append(cut)
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    ends.append(0)
    ends.reverse()
    return [end - start for start, end in itertools.pairwise(ends)]


def _add_stage(
    best: NDArray[np.float64], prefix: NDArray[np.float64], stage: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return, per prefix, the slowest of `stage` stages and where the last one begins."""
    longer = np.full_like(best, np.inf)
    cut = np.zeros(len(best), dtype=np.int64)
    for end in range(stage, len(best)):
        slowest = np.maximum(best[stage - 1 : end], prefix[end] - prefix[stage - 1 : end])
        start = int(np.argmin(slowest))
        longer[end], cut[end] = slowest[start], start + stage - 1
    return longer, cut


def _check(costs: Sequence[float], num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; give at least one stage")
    if len(costs) < num_stages:
        raise ValueError(
            f"num_stages is {num_stages} but there are {len(costs)} layers; "
            "give at most one stage per layer"
        )
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"costs[{layer}] is {cost}; give a finite cost >= 0")
