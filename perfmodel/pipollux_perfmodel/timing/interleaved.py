"""Interleaved 1F1B's times: when each stage's gradients are final, by simulating the order of work.

Stage k of K has V chunks of layers, in the order of `device_order` (Narayanan et al., SC'21). With
f_k, g_k, t_k as in `gpipe`, each chunk takes f_k/V forward and g_k/V backward; a copy from the last
stage to the first takes the average time of a copy. Then

    S_j(q)  = max(end of the stage's previous work, arrival of micro-batch j in chunk q)
    fin_i   = end of the last backward of chunk i, the first one of stage i

and likewise for backwards, whose gradients arrive from chunk q + 1. With equal stages, free copies
and K dividing M this takes M + (K - 1)/V slots of f + g. Up to `MOST_MICROBATCHES` the result is
exact and equals `timeline.Schedule`; beyond, the rate of the last half is extrapolated, as if K
divided M. Autograd cannot differentiate it; a fit does not need that (`one_f_one_b`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .device_order import Work, device_order
from .gpipe import Numbers, StageTimes
from .one_f_one_b import Floats, for_each_count

MOST_MICROBATCHES = 64
"""Micro-batches up to which the order is simulated, and at least two rounds of K."""


def final_times(
    times: StageTimes, chunks_per_stage: int, num_microbatches: Numbers, overlapping: bool
) -> tuple[Numbers, ...]:
    """Return fin_i of every stage, K entries; fin_0 is T_pipe. All arguments broadcast."""

    def run(forward: Floats, backward: Floats, last: Floats, copy: Floats, count: int) -> Floats:
        line = _Line(forward, backward, last, copy, chunks_per_stage, overlapping=overlapping)
        rounds = max(MOST_MICROBATCHES // len(forward), 2)
        most, before = rounds * len(forward), rounds // 2 * len(forward)
        if count <= most:
            return line.play(count)
        long, short = line.play(most), line.play(before)
        return np.asarray(long + (count - most) * (long - short) / (most - before))

    return for_each_count(times, num_microbatches, run)


@lru_cache(maxsize=1024)
def final_times_of_one(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    last_backward: tuple[float, ...],
    chunks_per_stage: int,
    num_microbatches: int,
) -> tuple[float, ...]:
    """Return fin_i of one pipeline with free copies; cached, as searches request it often."""
    free = [0.0] * (len(forward) - 1)
    times = StageTimes(forward, backward, last_backward, free)
    final = final_times(times, chunks_per_stage, num_microbatches, overlapping=False)
    return tuple(map(float, final))


def serial_final_times(
    times: StageTimes, chunks_per_stage: int, num_microbatches: Numbers
) -> tuple[Numbers, ...]:
    """Return when every stage's gradients are final if chunks run one at a time, K entries."""
    several = chunks_per_stage
    copies = several * sum(times.transfer, 0.0) + (several - 1) * _around(times.transfer)
    there = sum(times.forward, 0.0) + copies
    usual = there + sum(times.backward, 0.0) + copies
    last = there + sum(times.last_backward, 0.0) + copies
    final = [(num_microbatches - 1) * usual + last]
    # The first chunks of the stages below i still have to run the last micro-batch's backward.
    for back, copy in zip(times.last_backward, times.transfer, strict=False):
        final.append(final[-1] - back / several - copy)
    return tuple(final)


def _around(transfer: Sequence[Numbers]) -> Numbers:
    return sum(transfer, 0.0) / len(transfer) if transfer else 0.0


class _Line:
    def __init__(
        self,
        forward: Floats,
        backward: Floats,
        last_backward: Floats,
        transfer: Floats,
        chunks_per_stage: int,
        *,
        overlapping: bool,
    ) -> None:
        self.num_stages, several = len(forward), chunks_per_stage
        self.num_chunks = self.num_stages * several
        self.forward, self.backward, self.last_backward = (
            part / several for part in (forward, backward, last_backward)
        )
        around = transfer.mean(0) if len(transfer) else np.zeros(forward.shape[1])
        # Row k: from stage k to the next one.
        self.copies = np.vstack([transfer, around])
        self.overlapping = overlapping and bool(self.copies.any())

    def play(self, num_microbatches: int) -> Floats:
        order = _order(self.num_stages, self.num_chunks, num_microbatches)
        free = np.zeros_like(self.forward)
        links = np.zeros((2, self.num_chunks, self.forward.shape[1]))
        arrived: dict[Work, Floats] = {}
        final = np.zeros_like(self.forward)
        last_chunk, nothing = self.num_chunks - 1, np.zeros(self.forward.shape[1])
        for work in order:
            phase, chunk, microbatch = work
            stage, back = chunk % self.num_stages, phase == "backward"
            edge = last_chunk if back else 0
            if back:
                last = microbatch == num_microbatches - 1
                seconds = (self.last_backward if last else self.backward)[stage]
            else:
                seconds = self.forward[stage]
            if not self.overlapping and chunk != edge:  # receiving occupies the device
                seconds = seconds + self.copies[stage if back else stage - 1]
            ready = nothing if chunk == edge else arrived.pop(work)
            done = np.maximum(free[stage], ready) + seconds
            free[stage] = done
            if back and chunk < self.num_stages:
                final[stage] = done
            if chunk == (0 if back else last_chunk):
                continue
            if self.overlapping:
                link = links[int(back), chunk - back]
                done = np.maximum(done, link) + self.copies[(chunk - back) % self.num_stages]
                links[int(back), chunk - back] = done
            arrived[Work(phase, chunk + (-1 if back else 1), microbatch)] = done
        return final


@lru_cache(maxsize=64)
def _order(num_stages: int, num_chunks: int, num_microbatches: int) -> tuple[Work, ...]:
    waiting = [
        device_order("interleaved", k, num_stages, num_chunks, num_microbatches)[::-1]
        for k in range(num_stages)
    ]
    done: set[Work] = set()
    order: list[Work] = []
    while any(waiting):
        before = len(order)
        for stack in waiting:
            while stack and _needs(stack[-1], num_chunks) <= done:
                done.add(stack[-1])
                order.append(stack.pop())
        assert len(order) > before  # noqa: S101  # stages never wait for each other
    return tuple(order)


def _needs(work: Work, num_chunks: int) -> set[Work]:
    phase, chunk, microbatch = work
    if phase == "forward":
        return {Work(phase, chunk - 1, microbatch)} if chunk else set()
    if chunk == num_chunks - 1:
        return set()  # its forward comes before in its own stage
    return {Work(phase, chunk + 1, microbatch)}
