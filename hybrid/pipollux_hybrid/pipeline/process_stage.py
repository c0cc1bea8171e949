"""A stage in a process of its own, as torch's pipeline schedules drive it.

:class:`torch.distributed.pipelining.PipelineStage` fixes the number and the shapes of micro-batches
when it is made, and infers them by a forward of its own. Here they change from step to step, and
the last micro-batch of a batch may be a shorter one. So buffers are made for each micro-batch as
it comes, from what the stage before tells of it (:mod:`.boundary`).

That message is received where nothing else is under way: before the first micro-batch of a step. At
any later one, a stage that waited for it would keep back the gradient that the other stage is
waiting for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint
from torchgpipe.checkpoint import enable_recomputing
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.tracker import use_skip_tracker

from pipollux_hybrid.errors import ConfigurationError

from .boundary import HEADER_BYTES, BoundaryLayout, describe, from_header, rest_of_header, to_header
from .microbatch import PyTree
from .skip import SkipTracker
from .stage import Stage
from .stage_notes import StageNotes

__all__ = ["LossOfMicrobatch", "ProcessStage"]

LossOfMicrobatch: TypeAlias = Callable[[tuple[Tensor, ...], Any], Tensor]
"""What schedules call with the last stage's tensors of a micro-batch and its targets."""


class _Layers(nn.Module):
    """The layers of a stage, between the plain tensors that schedules carry.

    Args:
        stage: The layers.
        layout: Where stashed tensors go to.
    """

    def __init__(self, stage: Stage, layout: SkipLayout) -> None:
        super().__init__()
        self.stage = stage
        self._layout = layout
        self.arriving: BoundaryLayout | None = None
        """What the stage before sends; None for the first stage."""
        self.leaving: BoundaryLayout | None = None
        """What this one gave last."""
        self.recomputes = False
        """Whether the coming forward keeps its input only."""

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        value = inputs[0] if self.arriving is None else self.arriving.value(inputs)
        output = self._recomputed(value) if self.recomputes else self._run(value)
        self.leaving, tensors = describe(output, self.stage.output_name)
        return tuple(tensors)

    def _run(self, value: PyTree) -> PyTree:
        if not self._layout.by_ns_name:
            return self.stage(value)
        with use_skip_tracker(SkipTracker(self._layout)):
            return self.stage(value)

    def _recomputed(self, value: PyTree) -> PyTree:
        return checkpoint(self._run, value, use_reentrant=False, context_fn=_while_recomputing)


class ProcessStage(PipelineStage):
    """Stage k of K, for micro-batches of any sizes; or chunk q of K·V, in the process q mod K.

    Args:
        stage: Its layers, on their device.
        index: k, or q.
        num_stages: K, or K·V.
        group: The K processes of the pipeline, in the order of stages.
        layout: Where stashed tensors go to.
        notes: Of this process.
        carrier: Where tensors have to be for the group to send them.
        check_peers: Raises a RuntimeError if what was received on a GPU may be of one that is gone.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        num_stages: int,
        group: dist.ProcessGroup,
        layout: SkipLayout,
        notes: StageNotes,
        carrier: torch.device,
        check_peers: Callable[[], None],
    ) -> None:
        self._layers = _Layers(stage, layout)
        super().__init__(self._layers, index, num_stages, stage.device, group=group)
        self._carrier, self._check_peers = carrier, check_peers
        self._sizes: Sequence[int] = ()
        self._recomputed = 0
        self._inputs: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._sent: BoundaryLayout | None = None
        self._telling: list[Any] = []
        """What is on its way to the next stage, which has it when the step has ended."""
        self.notes, self._row = notes, stage.index
        """Told of what the stage does, for time lines."""

    @property
    def leaving(self) -> BoundaryLayout:
        """What the stage gave for the last micro-batch."""
        assert self._layers.leaving is not None  # noqa: S101  # a forward came before
        return self._layers.leaving

    def begin(self, sizes: Sequence[int], *, recomputed: int, has_backward: bool) -> None:
        """Begin a step.

        Args:
            sizes: Samples of each micro-batch.
            recomputed: How many micro-batches, from the first on, keep their input only.
            has_backward: Whether gradients come back.
        """
        for kept in (self._inputs, self._outputs, self._gradients, self._telling):
            kept.clear()
        self.output_chunks.clear()
        self._sizes, self._recomputed, self.chunks = sizes, recomputed, len(sizes)
        self.has_backward, self._sent = has_backward, None

    # --- forwards ----------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives a micro-batch; see :class:`PipelineStage`."""
        if self.is_first:
            self.notes.idle()
            return []
        self.notes.receiving(self._row, fwd_chunk_id, "receive_input")
        if fwd_chunk_id == 0:
            self._layers.arriving = self._receive_header()
        assert self._layers.arriving is not None  # noqa: S101  # micro-batch 0 comes first
        arriving = self._layers.arriving.of(self._sizes[fwd_chunk_id], self._sizes[0])
        buffers = [kind.empty(self._carrier) for kind in arriving.kinds]
        self._inputs[fwd_chunk_id] = buffers
        return [self._op(dist.irecv, buffer, self.stage_index - 1) for buffer in buffers]

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        _kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of a micro-batch; see :class:`PipelineStage`."""
        self._layers.recomputes = fwd_chunk_id < self._recomputed and torch.is_grad_enabled()
        with self.notes.computing(self._row, fwd_chunk_id, "forward"), _in_layers():
            output = self._layers(*(args if self.is_first else self._arrived(fwd_chunk_id)))
        self._outputs[fwd_chunk_id] = output
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends a micro-batch on; see :class:`PipelineStage`."""
        if self.is_last:
            return []
        self.notes.sending(self._row, fwd_chunk_id, "send_output")
        to = self.stage_index + 1
        if fwd_chunk_id == 0:
            self._send_header(to)
        else:
            self._check_like_first(fwd_chunk_id)
        outputs = self._outputs[fwd_chunk_id]
        return [self._op(dist.isend, self._carried(x.detach()), to) for x in outputs]

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Do nothing: what was sent goes with the step; torch from 2.15 on asks for it."""

    def _arrived(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        """Return the input of a micro-batch, which has been received."""
        assert self._layers.arriving is not None  # noqa: S101  # it was received before
        wanted = self.has_backward and torch.is_grad_enabled()
        arrived = self._inputs[fwd_chunk_id] = [
            x.to(self.device) for x in self._inputs[fwd_chunk_id]
        ]
        pairs = zip(arrived, self._layers.arriving.kinds, strict=True)
        return tuple(x.requires_grad_(wanted and kind.requires_grad) for x, kind in pairs)

    # --- backwards ---------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the gradients of a micro-batch; see :class:`PipelineStage`."""
        if self.is_last or not self.has_backward:
            self.notes.idle()
            return []
        self.notes.receiving(self._row, bwd_chunk_id, "receive_gradient")
        buffers = [
            torch.empty(x.shape, dtype=x.dtype, device=self._carrier) if x.requires_grad else None
            for x in self._outputs[bwd_chunk_id]
        ]
        self._gradients[bwd_chunk_id] = buffers
        to = self.stage_index + 1
        return [self._op(dist.irecv, buffer, to) for buffer in buffers if buffer is not None]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: ARG002  # torch's signature
        last_backward: bool = False,  # noqa: ARG002  # the same
    ) -> None:
        """Run the backward of a micro-batch; see :class:`PipelineStage`."""
        if not self.has_backward:
            return
        with self.notes.computing(self._row, bwd_chunk_id, "backward"), _in_layers():
            outputs = self._outputs.pop(bwd_chunk_id)
            if self.is_last:
                roots, gradients = [loss] if loss.requires_grad else [], None
            else:
                received = self._gradients.pop(bwd_chunk_id)
                roots = [x for x in outputs if x.requires_grad]
                gradients = [x.to(self.device) for x in received if x is not None]
            if roots:
                torch.autograd.backward(roots, gradients)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the gradients of a micro-batch back; see :class:`PipelineStage`."""
        if self.is_first or not self.has_backward:
            return []
        self.notes.sending(self._row, bwd_chunk_id, "send_gradient")
        assert self._layers.arriving is not None  # noqa: S101  # micro-batch 0 came first
        inputs, to = self._inputs.pop(bwd_chunk_id), self.stage_index - 1
        return [
            # What the stage did not use has a gradient all the same: zero.
            self._op(
                dist.isend, self._carried(torch.zeros_like(x) if x.grad is None else x.grad), to
            )
            for x, kind in zip(inputs, self._layers.arriving.kinds, strict=True)
            if kind.requires_grad
        ]

    # --- messages ----------------------------------------------------------------------------

    def _op(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self._rank_of(stage), self.group)

    def _carried(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the group can send it."""
        return tensor.contiguous().to(self._carrier)

    def _rank_of(self, stage: int) -> int:
        """Return the rank among all processes of the one that has a stage, or chunk."""
        assert self.group is not None  # noqa: S101  # it is told at the beginning
        return dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])

    def _send_header(self, stage: int) -> None:
        """Begin to tell the next stage what it will receive, by itself as it is received.

        With other messages NCCL would send it by another communicator than this one receives from.
        """
        self._sent = self.leaving
        for message in to_header(self.leaving, self._layers.stage.output_name):
            if message is not None:
                told = message.to(self._carrier)
                work = dist.isend(told, self._rank_of(stage), group=self.group)
                self._telling.append((work, told))

    def _receive_header(self) -> BoundaryLayout:
        first = self._receive_bytes(HEADER_BYTES)
        rest = rest_of_header(first)
        return from_header(first, self._receive_bytes(rest) if rest else None)

    def _receive_bytes(self, count: int) -> Tensor:
        message = torch.empty(count, dtype=torch.uint8, device=self._carrier)
        source = self._rank_of(self.stage_index - 1)
        dist.recv(message, source, group=self.group)
        received = message.cpu()
        if message.is_cuda:
            self._check_peers()
        return received

    def _check_like_first(self, chunk: int) -> None:
        """Refuse a micro-batch that the next stage does not expect as it is."""
        assert self._sent is not None  # noqa: S101  # micro-batch 0 went first
        expected = self._sent.of(self._sizes[chunk], self._sizes[0])
        if self.leaving != expected:
            raise ConfigurationError(
                f"{self._layers.stage.output_name} is {_shapes(self.leaving)} for micro-batch "
                f"{chunk} of {self._sizes[chunk]} samples, where {_shapes(expected)} follows from "
                f"micro-batch 0 of {self._sizes[0]}: between stages with a process each, give "
                "tensors whose dimension 0 is the batch, and the same plain values for every "
                "micro-batch"
            )


@contextmanager
def _in_layers() -> Iterator[None]:
    """Make what layers raise the cause of an error, as torch does: messages raise errors, too."""
    try:
        yield
    except Exception as error:  # whatever the user's layers raise
        raise RuntimeError(f"a layer failed: {error}") from error


def _while_recomputing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return what is around a forward, and around the same when it is recomputed."""
    return nullcontext(), enable_recomputing()


def _shapes(boundary: BoundaryLayout) -> str:
    return ", ".join(
        f"{str(kind.dtype).removeprefix('torch.')} {kind.shape}" for kind in boundary.kinds
    )
