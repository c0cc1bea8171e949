"""Refinement of a GPipe cut for 1F1B.

1F1B's T_pipe has no closed form for a search over prefixes (`timing.one_f_one_b`). In the long run
a micro-batch costs max(f + g) with 1F1B and max f + max g with GPipe, so the best cuts are similar.
Starting from GPipe's best, ranges of neighbouring cuts move by one layer as long as that is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.gpipe import StageTimes
from pipollux_perfmodel.timing.one_f_one_b import final_times

from .layer_profile import Floats
from .search import Bools, CutCosts, Ints

_TOLERANCE = 1e-9  # smaller improvements do not justify a move
_MOST_MOVES = 50


def refine_cut(costs: CutCosts, allowed: Sequence[Bools], ends: Sequence[int]) -> list[int]:
    """Return the ends of the stages of a cut that is at least as fast with 1F1B. `allowed` as for
    `find_cut`; `ends` are those of an allowed cut, starting with 0.
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
    inner = range(1, num_ends - 1)
    runs = [(first, last) for first in inner for last in inner if first <= last]
    moves = np.zeros((num_ends, 2 * len(runs)), np.int64)
    for column, (first, last) in enumerate(runs):
        moves[first : last + 1, 2 * column] = 1
        moves[first : last + 1, 2 * column + 1] = -1
    return moves


def _possible(ends: Ints, allowed: Sequence[Bools]) -> NDArray[np.bool_]:
    possible = np.ones(ends.shape[1], bool)
    for left, stages in enumerate(reversed(allowed)):
        possible &= stages[ends[left], ends[left + 1]]
    return possible


def _seconds(costs: CutCosts, ends: Ints) -> Floats:
    forward, backward, last = (
        np.diff(np.concatenate(([0.0], np.cumsum(layers)))[ends], axis=0)
        for layers in (costs.forward, costs.backward, costs.last_backward)
    )
    times = StageTimes(list(forward), list(backward), list(last), list(costs.transfer[ends[1:-1]]))
    return np.asarray(final_times(times, costs.num_microbatches, costs.overlapping)[0])
