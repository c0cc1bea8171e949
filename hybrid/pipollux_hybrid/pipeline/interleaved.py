"""Interleaved 1F1B: several chunks of layers in each process, on torch's runtime.

The order of forwards and backwards is the performance model's
(:mod:`pipollux_perfmodel.timing.device_order`), which is that of torch's
``ScheduleInterleaved1F1B`` wherever torch has one; it also knows numbers of micro-batches that
torch refuses, such as those of an epoch's last batch. torch's runtime adds what is sent and
received, and runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from pipollux_perfmodel.timing.device_order import device_order

from .process_stage import LossOfMicrobatch, ProcessStage

__all__ = ["Interleaved", "actions_of"]

_WORK = {"forward": schedules.FORWARD, "backward": schedules.FULL_BACKWARD}
_RECEIVES = (schedules.RECV_F, schedules.RECV_B)
_SENDS = (schedules.SEND_F, schedules.SEND_B)


class Interleaved(_PipelineScheduleRuntime):
    """The schedule of the chunks of one process.

    Args:
        chunks: Of this process, in order.
        num_microbatches: M.
        loss_fn: Of a micro-batch; None: forwards alone.
    """

    def __init__(
        self,
        chunks: Sequence[ProcessStage],
        num_microbatches: int,
        loss_fn: LossOfMicrobatch | None,
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # torch has no types there
            list(chunks), num_microbatches, loss_fn=loss_fn, scale_grads=False
        )
        num_chunks, num_stages = chunks[0].num_stages, chunks[0].group_size
        self.pipeline_order_with_comms = {
            self.rank: actions_of(
                self.rank, num_stages, num_chunks, num_microbatches, trains=loss_fn is not None
            )
        }

    def _initialize_stages(self, *_: Any) -> None:
        """Do nothing: chunks make their buffers as micro-batches come."""

    def _step_microbatches(self, *args: Any, **options: Any) -> Any:
        """Run a step; see torch's runtime, which prints the whole schedule where a layer fails."""
        with _unsaid():
            return super()._step_microbatches(*args, **options)


def actions_of(
    stage: int, num_stages: int, num_chunks: int, num_microbatches: int, *, trains: bool
) -> list[_Action]:
    """Return what the process of a stage does, in its order.

    Args:
        stage: k.
        num_stages: K.
        num_chunks: K·V.
        num_microbatches: M.
        trains: Whether there are backwards.
    """
    orders: dict[int, list[_Action]] = {
        k: [
            _Action(chunk, _WORK[phase], microbatch)
            for phase, chunk, microbatch in device_order(
                "interleaved", k, num_stages, num_chunks, num_microbatches
            )
            if trains or phase == "forward"
        ]
        for k in range(num_stages)
    }
    whole = schedules._add_send_recv(orders, lambda chunk: chunk % num_stages, num_chunks)
    return _with_waits(_receive_late(whole[stage], stage, num_stages))


def _receive_late(actions: Sequence[_Action], rank: int, num_stages: int) -> list[_Action]:
    """Return the actions with the first receive of each chunk as late as can be.

    torch begins to receive as soon as a sender may have sent. The first receive of a chunk waits
    for the message that tells what comes (:mod:`.process_stage`), and work that could be done would
    wait, too. As messages between two processes come in one order, those after it are put off with
    it. NCCL also has sends wait for their receives: of two processes the first one receives what it
    is to receive before it sends, as in torch's ``defer_pp_recv``.
    """
    late: list[_Action] = []
    waiting: list[_Action] = []

    def receive(last: int) -> None:
        late.extend(waiting[:last])
        del waiting[:last]

    for action in actions:
        chunk, kind, microbatch, _ = action
        first = kind is schedules.RECV_F and microbatch == 0
        if first or (waiting and kind in _RECEIVES):
            waiting.append(action)
            continue
        if kind in _SENDS:
            peer = (chunk + (1 if kind is schedules.SEND_F else -1)) % num_stages
            if rank < peer:
                receive(len(waiting))
        elif kind not in _RECEIVES:
            needed = schedules.RECV_F if kind is schedules.FORWARD else schedules.RECV_B
            wanted = _Action(chunk, needed, microbatch)
            if wanted in waiting:
                receive(waiting.index(wanted) + 1)
        late.append(action)
    receive(len(waiting))
    return late


def _with_waits(actions: list[_Action]) -> list[_Action]:
    """Return the actions with a wait for each send, which torch wants from 2.15 on."""
    add_waits = getattr(schedules, "_add_wait_send", None)
    return actions if add_waits is None else list(add_waits({0: actions})[0])


@contextmanager
def _unsaid() -> Iterator[None]:
    """Keep torch's lines about an error to itself: the error says more, and is raised."""
    logger = logging.getLogger(schedules.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
