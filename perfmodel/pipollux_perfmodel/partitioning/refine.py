"""A cut made for GPipe, moved to where 1F1B is faster.

1F1B's T_pipe has no closed form that a search over prefixes could build on (`timing.one_f_one_b`).
In the long run it costs max(f + g) a micro-batch where GPipe costs max f + max g, so the best cuts
of both are alike, but not the same. From GPipe's best, runs of neighbouring cuts move together by
one layer for as long as that is faster, all K·(K - 1) such moves played at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.gpipe import StageTimes
from pipollux_perfmodel.timing.one_f_one_b import final_times

from .layer_profile import Floats
from .search import Bools, CutCosts, Ints

_TOLERANCE = 1e-9  # what is faster by less is not worth a move
_MOST_MOVES = 50


def refine_cut(costs: CutCosts, allowed: Sequence[Bools], ends: Sequence[int]) -> list[int]:
    """Return the ends of the stages of a cut that is as fast by 1F1B, or faster.

    Args:
        costs: of the layers.
        allowed: as for `find_cut`, which cuts may be made.
        ends: of the stages of an allowed cut, 0 first.
    """
    best: Ints = np.asarray(ends, np.int64)
    if len(best) <= 2:
        return list(ends)
    least = float(_seconds(costs, best[:, None])[0])
    moves = _moves(len(best))
    for _ in range(_MOST_MOVES):
        near = best[:, None] + moves
        near = near[:, _possible(near, allowed)]
        if not near.size:
            break
        seconds = _seconds(costs, near)
        fastest = int(np.argmin(seconds))
        if seconds[fastest] >= least * (1 - _TOLERANCE):
            break
        best, least = near[:, fastest], float(seconds[fastest])
    return [int(end) for end in best]


def _moves(num_ends: int) -> Ints:
    """Return what is added to the ends, one move in each column."""
    inner = range(1, num_ends - 1)
    runs = [(first, last) for first in inner for last in inner if first <= last]
    moves = np.zeros((num_ends, 2 * len(runs)), np.int64)
    for column, (first, last) in enumerate(runs):
        moves[first : last + 1, 2 * column] = 1
        moves[first : last + 1, 2 * column + 1] = -1
    return moves


def _possible(ends: Ints, allowed: Sequence[Bools]) -> NDArray[np.bool_]:
    """Return which cuts are allowed; ends have one cut in each column."""
    possible = np.ones(ends.shape[1], bool)
    for left, stages in enumerate(reversed(allowed)):
        possible &= stages[ends[left], ends[left + 1]]
    return possible


def _seconds(costs: CutCosts, ends: Ints) -> Floats:
    """Return T_pipe by 1F1B of cuts, one in each column."""
    forward, backward, last = (
        np.diff(np.concatenate(([0.0], np.cumsum(layers)))[ends], axis=0)
        for layers in (costs.forward, costs.backward, costs.last_backward)
    )
    times = StageTimes(list(forward), list(backward), list(last), list(costs.transfer[ends[1:-1]]))
    return np.asarray(final_times(times, costs.num_microbatches, costs.overlapping)[0])
