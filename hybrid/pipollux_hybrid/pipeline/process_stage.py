"""A stage in a process of its own, as torch's pipeline schedules drive it.

:class:`torch.distributed.pipelining.PipelineStage` fixes the number and the shapes of micro-batches
when it is made, and infers them by a forward of its own. Here they change from step to step, and
the last micro-batch of a batch may be a shorter one. So buffers are made for each micro-batch as
it comes, from the header that the stage before sends with it (:mod:`.boundary`).

A stage waits for that header where the schedule has it receive the micro-batch. The stage before
sends it as soon as it has computed, before it waits for anything, so neither keeps the other
waiting: 1F1B has computed a micro-batch before it waits for the gradient of an earlier one. With
the gradients goes a byte for each tensor that may have one, which says whether it has::

    stage k                            stage k + 1
    forward i    header, tensors  →    waits for the header, receives
                 ←  flags, gradients   backward i

Headers and flags travel over gloo, also beside NCCL: the host reads them, and waits for no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop
from torchgpipe.checkpoint import enable_recomputing, is_recomputing
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.tracker import use_skip_tracker

from pipollux_hybrid.errors import ConfigurationError

from .attributes import LayerAttributes
from .boundary import HEADER_BYTES, BoundaryLayout, HeaderReader, HeaderWriter, describe
from .buffer_values import BufferValues, Values
from .host_random import HostRandom
from .injected import InjectionCheck
from .microbatch import PyTree, tensors_of
from .mixing import MixingCheck
from .same_again import OTHERWISE, Kept, SameAgain
from .skip import SkipTracker
from .stage import Stage
from .stage_notes import StageNotes

__all__ = ["HostGroup", "LossOfMicrobatch", "ProcessStage", "Roots"]

LossOfMicrobatch: TypeAlias = Callable[[tuple[Tensor, ...], Any], Tensor]
"""What schedules call with the last stage's tensors of a micro-batch and its targets."""
Roots: TypeAlias = list[tuple[Tensor, Tensor]]
"""Where a backward begins: tensors, and their gradients."""


class HostGroup(Protocol):
    """Messages between processes on tensors on the CPU; ranks are in the order of stages."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a tensor by that of one process."""

    def start_send(self, tensor: Tensor, rank: int) -> Any:
        """Begin to send a contiguous tensor."""

    def start_receive(self, tensor: Tensor, rank: int) -> Any:
        """Begin to overwrite a contiguous tensor by what a process sends."""

    def wait(self, work: Any) -> None:
        """Return when something that was begun is done."""


class ArrivingGradients(NamedTuple):
    """Gradients that the next stage sends of one micro-batch."""

    work: Any
    """Of the flags; None where no gradient can come."""
    flags: Tensor
    """Which of the buffers are gradients; the others are zeros in their place."""
    buffers: list[Tensor]


class _Layers(nn.Module):
    """The layers of a stage, between the plain tensors that schedules carry.

    Args:
        stage: The layers.
        layout: Where stashed tensors go to.
    """

    def __init__(self, stage: Stage, layout: SkipLayout) -> None:
        super().__init__()
        self.stage = stage
        self.buffer_values = BufferValues(stage)
        self.attributes = LayerAttributes(stage)
        parts = stage, self.buffer_values
        self._checks = InjectionCheck(*parts), MixingCheck(*parts)
        self._same = SameAgain(stage)
        self._layout = layout
        self.arriving: BoundaryLayout | None = None
        """Layout of the coming forward's input; None for the first stage."""
        self.leaving: BoundaryLayout | None = None
        """Layout of the last forward's output."""
        self.recomputes = False
        """Whether the coming forward keeps its input only."""
        self.is_cut = False
        """Whether the batch has several micro-batches."""

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        value = inputs[0] if self.arriving is None else self.arriving.value(inputs)
        output = self._recomputed(value) if self.recomputes else self._run(value)
        if self.is_cut and not self._layout.by_ns_name:
            for check in self._checks:
                check.check(value, output)
        self.leaving, tensors = describe(output, self.stage.output_name)
        return tuple(tensors)

    def _run(self, value: PyTree) -> PyTree:
        if not self._layout.by_ns_name:
            return self.stage(value)
        with use_skip_tracker(SkipTracker(self._layout)):
            return self.stage(value)

    def _recomputed(self, value: PyTree) -> PyTree:
        around = _AroundForwards(self.buffer_values)
        kept: list[Kept] = []

        def compared(value: PyTree) -> PyTree:
            output = self._run(value)
            if is_recomputing():
                self._same.compare(kept, tensors_of(output))
            return output

        # A recomputation that is compared has to reach its end.
        with set_checkpoint_early_stop(not self._same.is_on):
            output = checkpoint(compared, value, use_reentrant=False, context_fn=around.both)
        kept += self._same.keep(tensors_of(output))
        return output

    def backward(self, roots: Roots) -> None:
        """Run the backward of a micro-batch.

        Raises:
            ConfigurationError: The layers computed something else when recomputed.
        """
        try:
            torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        except CheckpointError as error:
            raise ConfigurationError(f"stage {self.stage.index} {OTHERWISE}") from error


class ProcessStage(PipelineStage):
    """Stage k of K, for micro-batches of any sizes; or chunk q of K·V, in the process q mod K.

    Args:
        stage: Its layers, on their device.
        index: k, or q.
        num_stages: K, or K·V.
        group: The K processes of the pipeline, in the order of stages.
        row: The same processes, for tensors on the CPU.
        layout: Where stashed tensors go to.
        notes: Of this process.
        carrier: Where tensors have to be for the group to send them.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        num_stages: int,
        group: dist.ProcessGroup,
        row: HostGroup,
        layout: SkipLayout,
        notes: StageNotes,
        carrier: torch.device,
    ) -> None:
        self._layers = _Layers(stage, layout)
        super().__init__(self._layers, index, num_stages, stage.device, group=group)
        self.row, self._carrier = row, carrier
        self._writer, self._reader = HeaderWriter(), HeaderReader()
        self._recomputed = 0
        self._arriving: dict[int, BoundaryLayout] = {}
        self._inputs: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, ArrivingGradients] = {}
        self.roots: dict[int, Roots] = {}
        """Of the last stage: where the backward of each micro-batch begins."""
        self.layouts: list[BoundaryLayout] = []
        """Of the last stage: the layout of each of :attr:`output_chunks`."""
        self._sending: list[Any] = []
        """Headers and flags on their way, which have arrived when the step has ended."""
        self.notes, self._row = notes, stage.index
        """Told of what the stage does, for time lines."""

    @property
    def leaving(self) -> BoundaryLayout:
        """Layout of the stage's last output."""
        assert self._layers.leaving is not None  # noqa: S101  # a forward came before
        return self._layers.leaving

    def begin(self, num_microbatches: int, *, recomputed: int, has_backward: bool) -> None:
        """Begin a step.

        Args:
            num_microbatches: M.
            recomputed: How many micro-batches, from the first on, keep their input only.
            has_backward: Whether gradients come back.
        """
        for kept in (self._arriving, self._inputs, self._outputs, self._gradients, self.roots):
            kept.clear()
        for sent in (self._sending, self.output_chunks, self.layouts):
            sent.clear()
        self._recomputed, self.chunks = recomputed, num_microbatches
        self._layers.is_cut = num_microbatches > 1
        self.has_backward = has_backward

    # --- forwards ----------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives a micro-batch; see :class:`PipelineStage`."""
        if self.is_first:
            self.notes.idle()
            return []
        self.notes.receiving(self._row, fwd_chunk_id, "receive_input")
        arriving = self._arriving[fwd_chunk_id] = self._receive_header()
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
        with (
            self.notes.computing(self._row, fwd_chunk_id, "forward"),
            _in_layers(),
            self._layers.buffer_values.forward(fwd_chunk_id),
            nullcontext() if self.is_last else self._layers.attributes.without_losses(),
        ):
            output = self._layers(*(args if self.is_first else self._arrived(fwd_chunk_id)))
        self._outputs[fwd_chunk_id] = output
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
            self.layouts.append(self.leaving)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends a micro-batch on; see :class:`PipelineStage`."""
        if self.is_last:
            return []
        self.notes.sending(self._row, fwd_chunk_id, "send_output")
        to = self.stage_index + 1
        for message in self._writer.encode(self.leaving, self._layers.stage.output_name):
            self._send(message, to)
        outputs = self._outputs[fwd_chunk_id]
        return [self._op(dist.isend, self._carried(x.detach()), to) for x in outputs]

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Do nothing: what was sent goes with the step; torch from 2.15 on asks for it."""

    def _arrived(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        """Return the input of a micro-batch, which has been received."""
        arriving = self._layers.arriving = self._arriving[fwd_chunk_id]
        wanted = self.has_backward and torch.is_grad_enabled()
        arrived = self._inputs[fwd_chunk_id] = [
            x.to(self.device) for x in self._inputs[fwd_chunk_id]
        ]
        pairs = zip(arrived, arriving.kinds, strict=True)
        return tuple(x.requires_grad_(wanted and kind.requires_grad) for x, kind in pairs)

    # --- backwards ---------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the gradients of a micro-batch; see :class:`PipelineStage`."""
        if self.is_last or not self.has_backward:
            self.notes.idle()
            return []
        self.notes.receiving(self._row, bwd_chunk_id, "receive_gradient")
        outputs = [x for x in self._outputs[bwd_chunk_id] if x.requires_grad]
        buffers = [torch.empty(x.shape, dtype=x.dtype, device=self._carrier) for x in outputs]
        to = self.stage_index + 1
        flags = torch.empty(len(outputs), dtype=torch.uint8)
        work = self.row.start_receive(flags, self._process_of(to)) if buffers else None
        self._gradients[bwd_chunk_id] = ArrivingGradients(work, flags, buffers)
        return [self._op(dist.irecv, buffer, to) for buffer in buffers]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002  # torch's signature
        full_backward: bool = True,  # noqa: ARG002  # the same
        last_backward: bool = False,  # noqa: ARG002  # the same
    ) -> None:
        """Run the backward of a micro-batch; see :class:`PipelineStage`."""
        if not self.has_backward:
            return
        with self.notes.computing(self._row, bwd_chunk_id, "backward"), _in_layers():
            outputs = self._outputs.pop(bwd_chunk_id)
            roots = (
                self.roots.pop(bwd_chunk_id, [])
                if self.is_last
                else self._received_roots(bwd_chunk_id, outputs)
            )
            if roots:
                self._layers.backward(roots)

    def _received_roots(self, chunk: int, outputs: tuple[Tensor, ...]) -> Roots:
        """Return the outputs that the next stage has gradients of, with these."""
        work, flags, buffers = self._gradients.pop(chunk)
        if work is None:
            return []
        self.row.wait(work)
        roots = zip((x for x in outputs if x.requires_grad), buffers, flags.tolist(), strict=True)
        return [(x, gradient.to(self.device)) for x, gradient, has_one in roots if has_one]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the gradients of a micro-batch back; see :class:`PipelineStage`."""
        if self.is_first or not self.has_backward:
            return []
        self.notes.sending(self._row, bwd_chunk_id, "send_gradient")
        inputs, to = self._inputs.pop(bwd_chunk_id), self.stage_index - 1
        kinds = self._arriving.pop(bwd_chunk_id).kinds
        wanted = [x for x, kind in zip(inputs, kinds, strict=True) if kind.requires_grad]
        if wanted:
            flags = [x.grad is not None for x in wanted]
            self._send(torch.tensor(flags, dtype=torch.uint8), to)
        # Buffers are there, so zeros go where there is no gradient; the flag says so.
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
        return [self._op(dist.isend, self._carried(x), to) for x in gradients]

    # --- messages ----------------------------------------------------------------------------

    def _op(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self._rank_of(stage), self.group)

    def _carried(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the group can send it."""
        return tensor.contiguous().to(self._carrier)

    def _rank_of(self, stage: int) -> int:
        """Return the rank among all processes of the one that has a stage, or chunk."""
        assert self.group is not None  # noqa: S101  # it is told at the beginning
        return dist.get_global_rank(self.group, self._process_of(stage))

    def _process_of(self, stage: int) -> int:
        """Return the rank among the replica's processes of the one that has a stage, or chunk."""
        return int(self.stage_index_to_group_rank[stage])

    def _send(self, message: Tensor, stage: int) -> None:
        """Begin to send a header or flags."""
        self._sending.append((self.row.start_send(message, self._process_of(stage)), message))

    def _receive_header(self) -> BoundaryLayout:
        return self._reader.decode(self._receive_bytes(HEADER_BYTES), self._receive_bytes)

    def _receive_bytes(self, count: int) -> Tensor:
        message = torch.empty(count, dtype=torch.uint8)
        source = self._process_of(self.stage_index - 1)
        self.row.wait(self.row.start_receive(message, source))
        return message


@contextmanager
def _in_layers() -> Iterator[None]:
    """Make what layers raise the cause of an error, as torch does: messages raise errors, too."""
    try:
        yield
    except Exception as error:  # whatever the user's layers raise
        raise RuntimeError(f"a layer failed: {error}") from error


class _AroundForwards:
    """What is around the first forward of a micro-batch, and around each recomputation of it.

    Args:
        buffers: Of the stage.
    """

    def __init__(self, buffers: BufferValues) -> None:
        self._buffers = buffers
        self._values: Values = []
        self._host_random = HostRandom.now()
        self._entered: list[ExitStack] = []

    def both(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the two; the second may be entered any number of times."""
        return self._first(), self

    @contextmanager
    def _first(self) -> Iterator[None]:
        with self._buffers.kept() as self._values:
            yield

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(enable_recomputing())
        stack.enter_context(self._buffers.replaced(self._values))
        stack.enter_context(self._host_random.entered())
        self._entered.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
