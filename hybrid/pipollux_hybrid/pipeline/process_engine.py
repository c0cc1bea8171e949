"""The multi-process pipeline of one replica, with one process per stage.

Every process of the replica runs the same script, and holds the layers of its stage only. torch's
schedules (:mod:`torch.distributed.pipelining`) define the order of a stage's forwards and
backwards; :mod:`.process_stage` allows micro-batches to change from step to step.

* ``"gpipe"`` (Huang et al., NeurIPS'19): all forwards, then all backwards. A stage keeps the
  activations of M micro-batches.
* ``"1f1b"`` (PipeDream-Flush, Narayanan et al., ICML'21): alternating forwards and backwards, as
  soon as possible. Stage k keeps the activations of min(M, K - k). With fewer micro-batches than
  stages it equals GPipe.
* ``"interleaved"`` (Narayanan et al., SC'21): 1F1B with V chunks of layers in each process, chunk q
  in stage q mod K, so that other stages wait for a V-th of a stage (:mod:`.interleaved`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, _batch_p2p
from torch.utils.weak import WeakIdKeyDictionary

from pipollux_hybrid.errors import BrokenPipelineError, ConfigurationError
from pipollux_perfmodel.timing.params import ScheduleKind

from .boundary import describe, from_header, rest_of_header, to_header
from .carried import CarriedValues
from .engine import cut_stages, num_recomputed, with_index
from .host_random import seeded
from .interleaved import Interleaved
from .loss import HalvesCheck, LossFunction, LossScope, MicrobatchLoss
from .microbatch import PyTree, gather, map_tensors, samples_of, scatter
from .process_stage import HostGroup, LossOfMicrobatch, ProcessStage
from .skip import connections_of
from .stage_notes import StageNotes
from .unloaded import Unloaded, refusal


class _GPipe(ScheduleGPipe):
    def _initialize_stage(self, *_: Any) -> None:
        """The stage allocates buffers per micro-batch."""


class _OneForwardOneBackward(Schedule1F1B):
    def _initialize_stage(self, *_: Any) -> None:
        """The stage allocates buffers per micro-batch."""


_NO_LOSS = torch.zeros(())
"""Placeholder for losses in torch's schedules: stages know the start of their backward."""
_Schedule: TypeAlias = _GPipe | _OneForwardOneBackward | Interleaved


class ProcessEngine:
    """Stage k of a sequential module, run by this process, to whose device its layers are moved.

    Args:
        module: The layers; those of other stages stay unchanged.
        balance: Number of layers of each stage, or of each of K·V chunks, from first to last.
        device: Device of this stage.
        checkpoint: Recomputed micro-batches.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved"``.
        group: The K processes of the replica, in the order of stages.
        row: The same processes, for tensors on the CPU.
        carrier: Device from which the group sends tensors of this stage.
        check_peers: Raises a RuntimeError if data that a group received on a device may be from a
            lost process.

    Raises:
        ConfigurationError: The module cannot be cut like this.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        device: torch.device,
        checkpoint: str,
        schedule: ScheduleKind,
        group: dist.ProcessGroup,
        row: HostGroup,
        carrier: torch.device,
        check_peers: Callable[[dist.ProcessGroup, torch.device], None],
    ) -> None:
        self.checkpoint, self._kind = checkpoint, schedule
        self._group, self._row, self._check_peers = group, row, check_peers
        self.num_stages, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.device = with_index(device)
        self._carrier = carrier
        self.stages = cut_stages(module, balance, self.num_stages)
        connections = connections_of(module, self.stages, self._part)
        self.notes = StageNotes()
        surroundings = self.notes, carrier
        self.chunks = [
            ProcessStage(
                *(self.stages[q].place(self.device), q, len(balance), group, row),
                *(CarriedValues(connections, q, f"{self._part} {q}"), *surroundings),
            )
            for q in range(self.index, len(balance), self.num_stages)
        ]
        """The stages driven by torch's schedules: this stage, or its chunks."""
        self._schedules: dict[tuple[int, bool, bool], _Schedule] = {}
        # Weak keys: other stages' parameters will be freed, unless the script holds them.
        self._names: MutableMapping[Any, str] = WeakIdKeyDictionary()
        self._names.update((parameter, name) for name, parameter in module.named_parameters())
        self._loss: MicrobatchLoss | None = None
        self._step, self._halves = 0, HalvesCheck()
        self._failure: Exception | None = None

    def rejoin(self, group: dist.ProcessGroup, row: HostGroup) -> None:
        """Continue with the same processes in other groups, between two batches."""
        self._group, self._row = group, row
        for chunk in self.chunks:
            chunk.rejoin(group, row)

    def connect(self) -> None:
        """Send messages between neighbours, as batches do: NCCL connects two processes in their
        first one in each direction, and in the first two at once, where the host waits for the
        other process. Raises a BrokenPipelineError if one is lost, or does not come in time.
        """
        # Chunks also follow each other from the last process to the first one.
        count = self.num_stages - (self._part == "stage" or self.num_stages == 2)
        for first in range(count):
            pair = first, (first + 1) % self.num_stages
            if self.index not in pair:
                continue
            other = sum(pair) - self.index
            send, receive = (
                dist.P2POp(
                    way,
                    torch.zeros(1, device=self._carrier),
                    group=self._group,
                    group_peer=other,
                )
                for way in (dist.isend, dist.irecv)
            )
            turns = [[send], [receive]] if self.index == first else [[receive], [send]]
            try:
                for turn in (*turns, [send, receive]):
                    for work in _batch_p2p(turn):
                        work.wait()
                self._check_peers(self._group, self._carrier)
            except RuntimeError as error:
                raise BrokenPipelineError(str(error)) from error

    @property
    def devices(self) -> list[torch.device]:
        """The device of this process for each stage, for its inputs."""
        return [self.device] * self.num_stages

    def named_parameters(self, module: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
        """Return the parameters of each stage, only of this process's stage."""
        names = {parameter: name for name, parameter in module.named_parameters()}
        here = self.stages[self.index :: self.num_stages]
        mine = [(names[p], p) for chunk in here for p in chunk.parameters()]
        return [mine if k == self.index else [] for k in range(self.num_stages)]

    @property
    def is_last(self) -> bool:
        """Whether this process has the outputs and the loss."""
        return self.index == self.num_stages - 1

    @property
    def _last(self) -> ProcessStage:
        return self.chunks[-1]

    @property
    def _part(self) -> str:
        return "stage" if len(self.stages) == self.num_stages else "chunk"

    def checkpointed(self, num_microbatches: int, *, training: bool) -> int:
        """Return the number of recomputed micro-batches."""
        return num_recomputed(self.checkpoint, num_microbatches, training=training)

    def train(
        self,
        inputs: PyTree,
        targets: PyTree,
        sizes: Sequence[int],
        loss_fn: LossFunction,
        *,
        scope: LossScope | None,
        training: bool,
        samples: int,
        factor: Tensor | None = None,
        divided: bool = False,
    ) -> tuple[Tensor, float | None]:
        """Run forward and backward of one batch; gradients are added to the parameters'.

        Args:
            inputs: PyTree of tensors of shape [batch, …]; used by the first stage.
            targets: The same; used by the last stage. Any value if the scope is the batch.
            sizes: Samples of each micro-batch.
            loss_fn: Of the model's output and the targets.
            scope: Input of the loss function; None: each micro-batch, checked at intervals.
            training: Whether the model is in training mode, in which activations are recomputed.
            samples: Samples of the batch that count; with 0 all gradients are zero.
            factor: Factor of all gradients, a scalar tensor on the device of this stage; None: 1.
            divided: Whether replicas or accumulation steps divide batches, whose loss is the mean.

        Returns:
            In every process: the loss over the batch, float64, without a graph; and the weight of a
            :class:`WeightedLoss`, else None. Gradients are those of the mean loss, or of the sum of
            a :class:`WeightedLoss` divided by the samples.

        Raises:
            ConfigurationError: The targets, or the loss function and its scope, do not fit.
            BrokenPipelineError: Another stage is lost.
        """
        whole = scope == "batch"
        total = sum(sizes)
        found = None if whole or not self.is_last else samples_of(targets, "the targets")
        if found not in (None, total):
            raise ConfigurationError(
                f"targets has {found} samples and inputs has {total}: dimension 0 "
                "of both is the batch, as both are cut into micro-batches along it"
            )
        targets = map_tensors(self._here, targets) if self.is_last else None
        self._loss = MicrobatchLoss(
            *(loss_fn, sizes, targets),
            scope=scope or "microbatch",
            samples=samples,
            step=self._step if scope is None else None,
            names=self._names,
            factor=factor,
            halves=self._halves if divided and scope is None else None,
        )
        self._step += 1
        recomputed = self.checkpointed(len(sizes), training=training)
        for chunk in self.chunks:
            chunk.begin(len(sizes), recomputed=recomputed, has_backward=True)
        labels = (
            [None] * len(sizes) if whole or not self.is_last else scatter(targets, sizes, "targets")
        )
        self._run(inputs, labels, sizes, trains=True, forwards_first=whole)
        loss = self._loss
        self._loss = None
        return self._shared_loss(loss.summary() if self.is_last else None)

    def run(self, inputs: PyTree, sizes: Sequence[int]) -> PyTree:
        """Run the forward of one batch without gradients; return its output in every process.
        Raises a BrokenPipelineError if another stage is lost.
        """
        for chunk in self.chunks:
            chunk.begin(len(sizes), recomputed=0, has_backward=False)
        outputs = self._run(inputs, None, sizes, trains=False)
        return self._shared_output(gather(outputs, sizes) if self.is_last else None)

    def _run(
        self,
        inputs: PyTree,
        labels: Sequence[PyTree] | None,
        sizes: Sequence[int],
        *,
        trains: bool,
        forwards_first: bool = False,
    ) -> list[PyTree]:
        """Run the schedule; return the last stage's outputs per micro-batch, if evaluating."""
        batches: list[tuple[PyTree, ...]] = [()] * len(sizes)
        if self.chunks[0].is_first:
            batches = [(x,) for x in scatter(map_tensors(self._here, inputs), sizes)]
        schedule = self._schedule(len(sizes), trains=trains, forwards_first=forwards_first)
        self._failure = None
        try:
            with self._own_random_numbers():
                schedule._step_microbatches(
                    batches,
                    None,
                    list(enumerate(labels)) if labels is not None and self.is_last else None,
                    [] if trains else None,
                    return_outputs=not trains,
                )
            self.notes.idle()
        except Exception as error:  # re-raised, with its cause if that is known
            schedule._internal_losses.clear()
            told = self._told(error)
            if told is error:
                raise
            raise told from (error if error.__cause__ is None else told.__cause__)
        self._check_peers(self._group, self._carrier)
        if trains or not self.is_last:
            return []
        last = self._last
        pairs = zip(last.layouts, last.output_chunks, strict=True)
        return [layout.value(tensors) for layout, tensors in pairs]

    def _here(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Unloaded):
            raise refusal(f"stage {self.index}")
        return tensor.detach().to(self.device, non_blocking=True)

    def _schedule(self, num_microbatches: int, *, trains: bool, forwards_first: bool) -> _Schedule:
        key = num_microbatches, trains, forwards_first
        if key not in self._schedules:
            loss = self._compute_loss if trains else None
            self._schedules[key] = self._make_schedule(num_microbatches, loss, forwards_first)
        return self._schedules[key]

    def _make_schedule(
        self, num_microbatches: int, loss: LossOfMicrobatch | None, forwards_first: bool
    ) -> _Schedule:
        if self._part == "chunk":
            return Interleaved(self.chunks, num_microbatches, loss, forwards_first=forwards_first)
        alternates = loss is not None and self._kind != "gpipe" and not forwards_first
        if alternates and num_microbatches >= self.num_stages:
            return _OneForwardOneBackward(
                self.chunks[0], num_microbatches, loss_fn=loss, scale_grads=False
            )
        return _GPipe(self.chunks[0], num_microbatches, loss_fn=loss, scale_grads=False)

    def _compute_loss(self, tensors: tuple[Tensor, ...], target: tuple[int, PyTree]) -> Tensor:
        """Store the start of a micro-batch's backward; with a loss over the whole batch, all starts
        are known at the last one. torch's schedules keep the returned value.
        """
        index, labels = target
        assert self._loss is not None  # noqa: S101  # a step has begun
        try:
            found = self._loss.add(index, self._last.leaving.value(tensors), labels)
        except Exception as error:  # the script's own code
            self._failure = error
            if labels is not None and not isinstance(labels, Tensor):
                error.add_note(
                    "the targets were cut into micro-batches along dimension 0: pass "
                    "pipollux.whole(tensor) where it is not the batch"
                )
            raise
        for number, roots in enumerate(found, start=index + 1 - len(found)):
            self._last.roots[number] = roots
        return _NO_LOSS

    def _told(self, error: Exception) -> Exception:
        """Return the original error: torch wraps errors of layers and of the transport."""
        if error is self._failure or isinstance(error, ConfigurationError):
            return error
        if isinstance(error.__cause__, Exception):
            return error.__cause__
        if isinstance(error, RuntimeError):
            return BrokenPipelineError(str(error))
        return error

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Draw independent numbers in the layers, and restore the script's generator, which must
        draw the same numbers in each process, for example to augment inputs and targets alike.
        """
        if self.num_stages == 1:
            yield
            return
        seed = int(torch.randint(1 << 62, (1,))) + self.index
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)
        try:
            with seeded(seed):
                yield
        finally:
            torch.set_rng_state(before)

    def _shared_loss(
        self, summary: tuple[Tensor, float | None] | None
    ) -> tuple[Tensor, float | None]:
        loss, weight = summary or (torch.zeros((), dtype=torch.float64), None)
        # The host needs the weight, without waiting for a loss on a GPU.
        told = torch.tensor([math.nan if weight is None else weight, 0.0], dtype=torch.float64)
        on_host = self._carrier.type == "cpu"
        if on_host:
            told[1] = loss
        self._row_broadcast(told)
        loss = told[1] if on_host else self._broadcast(loss.to(self._carrier))
        weight = float(told[0])
        return loss, None if math.isnan(weight) else weight

    def _row_broadcast(self, tensor: Tensor) -> None:
        if self.num_stages > 1:
            try:
                self._row.broadcast(tensor, self.num_stages - 1)
            except RuntimeError as error:
                raise BrokenPipelineError(str(error)) from error

    def _shared_output(self, output: PyTree) -> PyTree:
        if self.num_stages == 1:
            return output
        header = to_header(describe(None, "")[0], "")[0]
        rest: Tensor | None = None
        tensors: list[Tensor] = []
        if self.is_last:
            name = self.stages[-1].output_name
            boundary, tensors = describe(output, name)
            header, rest = to_header(boundary, name)
        self._row_broadcast(header)
        count = rest_of_header(header)
        if count:
            rest = torch.empty(count, dtype=torch.uint8) if rest is None else rest
            self._row_broadcast(rest)
        boundary = from_header(header, rest)
        if not self.is_last:
            tensors = [kind.empty(self.device) for kind in boundary.kinds]
        return boundary.value([self._broadcast(x.contiguous()) for x in tensors])

    def _broadcast(self, tensor: Tensor) -> Tensor:
        if self.num_stages > 1:
            try:
                dist.broadcast(tensor, group=self._group, group_src=self.num_stages - 1)
                self._check_peers(self._group, tensor.device)
            except RuntimeError as error:
                raise BrokenPipelineError(str(error)) from error
        return tensor
