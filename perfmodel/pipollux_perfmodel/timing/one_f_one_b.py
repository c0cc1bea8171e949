"""1F1B's times: when each stage's gradients are final, by a recursion over micro-batches.

The order is 1F1B's (`timeline`; PipeDream-Flush, Narayanan et al., ICML'21). With f_k, g_k, t_k as
in `gpipe`, and copies on separate machines:

    F_j(k)    end of the forward of micro-batch j,   B_i(k)   of the backward of micro-batch i
    A_j(k)    when micro-batch j has been copied to stage k,   C_i(k)   its gradient

    F_j(k)    = Σ_{q≤k} (f_q, t_q) + j·max_{q≤k} (f_q, t_q)       j < K - k: a flow shop, as GPipe
    C_i(k)    = max(B_i(k + 1), C_{i-1}(k)) + t_k
    B_i(k)    = max(C_i(k), F_{i+K-k-1}(k)) + g_k                 or the last forward, F_{M-1}(k)
    F_j(k)    = max(A_j(k), B_{j-K+k}(k)) + f_k                   j >= K - k
    A_j(k)    = max(F_j(k - 1), A_{j-1}(k)) + t_{k-1}
    fin_i     = B_{M-1}(i)

The last micro-batch's backward is the last, and takes l_k = g_k - f_k under `except_last`. A copy
that does not overlap occupies the receiving device: f_k + t_{k-1} and g_k + t_k replace f_k and
g_k. If stages run one at a time, T_pipe is the sum of all times.

With equal stages and free copies this takes GPipe's M + K - 1 slots of f + g. With unequal stages
there is no simple closed form: the longest path may go back and forth between stages. A round of
the recursion is one micro-batch: its backward through all stages is a running maximum, and the
forwards that follow are of one micro-batch per stage. Beyond `MOST_ROUNDS` micro-batches, the rate
of the last rounds is extrapolated.

`tests/perfmodel/simulator.py` simulates the same events. Autograd cannot differentiate the
recursion, and a fit does not need that: T_pipe is C(b)·F(M) with a constant F(M).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .gpipe import Numbers, StageTimes

Floats = NDArray[np.float64]

MOST_ROUNDS = 512
"""Micro-batches up to which the recursion runs, which bounds its time for any input."""


def final_times(
    times: StageTimes, num_microbatches: Numbers, overlapping: bool
) -> tuple[Numbers, ...]:
    """Return fin_i of every stage, K entries; fin_0 is T_pipe. All broadcast."""

    def run(forward: Floats, backward: Floats, last: Floats, copy: Floats, count: int) -> Floats:
        return _run(_Machines(forward, backward, last, copy, overlapping=overlapping), count)

    return for_each_count(times, num_microbatches, run)


def for_each_count(
    times: StageTimes, num_microbatches: Numbers, run: Callable[..., Floats]
) -> tuple[Numbers, ...]:
    """Apply a function for each number of micro-batches, and combine the results, K entries.

    `run` is called as (forward, backward, last backward, copies, M), each of shape (stages or
    boundaries, candidates of that M), and returns shape (K, candidates).
    """
    num_stages = len(times.forward)
    rows = [*times.forward, *times.backward, *times.last_backward, *times.transfer]
    shape = np.broadcast_shapes(np.shape(num_microbatches), *map(np.shape, rows))
    flat = np.array([np.broadcast_to(row, shape).ravel() for row in rows], float)
    counts = np.broadcast_to(num_microbatches, shape).ravel()
    final = np.empty((num_stages, flat.shape[1]))
    ends = (num_stages, 2 * num_stages, 3 * num_stages)
    for count in np.unique(counts):
        chosen = counts == count
        final[:, chosen] = run(*np.split(flat[:, chosen], ends), int(count))
    return tuple(row.reshape(shape)[()] for row in final)


@lru_cache(maxsize=1024)
def final_times_of_one(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    last_backward: tuple[float, ...],
    num_microbatches: int,
) -> tuple[float, ...]:
    """Return fin_i of one pipeline with free copies; cached, as searches request it often."""
    free = [0.0] * (len(forward) - 1)
    times = StageTimes(forward, backward, last_backward, free)
    return tuple(map(float, final_times(times, num_microbatches, overlapping=False)))


def serial_final_times(times: StageTimes, num_microbatches: Numbers) -> tuple[Numbers, ...]:
    """Return when every stage's gradients are final if stages run one at a time, K entries."""
    copies = sum(times.transfer, 0.0)
    usual = sum(times.forward, 0.0) + sum(times.backward, 0.0) + 2 * copies
    last = sum(times.forward, 0.0) + sum(times.last_backward, 0.0) + 2 * copies
    final = [(num_microbatches - 1) * usual + last]
    # Stages below i still have to run the last micro-batch's backward.
    for back, copy in zip(times.last_backward, times.transfer, strict=False):
        final.append(final[-1] - back - copy)
    return tuple(final)


class _Machines:
    """The machines of a pipeline; rows are stages K - 1 to 0, columns are candidates."""

    def __init__(
        self,
        forward: Floats,
        backward: Floats,
        last_backward: Floats,
        transfer: Floats,
        *,
        overlapping: bool,
    ) -> None:
        self.overlapping = overlapping and bool(transfer.any())
        self.transfer = transfer[::-1]
        self.num_stages = len(forward)
        if not self.overlapping:
            forward, backward, last_backward = map(np.copy, (forward, backward, last_backward))
            forward[1:] += transfer
            backward[:-1] += transfer
            last_backward[:-1] += transfer
        self.forward = forward[::-1]
        self.backward = self._with_copies(backward[::-1])
        self.last_backward = self._with_copies(last_backward[::-1])

    @property
    def devices(self) -> slice:
        return slice(None, None, 2 if self.overlapping else 1)

    def first_forwards(self, num_microbatches: int) -> tuple[Floats, Floats]:
        """Return F of the first forwards' last, (K, n), and A of the next forward, (K-1, n)."""
        passed = self._with_copies(self.forward)[::-1]
        total, slowest = np.cumsum(passed, 0), np.maximum.accumulate(passed, 0)
        total, slowest = total[::-1], slowest[::-1]
        number = np.arange(self.num_stages)[:, None]
        before = np.minimum(number, num_microbatches - 1)
        done = total[self.devices] + before * slowest[self.devices]
        if not self.overlapping:
            return done, done[1:].copy()
        return done, total[1::2] + (number[:-1] + 1) * slowest[1::2]

    def _with_copies(self, devices: Floats) -> Floats:
        if not self.overlapping:
            return devices
        both = np.empty((2 * len(devices) - 1, devices.shape[1]))
        both[::2], both[1::2] = devices, self.transfer
        return both


def _run(machines: _Machines, num_microbatches: int) -> Floats:
    if num_microbatches <= MOST_ROUNDS:
        return _play(machines, num_microbatches)
    most, half = (_play(machines, rounds) for rounds in (MOST_ROUNDS, MOST_ROUNDS // 2))
    rate = (most - half) / (MOST_ROUNDS - MOST_ROUNDS // 2)
    return np.asarray(most + (num_microbatches - MOST_ROUNDS) * rate)


def _play(machines: _Machines, num_microbatches: int) -> Floats:
    forward, devices, num_stages = machines.forward, machines.devices, machines.num_stages
    spent = np.cumsum(machines.backward, 0)
    before = spent - machines.backward
    done, arrived = machines.first_forwards(num_microbatches)
    free = np.zeros_like(spent)
    free[devices] = done
    ended = free[devices]  # a view
    for i in range(num_microbatches - 1):
        # B_i and C_i: max(end on the machine before, free) + seconds, down the machines.
        free -= before
        np.maximum.accumulate(free, 0, out=free)
        free += spent
        # Then one forward per stage, until all are done.
        busy = min(num_stages, num_microbatches - 1 - i)
        waiting = min(busy, num_stages - 1)
        np.maximum(ended[:waiting], arrived[:waiting], out=ended[:waiting])
        ended[:busy] += forward[:busy]
        # It arrives at the next stage, which runs it after its next backward.
        if machines.overlapping:
            np.maximum(ended[1:busy], arrived[: busy - 1], out=arrived[: busy - 1])
            arrived[: busy - 1] += machines.transfer[: busy - 1]
        else:
            arrived[: busy - 1] = ended[1:busy]
    spent = np.cumsum(machines.last_backward, 0)
    free -= spent - machines.last_backward
    np.maximum.accumulate(free, 0, out=free)
    free += spent
    return free[devices][::-1]
