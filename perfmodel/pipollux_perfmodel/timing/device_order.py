"""Order of a device's work: GPipe, 1F1B, interleaved 1F1B (`timeline` has diagrams).

The first two have one device per stage. Interleaved 1F1B (Narayanan et al., SC'21, section 2.2) has
V stages on each of K devices, stage q on device q mod K, in the order of torch's
`ScheduleInterleaved1F1B`. Micro-batches come in rounds of K if K divides M, else of the next larger
number that divides M. torch rejects M that max(1, M // K) rounds do not divide. Forwards are
ordered by round, then stage, then micro-batch; backwards likewise, last stage first. Device k runs

    w_k = min(M·V, (V - 1)·(micro-batches of a round) + 2·(K - 1 - k))

forwards, then alternates one forward and one backward, then runs the remaining backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from .params import ScheduleKind

Phase = Literal["forward", "backward"]


class Work(NamedTuple):
    """A forward or backward of one micro-batch in one stage."""

    phase: Phase
    stage: int
    microbatch: int


def device_order(
    kind: ScheduleKind, device: int, num_devices: int, num_stages: int, num_microbatches: int
) -> list[Work]:
    """Return the work of device k, in order; `num_stages` is K·V.

    >>> [f"{work.phase[0]}{work.microbatch}" for work in device_order("1f1b", 0, 2, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if kind == "interleaved":
        return _interleaved(device, num_devices, num_stages // num_devices, num_microbatches)
    forwards = [Work("forward", device, i) for i in range(num_microbatches)]
    backwards = [Work("backward", device, i) for i in range(num_microbatches)]
    if kind == "gpipe":
        return forwards + backwards[::-1]
    return _in_turn(forwards, backwards, num_stages - 1 - device)


def num_rounds(num_devices: int, num_microbatches: int) -> int:
    """Return the number of equal rounds, of K or more micro-batches, of interleaved 1F1B.

    >>> num_rounds(4, 8), num_rounds(4, 10), num_rounds(4, 11), num_rounds(4, 3)
    (2, 2, 1, 1)
    """
    most = max(1, num_microbatches // num_devices)
    return next(rounds for rounds in range(most, 0, -1) if num_microbatches % rounds == 0)


def _interleaved(
    device: int, num_devices: int, stages_per_device: int, num_microbatches: int
) -> list[Work]:
    rounds = num_rounds(num_devices, num_microbatches)
    per_round = num_microbatches // rounds

    def order(make: Callable[[int, int], Work], chunks: range) -> list[Work]:
        return [
            make(chunk * num_devices + device, number * per_round + i)
            for number in range(rounds)
            for chunk in chunks
            for i in range(per_round)
        ]

    chunks = range(stages_per_device)
    forwards = order(lambda stage, i: Work("forward", stage, i), chunks)
    backwards = order(lambda stage, i: Work("backward", stage, i), chunks[::-1])
    warm_up = (stages_per_device - 1) * per_round + 2 * (num_devices - 1 - device)
    return _in_turn(forwards, backwards, warm_up)


def _in_turn(forwards: list[Work], backwards: list[Work], warm_up: int) -> list[Work]:
    """Return the first forwards, then alternating forwards and backwards, then the rest."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - warm_up :]
