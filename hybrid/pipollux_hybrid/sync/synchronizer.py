"""Averages gradients over the replicas, stage by stage, while earlier stages still compute.

DistributedDataParallel expects each gradient once per backward, where GPipe with recomputation
delivers one per micro-batch, and silently loses gradients when the number of micro-batches falls.
So this package counts gradients (:mod:`pipollux_hybrid.sync.reducer`) and sends them in buckets
(:mod:`pipollux_hybrid.sync.bucket`), from the last stage to the first.

With n_ra samples and mean gradient g_ra on replica r in accumulation step a, parameters receive

    Σ_ra n_ra g_ra / Σ_ra n_ra

the gradient of the mean loss over the whole batch, also when shares differ by a sample or a replica
has none in the last batch of an epoch. Where the loss is a sum S_ra with a weight w_ra, g_ra is the
gradient of S_ra / n_ra, and the denominator is Σ_ra w_ra.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pipollux_hybrid.errors import PeerLostError, SynchronizationError
from pipollux_hybrid.job.control_plane import ControlPlane
from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.pipeline.microbatch import PyTree, tensors_of

from .backward_plan import BackwardPlan
from .bucket import BUCKET_BYTES, bucket_contents, check_wire
from .buffers import BufferSynchronizer
from .comm_timer import CommTimer
from .grad_norms import NormSum
from .hook_watch import HookWatch
from .iteration_totals import NUM_HEAD, IterationTotals, power_of_two
from .parameter_check import ParameterCheck
from .parameter_hooks import NOTHING, ParameterHooks, Trained, Watched, refuse_sparse
from .reducer import Reducer
from .stage_gradients import reset_gradients, scale_gradients
from .sync_result import SyncResult
from .tied_copies import TiedCopies

EXPLICIT = -2
"""Stands for autograd's task id where the caller marks the begin and the end of a backward."""


class GradientSynchronizer:
    """Averages the gradients of a pipeline over all replicas.

    Args:
        stages: Named parameters of each stage.
        num_replicas: Number R of replicas; with one, nothing is sent.
        control: Sums counts and flags over the replicas and tracks lost replicas.
        preconditioner: Weights of a parameter's squares in norms (Adam's geometry), or None.
        on_gradient: Called with the stage index whenever a parameter received a gradient.
        on_finished: Called at the end of each backward, with the result if it synchronized.
        on_settled: Called before ``on_finished``: combines per-batch state of layers over replicas.
        parameters: Compares parameters between replicas in the first steps.
        buffers: Synchronizes buffers.
        reduce_dtype: Type on the wire: None for float32 (float64 gradients: float64), or bfloat16.
        bucket_bytes: Bytes of a bucket on the wire.
        mesh: The groups of this process in a multi-process pipeline; ``stages`` then has one stage.
        tied: Parameters that other stages hold copies of.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[tuple[str, nn.Parameter]]],
        *,
        num_replicas: int,
        control: ControlPlane,
        preconditioner: Callable[[nn.Parameter], Tensor | None],
        on_gradient: Callable[[int], None],
        on_finished: Callable[[SyncResult | None], None],
        on_settled: Callable[[], None],
        parameters: ParameterCheck | None = None,
        buffers: BufferSynchronizer | None = None,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        mesh: ProcessMesh | None = None,
        tied: TiedCopies | None = None,
    ) -> None:
        check_wire(reduce_dtype, bucket_bytes, num_replicas)
        self._stages = [list(named) for named in stages]
        self._num_replicas = num_replicas
        self._control, self._losses = control, control.losses
        self._preconditioner, self._on_gradient = preconditioner, on_gradient
        self._on_finished, self._on_settled = on_finished, on_settled
        self._parameters, self._buffers, self._tied = parameters, buffers, tied
        self._wire, self._mesh = (reduce_dtype, bucket_bytes), mesh
        group = mesh.replicas if mesh else None
        self._reducer = Reducer(*self._wire, buckets_wanted=num_replicas > 1, group=group)
        self._comm_timer = CommTimer([p.device for named in stages for _, p in named])
        self._hooks = ParameterHooks(self._measure, self._arrive)
        self._hook_watch = HookWatch(self._stages)
        self._trained: Trained | None = None
        self._lock = threading.Lock()
        # The current backward.
        self._task: int | None = None
        self._plans: list[BackwardPlan] = []
        self._synchronizes = self._measures = self._timed = False
        self._factors: list[float] = []
        """n²/b for each gradient of a parameter, in the order of arrival."""
        self._watched: Watched | None = None
        # The current iteration.
        self._fresh, self._averaged = True, False
        self._part: object | None = None
        self._samples = self._estimates = 0
        self._loss_weight = 0.0
        self._weighed: BackwardPlan | None = None
        """The plan whose weight is still to be added: it is known at the end of its backward."""
        self._measurable, self._unit = True, 0
        self._sqr = [NormSum() for _ in self._stages]
        self._nonfinite = False
        self._unstepped: tuple[nn.Parameter, Tensor] | None = None
        """A parameter with its gradient, until the optimizer has stepped."""
        # Agreed on by the replicas in the last iteration.
        self._finite = True
        self._reference = self._batch_over_part = 1.0
        self._announce_numbers()

    def _announce_numbers(self) -> None:
        """Tell the control plane how many numbers the first backward sends, for replicas that run
        none in the first iteration.
        """
        if self._num_replicas == 1:
            return
        count = NUM_HEAD + 1  # of a multi-process pipeline
        if self._mesh is None:
            trained = [[p for _, p in named if p.requires_grad] for named in self._stages]
            reduce_dtype, bucket_bytes = self._wire
            contents = bucket_contents(trained, bucket_bytes, reduce_dtype)
            check, buffers = self._parameters, self._buffers
            count = NUM_HEAD + len(contents) + sum(map(len, trained))
            count += len(check.report() if check is not None else [])
            count += len(buffers.report() if buffers is not None else [])
        self._control.expect_numbers(count)

    def expect(self, plan: BackwardPlan) -> None:
        """Express gradients of earlier parts in the unit of this one, at its forward: gradients of
        a penalty on parameters may arrive before the model's.
        """
        if not self._fresh and plan.counted and plan.weighted:
            self._change_unit(plan.num_samples)

    def watch(self, output: PyTree, plan: BackwardPlan) -> None:
        """Apply a plan when the gradient of this output, a PyTree of tensors, arrives."""
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._start_backward, plan))

    @contextmanager
    def backward(self, plan: BackwardPlan) -> Iterator[None]:
        """Apply a plan to the backwards in the body, one per micro-batch."""
        with self._lock:
            self._begin(plan, task=EXPLICIT)
        yield
        self._end()

    def note_loss(self, loss: Tensor) -> None:
        """Record the loss of a backward before it ends; a loss on a GPU is not waited for."""
        if loss.device.type == "cpu" and loss.numel() == 1:
            self._nonfinite |= not math.isfinite(float(loss.detach()))

    def agreed(self, loss: Tensor) -> Tensor:
        """Return the loss of the last backward, or NaN if any loss of the iteration is not finite,
        so that scripts which skip the step on such a loss skip it in all processes.
        """
        return loss if self._finite else loss * math.nan

    def stepped(self) -> None:
        """End the iteration after the optimizer's step."""
        self._averaged, self._unstepped = False, None
        if self._parameters is not None:
            self._parameters.stepped()

    def prepare(self, num_replicas: int) -> Callable[[], None]:
        """Allocate buckets for ``num_replicas``, in any thread; return a function to adopt them."""
        reducer = Reducer(*self._wire, buckets_wanted=num_replicas > 1)
        if num_replicas > 1 and not self._reducer.buckets:
            reducer.make_room(Trained.of(self._stages, self._trained))

        def use() -> None:
            if not self._reducer.buckets:
                self._reducer = reducer

        return use

    def rejoin(self, num_replicas: int) -> None:
        """Reset for another number of replicas, between two iterations."""
        check_wire(*self._wire, num_replicas)
        self._num_replicas = num_replicas
        group = self._mesh.replicas if self._mesh else None
        self._reducer = self._reducer.successor(num_replicas, group)
        if self._parameters is not None:
            self._parameters.rejoin()
        if self._buffers is not None:
            self._buffers.rejoin(num_replicas, group)
        if self._tied is not None:
            self._tied.rejoin()
        if self._losses.void:
            reset_gradients(self._stages, zeros=False)
        self._task, self._plans = None, []
        self._fresh, self._averaged, self._part = True, False, None
        self._reference = self._batch_over_part = 1.0
        self._nonfinite, self._finite, self._unstepped = False, True, None
        self._announce_numbers()

    # --- begin of a backward -------------------------------------------------------------------

    def _start_backward(self, plan: BackwardPlan, gradient: Tensor) -> Tensor | None:
        task = torch._C._current_graph_task_id()
        with self._lock:
            if task != self._task:
                self._enter(plan, task)
            elif plan not in self._plans:
                self._join(plan)
        # A batch that does not count gives zeros everywhere, but its hooks still run.
        return None if plan.counted else torch.zeros_like(gradient)

    def _enter(self, plan: BackwardPlan, task: int) -> None:
        if self._task is not None and self._synchronizes and self._num_replicas > 1:
            raise SynchronizationError(
                "the backward before this one failed after it had begun to average gradients, so "
                "this replica and the others may be at different gradients: let the job end, and "
                "start it again from its last checkpoint"
            )
        Variable._execution_engine.queue_callback(partial(self._finish, self._rewind()))
        self._begin(plan, task)

    def _begin(self, plan: BackwardPlan, task: int) -> None:
        if self._tied is not None:
            self._tied.begin()
        self._hook_watch.begin(in_parts=plan.passes > 1 or self._num_replicas > 1)
        self._task, self._plans = task, [plan]
        self._synchronizes = plan.synchronize and not self._losses.void
        # A single gradient for the whole iteration gives no separate estimates.
        single = self._fresh and plan.synchronize and plan.passes == self._num_replicas == 1
        if self._fresh:
            self._begin_iteration(plan)
        if plan.part is None or plan.part is not self._part:
            self._account(plan)
        else:
            self._measurable = False  # two backwards of the same samples: halves of one estimate
        self._part = plan.part
        self._measures = plan.measured and plan.counted and not single
        self._timed = plan.timed
        self._prepare_reducer(plan)

    def _prepare_reducer(self, plan: BackwardPlan) -> None:
        if not (self._num_replicas > 1 or self._measures or plan.timed):
            self._hooks.set(NOTHING, arrivals=False, gradients=False)
            self._watched = Watched(self._stages)
            return
        trained = self._trained = Trained.of(self._stages, self._trained)
        self._hooks.set(trained, arrivals=True, gradients=self._measures)
        self._reducer.prepare_for_backward(trained, plan, self._weight())
        self._watched = None
        if self._measures:
            self._factors = [self._unit**2 / size for size in plan.samples_by_pass]

    def _rewind(self) -> Callable[[], None]:
        """Return a function that undoes the begin of a backward without parameter gradients."""
        before = (self._fresh, self._part, self._samples, self._estimates, self._measurable)
        sqr, averaged = list(self._sqr), self._averaged
        weights = self._loss_weight, self._weighed

        def rewind() -> None:
            if before[0] and averaged and self._part is before[1] is not None:
                scale_gradients(self._stages, 1.0 / self._batch_over_part)
            self._fresh, self._part, self._samples, self._estimates, self._measurable = before
            self._sqr = sqr
            self._loss_weight, self._weighed = weights

        return rewind

    def _begin_iteration(self, plan: BackwardPlan) -> None:
        if plan.weighted and plan.part is not self._part:
            self._check_stepped()
        self._fresh = False
        if self._averaged and plan.part is not None and plan.part is self._part:
            # A second backward of the part that ended the iteration. The gradients are averages
            # already; in the unit of this part's gradients they count B / Σ_r n_r times as much.
            scale_gradients(self._stages, self._batch_over_part)
            return
        self._samples = self._estimates = self._unit = 0
        self._loss_weight, self._weighed = 0.0, None
        self._averaged, self._part, self._measurable = False, None, True
        self._sqr = [NormSum() for _ in self._stages]

    def _check_stepped(self) -> None:
        """Refuse gradients that the script adds up over several batches of an adaptive loader."""
        before, self._unstepped = self._unstepped, None
        if before is not None and before[0].grad is before[1] and bool(before[1].any()):
            raise SynchronizationError(
                "the gradients of the last batch are still there: neither optimizer.step() nor "
                "optimizer.zero_grad() followed its backward. Gradients that a script accumulates "
                "over the batches of an adaptive loader are in no checkpoint, and batches are "
                "divided otherwise after a restart: remove the accumulation, and make the loader "
                "with the batch_size of an optimizer step; for batches that do not fit in memory "
                "call autoscale_batch_size(…, gradient_accumulation=True)"
            )

    def _account(self, plan: BackwardPlan) -> None:
        if not plan.counted:
            return
        if plan.weighted:
            self._change_unit(plan.num_samples)
        self._unit = plan.num_samples
        self._samples = (self._samples if plan.weighted else 0) + plan.num_samples
        self._loss_weight, self._weighed = self._loss_weight if plan.weighted else 0.0, plan
        self._estimates += plan.passes

    def _change_unit(self, num_samples: int) -> None:
        """Accumulated gradients are Σ n g / unit. With the unit set to the next part's n, its mean
        gradient is added with the right weight.
        """
        if self._unit not in (0, num_samples):
            scale_gradients(self._stages, self._unit / num_samples)
            self._unit = num_samples

    def _join(self, plan: BackwardPlan) -> None:
        self._plans.append(plan)
        self._measurable, self._timed = False, self._timed or plan.timed
        self._synchronizes |= plan.synchronize and not self._losses.void
        if self._watched is None:
            self._reducer.join(plan, self._weight())

    def _weight(self) -> float | None:
        """Return the factor of gradients on the wire; None if they are not sent."""
        if not self._synchronizes or self._num_replicas == 1:
            return None
        # Close to 1 if replicas have the same share of the batch, whatever its size.
        return self._unit / self._reference if self._samples > 0 else 0.0

    # --- gradients ---------------------------------------------------------------------------

    def _measure(
        self, stage: int, name: str, number: int, parameter: nn.Parameter, gradient: Tensor
    ) -> None:
        """Add n²/b |c|² for the contribution c of one pass over b of n samples."""
        if gradient.is_sparse:
            refuse_sparse(stage, name, gradient)
        if not self._measures or not self._measurable or self._task is None:
            return
        arrival, factors = self._reducer.counts[number], self._factors
        if arrival >= len(factors):
            return
        if self._tied is not None and self._tied.keep(parameter, arrival, gradient):
            return
        self._sqr[stage].add(gradient, self._preconditioner(parameter), factors[arrival])

    def _arrive(self, stage: int, name: str, number: int, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            refuse_sparse(stage, name, gradient)
        if self._timed:
            self._on_gradient(stage)
        with self._lock:
            if self._task is not None:
                self._reducer.mark_ready(number)

    # --- end of a backward ---------------------------------------------------------------------

    def _finish(self, rewind: Callable[[], None]) -> None:
        if not self._any_arrived():
            # torch.autograd.grad was called, for gradients of other tensors.
            rewind()
            self._hook_watch.release()
            self._task = None
            return
        self._end()

    def _end(self) -> None:
        if self._weighed is not None:
            self._loss_weight += self._weighed.weight
            self._weighed = None
        self._hook_watch.end()
        self._watched = None
        if self._measures:
            self._measurable = self._measurable and not self._reducer.surplus
            if self._tied is not None:
                self._tied.measure(self._sqr[0], self._factors, self._preconditioner)
        if not self._synchronizes:
            self._task, self._plans, self._finite = None, [], True
            self._on_finished(None)
            return
        try:
            alone = self._num_replicas == 1 and self._mesh is None
            result = self._finish_alone() if alone else self._finish_together()
            if self._tied is not None:
                result = self._tied.add_up(result, timed=self._plans[0].timed)
            self._fresh = self._averaged = True
            self._nonfinite = False
            self._unstepped = self._some_gradient()
            self._task, self._plans = None, []
            self._on_finished(result)
        except PeerLostError as error:
            if not self._losses.note(error, voids=True):
                raise
            # No step follows, as in accumulation; zeros, as the script may read gradients.
            reset_gradients(self._stages, zeros=True)
            self._task, self._plans = None, []
            self._on_finished(None)

    def _some_gradient(self) -> tuple[nn.Parameter, Tensor] | None:
        for named in self._stages:
            for _, parameter in named:
                if parameter.grad is not None:
                    return parameter, parameter.grad
        return None

    def _any_arrived(self) -> bool:
        watched, self._watched = self._watched, None  # it keeps gradients alive
        return self._reducer.any if watched is None else watched.changed()

    def _finish_alone(self) -> SyncResult:
        self._on_settled()
        weight = self._loss_weight if self._samples > 0 else 1.0
        self._batch_over_part = weight / max(self._unit, 1)
        self._finite = not self._nonfinite
        if self._samples > 0:
            _check_weight(weight)
            scale_gradients(self._stages, self._unit / weight)
        estimates = self._estimates if self._measurable else 0
        sqr = self._sqr_sum() * self._samples / weight**2
        return SyncResult(self._samples, estimates, sqr, 0.0)

    def _finish_together(self) -> SyncResult:
        reducer, check = self._reducer, self._parameters
        held = check.report() if check is not None else []
        self._comm_timer.start()
        if self._num_replicas > 1:
            with self._lock:
                reducer.flush()
        total = self._summary(held).sum_over_replicas(
            self._control,
            self._mesh,
            self._settle,
            lambda sums: check is not None and check.differs(sums),
        )
        if check is not None:
            check.end(differing=total.differing > 0.0)
        if total.samples <= 0.0:
            raise SynchronizationError(
                "no replica has samples that count in this iteration: its gradients are the mean "
                "over nothing"
            )
        _check_weight(total.weight)
        self._finite = total.nonfinite == 0.0
        if self._num_replicas == 1:
            scale_gradients(self._stages, self._unit / total.weight)
        if self._mesh is None:
            self._settle(total.late, total.buffers)
        reducer.write_back(self._reference / total.weight, total.present)
        if total.part_samples > 0.0:
            # A power of two, so that scaling by it never changes the digits of the sums.
            self._reference = power_of_two(total.part_samples / self._num_replicas)
            self._batch_over_part = total.weight / total.part_samples
        return SyncResult(
            round(total.samples),
            0 if total.unmeasurable else round(total.estimates),
            total.sqr * total.samples / total.weight**2,
            self._comm_timer.stop(),
            tuple(time for bucket in reducer.buckets for time in bucket.times or ()),
        )

    def _settle(self, late: Sequence[float], buffers: Sequence[float]) -> None:
        if self._num_replicas > 1:
            self._reducer.relaunch([count > 0.0 for count in late])
            self._reducer.wait()
            if self._buffers is not None:
                self._buffers.synchronize(buffers)
        self._on_settled()

    def _summary(self, parameters: Sequence[float]) -> IterationTotals:
        # A replica's samples are counted by its first process only.
        speaks = self._mesh is None or self._mesh.stage == 0
        late, present = self._reducer.report(counts=self._samples > 0)
        return IterationTotals(
            samples=self._samples if speaks else 0,
            weight=self._loss_weight if speaks else 0.0,
            part_samples=self._unit if speaks and self._plans[0].counted else 0,
            estimates=self._estimates if speaks else 0,
            sqr=self._sqr_sum(),
            unmeasurable=not self._measurable,
            nonfinite=self._nonfinite,
            parameters=parameters,
            buffers=self._buffers.report() if self._buffers and self._num_replicas > 1 else [],
            late=late,
            present=present,
        )

    def _sqr_sum(self) -> float:
        totals = [norms.total() for norms in self._sqr]
        return sum(float(total) for total in totals if total is not None)


def _check_weight(weight: float) -> None:
    """Refuse a mean over nothing, the same on all replicas."""
    if not weight > 0.0:
        raise SynchronizationError(
            f"the weights of the loss add up to {weight:g} over the batch, and its gradient is "
            "that of the sum divided by them: give batches in which something counts"
        )
