"""Interleaved 1F1B: several chunks of layers per process, on torch's runtime.

The order of forwards and backwards is the performance model's
(:mod:`pipollux_perfmodel.timing.device_order`). It equals torch's ``ScheduleInterleaved1F1B`` where
that is defined, and supports numbers of micro-batches that torch rejects, such as those of an
epoch's last batch. torch's runtime adds sends and receives, and executes the order.
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
    """The schedule of a process's chunks, in order; without a loss function, forwards only."""

    def __init__(
        self,
        chunks: Sequence[ProcessStage],
        num_microbatches: int,
        loss_fn: LossOfMicrobatch | None,
        *,
        forwards_first: bool = False,
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # torch has no types there
            list(chunks), num_microbatches, loss_fn=loss_fn, scale_grads=False
        )
        num_chunks, num_stages = chunks[0].num_stages, chunks[0].group_size
        self.pipeline_order_with_comms = {
            self.rank: actions_of(
                *(self.rank, num_stages, num_chunks, num_microbatches),
                trains=loss_fn is not None,
                forwards_first=forwards_first,
            )
        }

    def _initialize_stages(self, *_: Any) -> None:
        """Chunks allocate buffers per micro-batch."""

    def _step_microbatches(self, *args: Any, **options: Any) -> Any:
        """Run a step; suppresses torch's output of the whole schedule after an error."""
        with _unsaid():
            return super()._step_microbatches(*args, **options)


def actions_of(
    stage: int,
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    trains: bool,
    forwards_first: bool = False,
) -> list[_Action]:
    """Return the actions of a stage's process, in order; ``num_chunks`` is K·V."""
    orders: dict[int, list[_Action]] = {}
    for k in range(num_stages):
        order = [
            _Action(chunk, _WORK[phase], microbatch)
            for phase, chunk, microbatch in device_order(
                "interleaved", k, num_stages, num_chunks, num_microbatches
            )
            if trains or phase == "forward"
        ]
        if forwards_first:  # a stable sort keeps the order of each kind
            order.sort(key=lambda action: action.computation_type is not schedules.FORWARD)
        orders[k] = order
    whole = schedules._add_send_recv(orders, lambda chunk: chunk % num_stages, num_chunks)
    return _with_waits(_receive_late(whole[stage], stage, num_stages))


def _receive_late(actions: Sequence[_Action], rank: int, num_stages: int) -> list[_Action]:
    """Return the actions with receives of inputs as late as possible.

    torch starts to receive as soon as the sender may have sent. Receiving an input starts with
    waiting for its header (:mod:`.process_stage`), which would delay work that is ready. As
    messages between two processes are ordered, later receives from the same process are delayed as
    well. With NCCL, sends also wait for their receives: of two processes the first one receives
    before it sends, as in torch's ``defer_pp_recv``.
    """
    late: list[_Action] = []
    waiting: dict[int, list[_Action]] = {k: [] for k in range(num_stages)}

    def receive(peer: int, last: int) -> None:
        late.extend(waiting[peer][:last])
        del waiting[peer][:last]

    for action in actions:
        chunk, kind, _, _ = action
        towards = 1 if kind in (schedules.SEND_F, schedules.RECV_B) else -1
        peer = (chunk + towards) % num_stages
        if kind is schedules.RECV_F or (waiting[peer] and kind in _RECEIVES):
            waiting[peer].append(action)
            continue
        if kind in _SENDS:
            if rank < peer:
                receive(peer, len(waiting[peer]))
        elif kind not in _RECEIVES:
            needed = _needed(action)
            for other, queue in waiting.items():
                if needed in queue:
                    receive(other, queue.index(needed) + 1)
        late.append(action)
    for peer, queue in waiting.items():
        receive(peer, len(queue))
    return late


def _needed(action: _Action) -> _Action:
    kind = schedules.RECV_F if action.computation_type is schedules.FORWARD else schedules.RECV_B
    return _Action(action.stage_index, kind, action.microbatch_index)


def _with_waits(actions: list[_Action]) -> list[_Action]:
    """Return the actions with a wait for each send, required by torch 2.15 and later."""
    add_waits = getattr(schedules, "_add_wait_send", None)
    return actions if add_waits is None else list(add_waits({0: actions})[0])


@contextmanager
def _unsaid() -> Iterator[None]:
    """Suppress torch's output about an error, which is raised."""
    logger = logging.getLogger(schedules.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
