"""A stage of a multi-process pipeline, driven by torch's pipeline schedules.

:class:`torch.distributed.pipelining.PipelineStage` fixes the number and the shapes of micro-batches
at construction. Here they change from step to step, and the last micro-batch may be shorter. So
buffers are allocated per micro-batch, from the header that the previous stage sends with it
(:mod:`.boundary`).

A stage waits for that header when the schedule receives the micro-batch. The previous stage sends
it as soon as it has computed, before it waits for anything, so there is no deadlock: 1F1B has
computed a micro-batch before it waits for the gradient of an earlier one. Gradients are preceded by
a byte for each tensor that may have one, which states whether it does::

    stage k                            stage k + 1
    forward i    header, tensors  →    waits for the header, receives
                 ←  flags, gradients   backward i

Headers and flags always use gloo, also with NCCL: the host reads them without waiting for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop
from torchgpipe.checkpoint import enable_recomputing, is_recomputing

from pipollux_hybrid.errors import ConfigurationError

from .boundary import HEADER_BYTES, BoundaryLayout, HeaderReader, HeaderWriter, describe
from .carried import CarriedValues
from .guards import BeforeForward, StageGuards
from .microbatch import PyTree, tensors_of
from .same_again import OTHERWISE, Kept
from .stage import NOTHING, Stage
from .stage_notes import StageNotes

LossOfMicrobatch: TypeAlias = Callable[[tuple[Tensor, ...], Any], Tensor]
"""Called by schedules with the last stage's tensors of a micro-batch and its targets."""
Roots: TypeAlias = list[tuple[Tensor, Tensor]]
"""Start of a backward: tensors, and their gradients."""


class HostGroup(Protocol):
    """Messages between processes on CPU tensors; ranks are in the order of stages."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a tensor with that of the root."""

    def start_send(self, tensor: Tensor, rank: int) -> Any:
        """Start sending a contiguous tensor."""

    def start_receive(self, tensor: Tensor, rank: int) -> Any:
        """Start receiving into a contiguous tensor."""

    def wait(self, work: Any) -> None:
        """Wait for the end of a send or receive."""


class ArrivingGradients(NamedTuple):
    """Gradients of one micro-batch from the next stage."""

    work: Any
    """The receive of the flags; None if no gradient can come."""
    flags: Tensor
    """Which of the buffers are gradients; the others contain zeros."""
    buffers: list[Tensor]


@dataclass
class _Forward:
    """Input of a stage's next forward; an :class:`nn.Module` is slow to change attributes."""

    arriving: BoundaryLayout | None = None
    """Layout of the input; None for the first stage."""
    leaving: BoundaryLayout | None = None
    """Layout of the last forward's output."""
    recomputes: bool = False
    """Whether it keeps only its input."""
    microbatch: int | None = None
    """Number of its micro-batch, if forwards are checked."""


class _Layers(nn.Module):
    """The layers of a stage, between the plain tensors of schedules."""

    def __init__(self, stage: Stage, skips: CarriedValues) -> None:
        super().__init__()
        self.stage = stage
        stage.skips = self.skips = skips
        self.guards = StageGuards(stage)
        self.now = _Forward()
        name, carried = stage.output_name, skips.names
        self.output_name = f"{name} with its skip connections {carried}," if carried else name
        """Name of the stage's output in messages."""

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        now = self.now
        message = inputs[0] if now.arriving is None else now.arriving.value(inputs)
        value, passing = self.skips.split(message)
        output = self._recomputed(value) if now.recomputes else self._run(value)
        if now.microbatch is not None:
            self.guards.check(value, output)
        now.leaving, tensors = describe(self.skips.join(output, passing), self.output_name)
        return tuple(tensors)

    def _run(self, value: PyTree) -> PyTree:
        microbatch = self.now.microbatch
        if microbatch is not None and not is_recomputing():
            return self.guards.changes.run(microbatch, value)
        return self.stage(value)

    def _recomputed(self, value: PyTree) -> PyTree:
        around = _AroundForwards(self.guards)
        same, kept = self.guards.same, list[Kept]()

        def run(value: PyTree) -> PyTree:
            output = self._run(value)
            if is_recomputing():
                same.compare(kept, tensors_of(output))
            return output

        # A recomputation that stops early returns no output.
        with set_checkpoint_early_stop(False) if same.is_on else nullcontext():
            output = checkpoint(run, value, use_reentrant=False, context_fn=around.both)
        kept += same.keep(tensors_of(output))
        return output

    def backward(self, roots: Roots) -> None:
        """Run the backward of a micro-batch; a deviating recomputation is a ConfigurationError."""
        try:
            torch.autograd.backward([x for x, _ in roots], [g for _, g in roots])
        except CheckpointError as error:
            raise ConfigurationError(f"stage {self.stage.index} {OTHERWISE}") from error


class ProcessStage(PipelineStage):
    """Stage k of K, for micro-batches of any size; or chunk q of K·V, in the process q mod K.

    ``group`` and ``row`` are the K processes of the pipeline in the order of stages, ``row`` for
    tensors on the CPU; ``carrier`` is the device from which the group sends tensors.
    """

    def __init__(
        self,
        stage: Stage,
        index: int,
        num_stages: int,
        group: dist.ProcessGroup,
        row: HostGroup,
        skips: CarriedValues,
        notes: StageNotes,
        carrier: torch.device,
    ) -> None:
        self._layers = _Layers(stage, skips)
        super().__init__(self._layers, index, num_stages, stage.device, group=group)
        self.row, self._carrier = row, carrier
        self._writer, self._reader = HeaderWriter(), HeaderReader()
        self._recomputed, self._checks = 0, False
        self._arriving: dict[int, BoundaryLayout] = {}
        self._inputs: dict[int, list[Tensor]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, ArrivingGradients] = {}
        self.roots: dict[int, Roots] = {}
        """In the last stage: start of the backward of each micro-batch."""
        self.layouts: list[BoundaryLayout] = []
        """In the last stage: the layout of each of :attr:`output_chunks`."""
        self._sending: list[Any] = []
        """Pending sends of headers and flags, which are complete at the end of the step."""
        self.notes, self._row = notes, stage.index
        self._ranks: dict[int, int] = {}
        """Global ranks of neighbours in the group, by stage."""

    def rejoin(self, group: dist.ProcessGroup, row: HostGroup) -> None:
        """Continue with the same processes in other groups, between two batches."""
        self.group, self.row = group, row
        self._ranks.clear()

    @property
    def leaving(self) -> BoundaryLayout:
        """Layout of the stage's last output."""
        leaving = self._layers.now.leaving
        assert leaving is not None  # noqa: S101  # a forward came before
        return leaving

    def begin(self, num_microbatches: int, *, recomputed: int, has_backward: bool) -> None:
        """Start a step of M micro-batches; the first ``recomputed`` ones keep only their input."""
        for kept in (self._arriving, self._inputs, self._outputs, self._gradients, self.roots):
            kept.clear()
        for sent in (self._sending, self.output_chunks, self.layouts):
            sent.clear()
        self._recomputed, self.chunks = recomputed, num_microbatches
        self._layers.guards.contributions.begin(num_microbatches)
        self._checks = has_backward and num_microbatches > 1
        self.has_backward = has_backward

    # --- forwards ----------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch; see :class:`PipelineStage`."""
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
        layers, guards = self._layers, self._layers.guards
        layers.now.recomputes = fwd_chunk_id < self._recomputed and torch.is_grad_enabled()
        layers.now.microbatch = fwd_chunk_id if self._checks else None
        with (
            self.notes.computing(self._row, fwd_chunk_id, "forward"),
            _IN_LAYERS,
            guards.buffers.forward(fwd_chunk_id),
            NOTHING if self.is_last else guards.attributes.without_losses(),
        ):
            output = layers(*(args if self.is_first else self._arrived(fwd_chunk_id)))
        self._outputs[fwd_chunk_id] = output
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
            self.layouts.append(self.leaving)
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a micro-batch; see :class:`PipelineStage`."""
        if self.is_last:
            return []
        self.notes.sending(self._row, fwd_chunk_id, "send_output")
        to = self.stage_index + 1
        for message in self._writer.encode(self.leaving, self._layers.output_name):
            self._send(message, to)
        outputs = self._outputs[fwd_chunk_id]
        return [self._op(dist.isend, self._carried(x.detach()), to) for x in outputs]

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Do nothing: sent tensors are released at the end of the step. Called by torch >= 2.15."""

    def _arrived(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        arriving = self._layers.now.arriving = self._arriving[fwd_chunk_id]
        arrived = self._inputs[fwd_chunk_id] = [
            x.to(self.device) for x in self._inputs[fwd_chunk_id]
        ]
        if self.has_backward and torch.is_grad_enabled():
            for x, kind in zip(arrived, arriving.kinds, strict=True):
                x.requires_grad_(kind.requires_grad)
        return tuple(arrived)

    # --- backwards ---------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of a micro-batch; see :class:`PipelineStage`."""
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
        with self.notes.computing(self._row, bwd_chunk_id, "backward"):
            outputs = self._outputs.pop(bwd_chunk_id)
            roots = (
                self.roots.pop(bwd_chunk_id, [])
                if self.is_last
                else self._received_roots(bwd_chunk_id, outputs)
            )
            if roots:
                with _IN_LAYERS:
                    self._layers.backward(roots)

    def _received_roots(self, chunk: int, outputs: tuple[Tensor, ...]) -> Roots:
        """Return the outputs for which the next stage has gradients, and the gradients."""
        work, flags, buffers = self._gradients.pop(chunk)
        if work is None:
            return []
        self.row.wait(work)
        roots = zip((x for x in outputs if x.requires_grad), buffers, flags.tolist(), strict=True)
        return [(x, gradient.to(self.device)) for x, gradient, has_one in roots if has_one]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradients of a micro-batch; see :class:`PipelineStage`."""
        if self.is_first or not self.has_backward:
            return []
        self.notes.sending(self._row, bwd_chunk_id, "send_gradient")
        inputs, to = self._inputs.pop(bwd_chunk_id), self.stage_index - 1
        kinds = self._arriving.pop(bwd_chunk_id).kinds
        wanted = [x for x, kind in zip(inputs, kinds, strict=True) if kind.requires_grad]
        if wanted:
            flags = [x.grad is not None for x in wanted]
            self._send(torch.tensor(flags, dtype=torch.uint8), to)
        # The receiver has buffers, so missing gradients are sent as zeros; flags mark them.
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
        return [self._op(dist.isend, self._carried(x), to) for x in gradients]

    # --- messages ----------------------------------------------------------------------------

    def _op(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self._rank_of(stage), self.group)

    def _carried(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous().to(self._carrier)

    def _rank_of(self, stage: int) -> int:
        if stage not in self._ranks:
            assert self.group is not None  # noqa: S101  # set by the constructor
            self._ranks[stage] = dist.get_global_rank(self.group, self._process_of(stage))
        return self._ranks[stage]

    def _process_of(self, stage: int) -> int:
        return int(self.stage_index_to_group_rank[stage])

    def _send(self, message: Tensor, stage: int) -> None:
        self._sending.append((self.row.start_send(message, self._process_of(stage)), message))

    def _receive_header(self) -> BoundaryLayout:
        return self._reader.decode(self._receive_bytes(HEADER_BYTES), self._receive_bytes)

    def _receive_bytes(self, count: int) -> Tensor:
        message = torch.empty(count, dtype=torch.uint8)
        source = self._process_of(self.stage_index - 1)
        self.row.wait(self.row.start_receive(message, source))
        return message


class _InLayers:
    """Wraps errors of layers in an error with a cause, like torch, unlike errors of messages."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, Exception):  # any error of the user's layers
            raise RuntimeError(f"a layer failed: {error}") from error


_IN_LAYERS = _InLayers()


class _AroundForwards:
    def __init__(self, guards: StageGuards) -> None:
        self._guards = guards
        self._before = BeforeForward([], [])
        self._entered: list[ExitStack] = []

    def both(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return both contexts; the second is reusable."""
        return self._first(), self

    @contextmanager
    def _first(self) -> Iterator[None]:
        with self._guards.kept() as self._before:
            yield

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(enable_recomputing())
        stack.enter_context(self._guards.replaced(self._before))
        self._entered.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
