"""HybridParallel: a sequential model as a pipeline, replicated by data parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipollux_hybrid.checkpoint.manager import CheckpointManager, load_state
from pipollux_hybrid.checkpoint.model_state import ModelState
from pipollux_hybrid.checkpoint.optimizer_shards import OptimizerShards
from pipollux_hybrid.checkpoint.separate_steps import check_stages_may_step
from pipollux_hybrid.engines import choose_chunks, choose_orders, make_engine, refuse_plain_loop
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import device_groups, nccl
from pipollux_hybrid.job.agreement import agree, model_settings
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.peers import connect_devices, needing_all, passing_on
from pipollux_hybrid.job.replica_calls import BatchDigest
from pipollux_hybrid.module_wrapper import batch_of, check_arguments, check_single, layers_of
from pipollux_hybrid.optim.adaptive_optimizer import AdaptiveOptimizer
from pipollux_hybrid.optim.averages import follow_steps
from pipollux_hybrid.optim.foreign_steps import ForeignSteps
from pipollux_hybrid.optim.grad_scaler import scale_of
from pipollux_hybrid.optim.noise_meter import NoiseMeter
from pipollux_hybrid.optim.norm_guard import refuse_stage_norms
from pipollux_hybrid.optim.optimizer_check import OptimizerCheck
from pipollux_hybrid.optim.parameter_watch import ParameterWatch
from pipollux_hybrid.optim.scaling_rules import ScalingRule, default_rule
from pipollux_hybrid.partition.balance import PartitionRequest
from pipollux_hybrid.partition.placement import choose_devices, choose_num_stages, make_current
from pipollux_hybrid.pipeline import batchnorm
from pipollux_hybrid.pipeline.buffer_values import OncePerIteration
from pipollux_hybrid.pipeline.checkpoint_modes import choose_modes
from pipollux_hybrid.pipeline.engine import PipelineEngine
from pipollux_hybrid.pipeline.loss import (
    HalvesCheck,
    LossFunction,
    LossScope,
    check_scope,
    loss_value,
)
from pipollux_hybrid.pipeline.microbatch import (
    PyTree,
    batch_size_of,
    map_tensors,
    tensors_of,
    unmarked,
)
from pipollux_hybrid.pipeline.num_microbatches import FEWEST_NORMALISED, cut_sizes
from pipollux_hybrid.pipeline.samples import BatchCheck, plain_batch
from pipollux_hybrid.pipeline_model import PipelineModel
from pipollux_hybrid.push_pull.component import (
    Learning,
    check_supported,
    learner_of,
    make_learner,
)
from pipollux_hybrid.push_pull.options import PushPull
from pipollux_hybrid.sync.backward_plan import BackwardPlan, plan_backward
from pipollux_hybrid.sync.batch_digest import BatchDigests
from pipollux_hybrid.sync.bucket import BUCKET_BYTES
from pipollux_hybrid.sync.buffers import BufferSynchronizer, all_reduce_sum, broadcast_tensors
from pipollux_hybrid.sync.parameter_check import ParameterCheck
from pipollux_hybrid.sync.replica_check import ReplicaCheck, check_interval
from pipollux_hybrid.sync.same_samples import SameSamples
from pipollux_hybrid.sync.sync_result import SyncResult
from pipollux_hybrid.sync.synchronizer import GradientSynchronizer
from pipollux_hybrid.sync.tied_copies import TiedCopies, counted
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.schedule_choice import choose_cut
from pipollux_hybrid.telemetry.stage_profiler import StageProfiler
from pipollux_perfmodel.timing.params import joined_modes

if TYPE_CHECKING:
    from pipollux_hybrid.pipeline.process_engine import ProcessEngine


class HybridParallel(PipelineModel):
    """Trains a model as a pipeline of stages, replicated across processes.

    Its outputs and gradients are those of the plain module on the whole batch: micro-batches,
    accumulation steps and replicas are weighted by their samples, provided the loss is a MEAN over
    the batch dimension. ``backward()`` averages gradients over the replicas; the optimizer steps
    when an iteration is complete, at a learning rate scaled for the batch size.

    Example::

        model = nn.Sequential(...)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model = HybridParallel(model, optimizer, num_stages=2, num_microbatches=4)

    Args:
        module: The layers, an ``nn.Sequential``. Inputs and outputs of each are PyTrees of tensors
            of shape [batch, …]. Any other model is converted by :func:`as_layers`, and needs
            ``example_inputs``.
        optimizer: An optimizer over ``module.parameters()``.
        num_stages: Number K of stages; a scheduler's choice (``PIPOLLUX_NUM_STAGES``) takes
            precedence.
        balance: Number of layers of each stage, instead of ``num_stages``. Or a criterion:
            ``"time"``, for the fastest iteration (the default with ``example_inputs``);
            ``"memory"``, for the smallest maximum of a stage's memory; ``"parameters"`` (the
            default without). Tied layers stay together in one process.
        num_microbatches: Number M of micro-batches per batch; the attribute of the same name
            changes it between steps. None: 1 for one stage, 4·K for more (at most one per sample),
            after which it is adapted to goodput if ``autoscale_batch_size`` is used.
        devices: One device per stage; by default ``PIPOLLUX_DEVICES``, else this replica's share of
            the CUDA devices (K from r·K on for the r-th replica of a node), else the CPU.
        activation_checkpoint: When activations are recomputed: ``"always"``, ``"except_last"``,
            ``"never"``. In a multi-process pipeline also a list with one value per stage.
        schedule: Schedule of a multi-process pipeline: ``"1f1b"``, alternating one forward and one
            backward, with activations of K micro-batches; ``"interleaved"``, the same with V chunks
            of layers per stage, which shortens waits; ``"gpipe"``, all forwards and then all
            backwards, with activations of M micro-batches; or ``"auto"``, chosen by measurements at
            the start of each attempt. Needs ``processes_per_replica`` and :meth:`train_step`. None:
            ``"1f1b"``; a single-process pipeline always uses GPipe's.
        chunks_per_stage: V of an interleaved schedule; 2 by default. ``balance`` has K·V entries
            then.
        example_inputs: A batch, for converting the model and profiling the layers, ideally as large
            as a replica's.
        memory_limit: Bytes of each device that stages may use, by the layers' profile; by default
            nine tenths of a GPU's memory, and no limit on a CPU. A partition that does not fit is
            refused. Needs ``example_inputs``.
        scaling_rule: Scaling rule of the learning rate for the batch size; by default AdaScale, and
            AdamScale for Adam and other optimizers that divide by a root mean square.
        lr_scheduler: A scheduler over ``optimizer``. Its state is saved in checkpoints, and its
            ``step`` does nothing on accumulation steps, like the optimizer's.
        reduce_dtype: The dtype of gradients sent between replicas: None for float32 (float64 for
            float64 gradients), ``torch.bfloat16`` for half the bytes and 3 digits.
        bucket_bytes: Size of the buckets in which gradients are sent, as in
            DistributedDataParallel.
        broadcast_buffers: Whether buffers that changed on any replica are overwritten with rank 0's
            at the end of each iteration.
        shard_optimizer: Whether each replica steps a share of the parameters, holds the optimizer's
            state of these only, and receives the others: the same results with 1/R of the state.
        synchronization: :class:`PushPull`: replicas train on their own and exchange parameters
            through servers every H steps, for slow links. None: gradients are averaged over the
            replicas in every step.
        check_replicas: Compare all parameters and buffers of replicas after every optimizer step
            (True) or every n-th, for debugging; ``PIPOLLUX_CHECK_REPLICAS`` sets it from outside.

    Raises:
        ConfigurationError: An argument is wrong; the message names it and what is allowed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        num_stages: int | None = None,
        balance: Sequence[int] | str | None = None,
        num_microbatches: int | None = None,
        devices: Sequence[torch.device | str] | None = None,
        activation_checkpoint: str | Sequence[str] = "except_last",
        schedule: str | None = None,
        chunks_per_stage: int | None = None,
        example_inputs: PyTree | None = None,
        memory_limit: float | None = None,
        scaling_rule: ScalingRule | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        reduce_dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        broadcast_buffers: bool = True,
        shard_optimizer: bool = False,
        check_replicas: bool | int = False,
        synchronization: PushPull | None = None,
    ) -> None:
        ctx = context()
        options = {
            "activation_checkpoint": activation_checkpoint,
            "balance": balance,
            "devices": devices,
            "memory_limit": memory_limit,
            "scaling_rule": scaling_rule,
            "lr_scheduler": lr_scheduler,
            "broadcast_buffers": broadcast_buffers,
            "shard_optimizer": shard_optimizer,
        }
        module = layers_of(module, example_inputs)
        check_arguments(module, optimizer, options)
        check_single(ctx)
        super().__init__(module)
        self._context, self._normalises = ctx, bool(batchnorm.defer_statistics(module))
        metrics = self._metrics = ctx.component(Metrics)
        self._batch, spec = ctx.batch, ctx.pipeline
        spec.fewest_samples = FEWEST_NORMALISED if self._normalises else 1
        several = choose_chunks(ctx, schedule, chunks_per_stage)
        wanted = choose_num_stages(ctx.env, num_stages, balance, several)
        orders = choose_orders(ctx, schedule, chunks_per_stage, wanted)
        chosen = choose_devices(ctx.env, wanted, devices)
        make_current(chosen[ctx.env.stage])
        own = chosen if ctx.mesh is None else [chosen[ctx.env.stage]]
        nccl.check_devices(own)
        shared = device_groups.place(own)
        spec.num_stages, spec.devices = wanted, tuple(chosen)
        modes = choose_modes(activation_checkpoint, wanted, stages_have_processes=bool(ctx.mesh))
        spec.checkpoint_mode = joined_modes(modes)
        self.num_microbatches = num_microbatches
        request = PartitionRequest(
            num_stages=wanted,
            balance=balance,
            example_inputs=example_inputs,
            num_microbatches=self.num_microbatches,
            checkpoint=spec.checkpoint_mode,
            ties_apart=ctx.mesh is not None or schedule is not None,
            memory_limit=memory_limit,
            shards_optimizer=shard_optimizer and (wanted == 1 or ctx.mesh is not None),
        )
        interval = check_interval(check_replicas, ctx.env.check_replicas)
        learner = make_learner(ctx, synchronization, module, optimizer, lr_scheduler)
        agreed = {**options, **vars(request), "example_inputs": example_inputs is not None}
        agreed |= {"check_replicas": interval, "reduce_dtype": reduce_dtype}
        agreed |= {"schedule": schedule, "chunks_per_stage": chunks_per_stage}
        agreed |= {"devices": shared}  # which may have other indices
        agreed |= {"bucket_bytes": bucket_bytes, "activation_checkpoint": agreed.pop("checkpoint")}
        agree(ctx.control, "HybridParallel(…)", model_settings(module, optimizer, agreed))
        if ctx.mesh is not None:
            check_stages_may_step(optimizer, tells=ctx.env.leads)
        if ctx.env.world_size > 1:  # all begin with rank 0's parameters and buffers
            broadcast_tensors([*module.parameters(), *module.buffers()])
        cut = metrics.cut = choose_cut(ctx, metrics, module, optimizer, request, orders)
        self._layer_profile = cut.profile
        self._tied = TiedCopies.of(ctx, module, cut.balance)
        connect_devices()
        if synchronization is not None:
            ties = self._tied is not None
            check_supported(shards=shard_optimizer, compares=interval, ties=ties)
        # Hidden from nn.Module: the layers are registered by `module` alone.
        self.__dict__["_engine"], self._elsewhere = make_engine(
            ctx, module, optimizer, cut.balance, chosen, modes[ctx.env.stage], spec.schedule
        )
        shards = OptimizerShards(ctx, module, optimizer, wanted=shard_optimizer)
        self.balance, self._deferred = list(cut.balance), batchnorm.deferred_layers(module)
        if ctx.env.leads:
            metrics.reporter  # noqa: B018  # reports missing packages before training
        self._rule = scaling_rule or default_rule(optimizer)
        self._complete, self._no_sync, self._norm = True, False, torch.tensor(math.nan)
        self._has_gradients = False
        self._result: SyncResult | None = None
        self._timing = StageProfiler(ctx, self._engine)
        self._parameters_check = ParameterCheck(module, ctx, lambda: metrics.step)
        self._synchronizer = GradientSynchronizer(
            self._engine.named_parameters(module),
            num_replicas=ctx.env.num_replicas,
            control=ctx.control,
            preconditioner=lambda parameter: self._optimizer.preconditioner(parameter),
            on_gradient=self._timing.gradient_arrived,
            on_finished=self._backward_finished,
            on_settled=lambda: batchnorm.sum_statistics(self._deferred, all_reduce_sum),
            parameters=self._parameters_check,
            buffers=BufferSynchronizer.of(ctx, module) if broadcast_buffers else None,
            mesh=ctx.mesh,
            tied=self._tied,
            reduce_dtype=reduce_dtype,
            bucket_bytes=bucket_bytes,
        )
        if ctx.mesh is not None:
            ctx.closers.append(refuse_stage_norms(module))
        ctx.closers.append(follow_steps(module, lambda: ctx.batch.accumulates))
        self._steps_alike = OptimizerCheck(optimizer)
        ctx.control.checks.append(self._steps_alike)
        self._check = ReplicaCheck(module, ctx, interval, self._tied)
        self._same_samples, self._digests = SameSamples(ctx), BatchDigests()
        self._optimizer = AdaptiveOptimizer(
            optimizer,
            is_complete=lambda: self._complete,
            factor=self._rate_factor,
            on_step=self._stepped,
            before_step=self._check_step,
            shards=shards,
        )
        self._foreign = ForeignSteps(ctx, module, optimizer, lambda: self._optimizer.is_stepping)
        self._optimizer.follow(lr_scheduler)
        self._noise = NoiseMeter(ctx, counted(self._tied, module.parameters()), self._optimizer)
        tied_names = self._tied.listed_names() if self._tied else {}
        load_state(ModelState(module, optimizer, lr_scheduler, self._elsewhere, shards, tied_names))
        self._noise.prepare()
        if learner is not None:
            fresh = ctx.component(CheckpointManager).restored_from is None
            learner.begin(module, optimizer, fresh=fresh)
            ctx.component(Learning).learner = learner
        ctx.prepares.append(self._synchronizer.prepare)
        ctx.rejoined.append(self._rejoined)
        ctx.joined.append(lambda: self._check.compare(metrics.step))
        self._watch = ParameterWatch(module, optimizer)
        self._inputs_check, self._targets_check = BatchCheck("inputs"), BatchCheck("targets")
        self._halves_check, self._once = HalvesCheck(), OncePerIteration(module)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, except between accumulation steps."""
        self._optimizer.note_zero_grad()
        if self._optimizer.may_zero:
            super().zero_grad(set_to_none)

    def forward(self, *inputs: PyTree, **keywords: PyTree) -> PyTree:
        """Run a batch through the pipeline.

        In a multi-process pipeline this is for evaluation, without gradients: see
        :meth:`train_step`. All processes of a replica call it, and all get the output.

        Args:
            *inputs: A tensor, or tuples, lists and dicts of tensors, each of shape [batch, …];
                several arguments reach the first layer as a tuple.
            **keywords: The same as a dict of them, for a converted model; otherwise refused.

        Returns:
            The module's output, on :attr:`output_device`.
        """
        batch = batch_of(self.module, inputs, keywords)
        sizes = self._sizes(batch)
        if not isinstance(self._engine, PipelineEngine):
            if torch.is_grad_enabled():
                refuse_plain_loop()
            meeting = self._calling("model(inputs) under torch.no_grad()", sizes, batch)
            with meeting, self._context.control.leaving(), passing_on():
                output = self._engine.run(batch, sizes)
            batchnorm.commit_statistics(self._deferred)
            return output
        return self._run_batch(self._engine, batch, sizes)[0]

    def _run_batch(
        self, engine: PipelineEngine, batch: PyTree, sizes: list[int]
    ) -> tuple[PyTree, BackwardPlan | None]:
        """Run a batch through the stages of this process; return the output, and its plan."""
        batch = map_tensors(lambda x: x.to(self.devices[0], non_blocking=True), batch)
        plan = self._plan(sizes, batch) if torch.is_grad_enabled() else None
        # Another replica counts the sample of a padding batch.
        counts = plan is None or plan.num_samples > 0
        separately = plan is not None and plan.apart
        with self._counting(counts), self._changing_once(plan):
            output = engine.run(batch, sizes, training=self.training, separately=separately)
        if plan is not None:
            self._synchronizer.watch(output, plan)
        else:
            # No backward ends this iteration; replicas are equal again after the next one that has.
            batchnorm.commit_statistics(self._deferred)
        return output, plan

    def train_step(
        self,
        inputs: PyTree,
        targets: PyTree,
        loss_fn: LossFunction,
        *,
        loss_scope: LossScope | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Run forward and backward of one batch.

        It replaces ``loss = loss_fn(model(inputs), targets)`` and ``loss.backward()`` with every
        engine, and is the only way in a multi-process pipeline. The loop body calls ``zero_grad``
        before and ``step`` after it.

        Example::

            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = model.train_step(inputs, targets, nn.functional.cross_entropy)
                optimizer.step()

        Args:
            inputs: Inputs of the first layer, tensors of shape [batch, …].
            targets: Targets of the loss, tensors of shape [batch, …].
            loss_fn: Returns the loss, a scalar tensor, from the model's output and the targets: a
                mean over samples, or a :class:`WeightedLoss` if samples or tokens have different
                weights. In a multi-process pipeline the last process calls it, for each
                micro-batch; in the first steps and at times later also for two of them together.
            loss_scope: ``"batch"``: the loss is computed once over the whole batch of a replica,
                for losses that compare samples; all forwards of a batch then precede its backwards.
                ``"microbatch"``: the mean over micro-batches, for any loss. None: the same, and a
                loss that is not a mean over samples is refused. In a single-process pipeline the
                loss is always computed over the whole batch.
            grad_scaler: A :class:`GradScaler`, by whose scale the loss is multiplied before the
                backward, as by ``scaler.scale(loss)`` in the plain loop. The returned loss does not
                include the scale.

        Returns:
            The mean loss of this replica's batch, float64, without a graph; in all of its
            processes. NaN if a loss of another replica in this iteration is not finite, as the
            gradients are not finite either: scripts that skip such a step skip it on all replicas.
            On GPUs it is the replica's own loss, as reading the others' would wait for the GPU.

        Raises:
            ConfigurationError: Inputs and targets do not match, the loss function does not match
                its scope, or the scaler is PyTorch's own.
        """
        scope, factor = check_scope(loss_scope), scale_of(grad_scaler, self.output_device)
        inputs, targets = plain_batch(inputs), plain_batch(targets)
        if isinstance(self._engine, PipelineEngine):
            return self._train_in_one_process(
                self._engine, inputs, targets, loss_fn, factor, checked=scope is None
            )
        return self._train_in_stages(self._engine, inputs, targets, loss_fn, scope, factor)

    # One iteration, with train_step or the plain loop. A backward that a script calls itself
    # cannot be wrapped, so its parts are hooks and callbacks of this class:
    #
    #     _sizes, _plan       checks of the batch; what its backward will do
    #     engine              forwards of M micro-batches, the loss
    #     backward            hooks count gradients, and launch full buckets
    #        └ its end        buckets, totals, buffers have arrived: _backward_finished
    #     optimizer.step()    at the scaled rate, _rate_factor; after it _stepped
    #     next batch          step boundary of the loader: stop, save or resize

    def _train_in_one_process(
        self,
        engine: PipelineEngine,
        inputs: PyTree,
        targets: PyTree,
        loss_fn: LossFunction,
        factor: Tensor | None,
        *,
        checked: bool,
    ) -> Tensor:
        targets = map_tensors(lambda x: x.to(self.output_device, non_blocking=True), targets)
        output, plan = self._run_batch(engine, inputs, self._sizes(inputs))
        if checked and plan is not None and plan.counted and self._divides_batches:
            self._halves_check.check(loss_fn, output, unmarked(targets))
        loss = loss_value(loss_fn(output, unmarked(targets)))
        divisor = 1
        if plan is not None:
            self._weigh(plan, loss.weight)
            divisor = plan.num_samples or sum(plan.sizes)
        self._note_loss(loss.mean)
        root = loss.scaled(1.0, divisor)
        (root if factor is None else root * factor).backward()
        return self._synchronizer.agreed(loss.mean)

    @property
    def _divides_batches(self) -> bool:
        """Whether the loss of a batch is the mean of those of its parts."""
        limits = self._batch.limits
        accumulates = limits is not None and limits.gradient_accumulation
        return self._context.env.num_replicas > 1 or accumulates

    def _train_in_stages(
        self,
        engine: ProcessEngine,
        inputs: PyTree,
        targets: PyTree,
        loss_fn: LossFunction,
        scope: LossScope | None,
        factor: Tensor | None,
    ) -> Tensor:
        sizes = self._sizes(inputs)
        if scope != "batch":
            self._targets_check.check(targets, sum(sizes), len(sizes))
        plan = self._plan(sizes, inputs)
        options: Any = {"scope": scope, "training": self.training, "samples": plan.num_samples}
        options |= {"factor": factor, "divided": self._divides_batches}
        # The schedule mixes forwards and backwards; gradients are averaged at the end of the block.
        with needing_all(), self._running(plan), self._synchronizer.backward(plan):
            meeting = self._calling("model.train_step(…)", sizes, inputs, targets)
            with meeting, self._context.control.leaving(), passing_on():
                loss, weight = engine.train(inputs, targets, sizes, loss_fn, **options)
            self._weigh(plan, weight)
            self._note_loss(loss)
        return self._synchronizer.agreed(loss)

    def _weigh(self, plan: BackwardPlan, weight: float | None) -> None:
        """Set the weight of a plan's loss.

        Raises:
            ConfigurationError: It has one, and gradients of several backwards are summed.
        """
        if weight is not None and self._no_sync and not plan.weighted:
            raise ConfigurationError(
                "loss_fn returned a WeightedLoss under model.no_sync(), where the gradients of "
                "several backwards are added up whatever their weights: accumulate over an "
                "AdaptiveDataLoader, or return a mean"
            )
        plan.loss_weight = weight

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients without synchronizing or stepping, for loops without an adaptive loader.

        As with DistributedDataParallel, the gradients of several backwards add up.
        """
        self._no_sync = True
        try:
            yield
        finally:
            self._no_sync = False

    def _sizes(self, batch: PyTree) -> list[int]:
        """Check a batch, and return the sizes of its micro-batches."""
        self._watch.check()
        self._timing.cancel()
        spec = self._context.pipeline
        fewest = spec.fewest_samples if spec.microbatches_follow else 1
        # All processes of a replica need the same sizes, also those without such layers.
        alone = self._context.mesh is None
        if any(x.training for x in self._deferred) if alone else self._normalises and self.training:
            fewest = max(fewest, 2)  # a single value has no variance
        sizes = cut_sizes(batch_size_of(batch), self.num_microbatches, fewest)
        self._inputs_check.check(batch, sum(sizes), len(sizes))
        return sizes

    def _calling(
        self, name: str, sizes: list[int], inputs: PyTree, targets: PyTree = None
    ) -> AbstractContextManager[None]:
        """Check that all processes of the replica make a call with the same batch."""
        mesh, digests = self._context.mesh, self._digests
        assert mesh is not None  # noqa: S101  # only in multi-process pipelines
        self._context.control.check_left()
        digests.begin()
        read = digests.digest(inputs), digests.digest(targets)
        return mesh.calls.meeting(name, BatchDigest(sum(sizes), len(sizes), *read))

    def _note_loss(self, loss: Tensor) -> None:
        """Pass the loss to the synchronizer, if the batch's samples count."""
        micro_step = self._batch.micro_step
        if micro_step is None or micro_step.num_samples > 0:
            self._synchronizer.note_loss(loss)

    @contextmanager
    def _running(self, plan: BackwardPlan) -> Iterator[None]:
        with self._counting(plan.counted), self._changing_once(plan):
            yield

    def _changing_once(self, plan: BackwardPlan | None) -> AbstractContextManager[None]:
        """Change buffers that follow batches once per iteration."""
        if plan is None or self._batch.micro_step is None or not self._once.places:
            return nullcontext()
        return self._once.forward(self._batch.micro_step, is_first=self._batch.passes == 1)

    def _counting(self, counts: bool) -> AbstractContextManager[None]:
        """Exclude the forwards within from batch statistics, unless their samples count."""
        return nullcontext() if counts else batchnorm.uncounted(self._deferred)

    def _plan(self, sizes: list[int], batch: PyTree) -> BackwardPlan:
        self._context.check_joined()
        self._same_samples.note(batch)
        micro_step = self._batch.micro_step
        ends = micro_step.is_optimizer_step if micro_step else not self._no_sync
        num_recomputed = self._engine.checkpointed(len(sizes), training=self.training)
        wanted = self._noise.wanted()
        timed = ends and self.training and self._timing.begin(num_recomputed, measures_noise=wanted)
        compared = ends and self._parameters_check.due
        self._metrics.note_forward(disturbed=timed or wanted or compared)
        self._timing.read()
        # The script may call torch.autograd.grad for gradients of its input.
        whole = any(tensor.requires_grad for tensor in tensors_of(batch))
        plan = plan_backward(
            sizes,
            micro_step,
            synchronize=ends,
            measured=wanted,
            timed=timed,
            num_recomputed=num_recomputed,
            one_graph=whole,
            one_by_one=self._context.mesh is not None,
            one_stage=self.num_stages == 1,
        )
        self._synchronizer.expect(plan)
        return plan

    def _backward_finished(self, result: SyncResult | None) -> None:
        self._complete, self._has_gradients = result is not None, True
        self._batch.note_backward()
        batch = self._batch
        divided = batch.accumulates or batch.passes > 1
        self._optimizer.end_backward(
            batch.micro_step, accumulates=batch.accumulates, is_divided=divided
        )
        if result is not None:
            batchnorm.commit_statistics(self._deferred)
        learner = learner_of(self._context)
        if learner is not None:
            learner.trained = True
        self._metrics.note_backward(result)
        if result is None:
            self._optimizer.keep_gradients(watched=not self._context.control.losses.void)
            return
        self._result = result
        self._timing.end(result.times)
        self._noise.measure(result)

    def _check_step(self) -> Callable[[], None] | None:
        """Check that the gradients of a step are those of the whole batch; return what to call
        after it.
        """
        if not self._has_gradients:
            return self._foreign.check_backward()
        self._batch.check_backwards()
        return None

    def _rejoined(self) -> None:
        """Continue with other replicas as after a restart."""
        self._foreign.rejoined()
        self._has_gradients = False
        self._synchronizer.rejoin(self._context.env.num_replicas)
        self._optimizer.rejoin()
        self._steps_alike.rejoined()
        self._noise.prepare()
        batchnorm.drop_statistics(self._deferred)
        self._complete, self._result, self._norm = True, None, torch.tensor(math.nan)

    def _rate_factor(self) -> float:
        last_batch_size = self._result.batch_size if self._result is not None else 0
        state = self._metrics.scaling_state(last_batch_size)
        self._metrics.rate_factor = self._rule.factor(state)
        return self._metrics.rate_factor

    def _stepped(self) -> None:
        self._has_gradients = False
        self._steps_alike.stepped()
        self._noise.stepped()
        self._synchronizer.stepped()
        self._timing.read()
        if self._result is not None:
            self._metrics.note_step(self._result.batch_size, self._batch.scale)
        self._check.stepped(self._metrics.step)
        self._same_samples.compare()
