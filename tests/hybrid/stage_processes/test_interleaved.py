"""The order of interleaved stages' messages, without processes."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action

from pipollux_hybrid.pipeline.interleaved import actions_of
from tests.extent import grid

Message = tuple[str, int, int | None]


def message(action: _Action) -> tuple[Message, int]:
    """What is sent or received, and the chunk at the other end."""
    chunk, kind, microbatch, _ = action
    if kind is schedules.SEND_F:
        return ("output", chunk, microbatch), chunk + 1
    if kind is schedules.RECV_F:
        return ("output", chunk - 1, microbatch), chunk - 1
    if kind is schedules.SEND_B:
        return ("gradient", chunk, microbatch), chunk - 1
    return ("gradient", chunk + 1, microbatch), chunk + 1


@pytest.mark.parametrize(
    ("trains", "forwards_first"), [(True, False), (True, True), (False, False)]
)
@pytest.mark.parametrize(
    ("num_stages", "several", "num_microbatches"), grid([2, 3, 4], [2, 3], [1, 2, 3, 4, 5, 8, 11])
)
def test_nobody_waits_for_ever(
    num_stages: int, several: int, num_microbatches: int, trains: bool, forwards_first: bool
) -> None:
    """Also if every receive waits; messages come in the order in which they were sent."""
    waiting = {
        k: deque(
            actions_of(
                *(k, num_stages, num_stages * several, num_microbatches),
                trains=trains,
                forwards_first=forwards_first,
            )
        )
        for k in range(num_stages)
    }
    work = num_stages * several * num_microbatches * (2 if trains else 1)
    on_its_way: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    here: set[tuple[int, Message]] = set()
    done: set[tuple[str, int, int | None]] = set()
    before = -1
    while before != (before := sum(map(len, waiting.values()))):
        for k, actions in waiting.items():
            while actions:
                chunk, kind, microbatch, _ = actions[0]
                if kind in (schedules.SEND_F, schedules.SEND_B):
                    what, other = message(actions[0])
                    on_its_way[k, other % num_stages].append(what)
                elif kind in (schedules.RECV_F, schedules.RECV_B):
                    what, other = message(actions[0])
                    arriving = on_its_way[other % num_stages, k]
                    if not arriving:
                        break
                    assert arriving.popleft() == what
                    here.add((k, what))
                elif kind is schedules.FORWARD:
                    assert chunk == 0 or (k, ("output", chunk - 1, microbatch)) in here
                    done.add(("forward", chunk, microbatch))
                elif kind is schedules.FULL_BACKWARD:
                    last = chunk == num_stages * several - 1
                    assert last or (k, ("gradient", chunk + 1, microbatch)) in here
                    assert ("forward", chunk, microbatch) in done
                    done.add(("backward", chunk, microbatch))
                actions.popleft()
    assert before == 0
    assert len(done) == work
    assert not any(on_its_way.values())
