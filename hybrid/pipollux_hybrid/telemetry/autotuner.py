"""The performance model of the running job: fitted to measurements, used to choose batch shapes."""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Any

from pipollux_hybrid.job.batch import BatchShape, BatchSizeLimits
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.optim.gradient_noise_scale import GradientNoiseScale, MeasuredNoise
from pipollux_hybrid.partition.balance import Partitioning
from pipollux_hybrid.pipeline.num_microbatches import candidate_microbatches, initial_microbatches
from pipollux_perfmodel import GoodputFunction, PerfParams

from .inheritance import (
    ModelTraits,
    contradiction,
    fit,
    left_over,
    left_over_by_size,
    rows_to_pass_on,
)
from .step_profile import StepProfile
from .step_summary import FitData, StepConfiguration

if TYPE_CHECKING:
    from pipollux_perfmodel import Optimum, SchedHints
    from pipollux_perfmodel.goodput.corrections import StepRatio
    from pipollux_perfmodel.goodput.size_corrections import SizeCorrections

LOG = logging.getLogger(__name__)
MOST_REPLICAS = 2**16
"""Replicas that push and pull up to which hints bound their batch size."""
RETUNE_GAIN = 1.02
"""Minimum gain in goodput of a new batch size, which avoids oscillation. AdaptDL uses 1.05, as it
compares predictions only; here measurements correct them (`SizeCorrections`)."""


class Autotuner:
    """Step times, noise and limits of one job, and the decisions based on them.

    The training thread measures, another thread fits.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._lock = threading.Lock()
        self.profile = StepProfile()
        self.traits: ModelTraits | None = None
        """Of the profile's model; before wrapping, of the inherited measurements' model."""
        self._noise = ctx.component(MeasuredNoise)
        self.perf_params: PerfParams | None = None
        self.step_ratios: tuple[StepRatio, ...] = ()
        """Residuals of the fit on the measured steps."""
        self.shape_chosen = False
        """Whether this attempt has chosen its initial batch size."""
        self.cut: Partitioning | None = None
        """The cut of the layers; None before the model is wrapped."""
        self.overlap: float | None = None
        """Overlap of stages when the job last had several; None: it never had."""
        self.samples_left: float | None = None
        """Samples to the end of the last epoch; None if the number of epochs is unknown."""
        self.order_before: PipelineSchedule | None = None
        """Schedule of the last attempt's stages; None: it was not a multi-process pipeline."""
        self.limits_before: BatchSizeLimits | None = None
        """Bounds of the last attempt's batch size, until the script sets them after wrapping."""
        self.progress = 0.0
        """Progress in steps at the initial batch size."""
        self._training_shape: BatchShape | None = None
        self._proposal = (0, 0, 0)

    @property
    def num_stages(self) -> int:
        """K of the model in training."""
        return self._context.pipeline.num_stages

    @property
    def order(self) -> PipelineSchedule | None:
        """Schedule of the stages, or of the last multi-process pipeline; None: never."""
        ctx = self._context
        return ctx.pipeline.order if ctx.mesh is not None else self.order_before

    @property
    def limits(self) -> BatchSizeLimits | None:
        """Bounds of the batch size; the last attempt's until the script sets them."""
        return self._context.batch.limits or self.limits_before

    @property
    def noise(self) -> GradientNoiseScale | None:
        """The gradient's noise; None until it is measured."""
        return self._noise.scale

    @property
    def gain(self) -> float:
        """Steps at the initial batch size equivalent to a current step (AdaScale)."""
        return self.noise.gain(self._context.batch.scale) if self.noise is not None else 1.0

    def rejoin(self) -> None:
        """Choose the batch size again, as after a restart: the number of replicas has changed."""
        with self._lock:
            self._proposal = (0, 0, 0)
        self.shape_chosen, self._training_shape = False, None

    def restore_noise(self, scale: GradientNoiseScale) -> None:
        """Restore the measurements of an earlier attempt."""
        self._noise.scale = scale

    def take_proposal(self) -> tuple[int, int, int]:
        """Return :meth:`best_shape` of the last fit, once; zeros for no change."""
        with self._lock:
            proposal, self._proposal = self._proposal, (0, 0, 0)
        return proposal

    def fit(self) -> None:
        """Fit the performance model to all measurements, and propose a batch shape."""
        why = contradiction(self.profile, self._context.pipeline.checkpoint_mode)
        if why is not None:
            self._drop_inherited(why)
        order = self._context.pipeline.order
        data = self._fit_data(order)
        if data is None:
            return
        params = fit(data, order, self._context.at_servers)
        # Of push and pull, the measured steps are not those of the model: see `fit`.
        self.step_ratios = () if params.sync_every else left_over(params, data)
        if self.num_stages > 1:
            self.overlap = params.overlap
        elif self.overlap is not None:
            # One stage has no overlap: the last measured one predicts that of several stages.
            params = params._replace(overlap=self.overlap)
        self.perf_params = params
        proposal = self._better_shape()
        with self._lock:
            self._proposal = proposal

    def configuration(self, atomic_bsz: int) -> StepConfiguration:
        """Return the current configuration of the job, for an atomic batch size."""
        ctx = self._context
        return StepConfiguration(
            self.num_stages,
            ctx.num_nodes,
            ctx.num_replicas,
            atomic_bsz,
            ctx.batch.num_microbatches,
            ctx.env.processes_per_replica,
            *ctx.pipeline.order,
            level=ctx.network_level if ctx.num_nodes > 1 else 1,
        )

    @property
    def scale(self) -> float:
        """Batch size of the whole job over the initial batch size."""
        ctx = self._context
        return ctx.batch.scale * (ctx.num_replicas / ctx.env.num_replicas)

    def fitted(self, order: PipelineSchedule) -> PerfParams | None:
        """Return the fit to steps with the same stages by a schedule; None: no such steps."""
        data = self._fit_data(order)
        return None if data is None else fit(data, order, self._context.at_servers)

    def _fit_data(self, order: PipelineSchedule) -> FitData | None:
        pipeline, processes = self._context.pipeline, self._context.env.processes_per_replica
        return self.profile.fit_data(self.num_stages, pipeline.checkpoint_mode, processes, order)

    def wrap(self, traits: ModelTraits) -> None:
        """Record the model's traits; drop inherited step times of a different model."""
        before, self.traits = self.traits, traits
        if before is None or before == traits:
            return
        differences = [
            f"{name} {was} instead of {now}"
            for name, was, now in zip(traits._fields, before, traits, strict=True)
            if was != now
        ]
        self._drop_inherited(f"they are of another model, with {' and '.join(differences)}")

    def _drop_inherited(self, why: str) -> None:
        if not self.profile.inherited:
            return
        self.profile.inherit({})
        if self._context.env.leads:
            LOG.warning("step times of other jobs of the family are dropped: %s", why)

    def fit_and_hint(self) -> SchedHints | None:
        """Fit, and return the hints for the scheduler; None: nothing to report yet."""
        self.fit()
        return self.hints()

    def goodput_function(self) -> GoodputFunction | None:
        """Return the goodput of this job; None until step times and noise are measured."""
        grad_params = self.noise.grad_params if self.noise else None
        if self.perf_params is None or grad_params is None or self.noise is None:
            return None
        if self.perf_params.num_stages != self.num_stages:
            return None
        params = self.perf_params.at_level(self._context.network_level)
        return GoodputFunction(params, grad_params, self.noise.init_batch_size)

    def best_shape(self) -> tuple[int, int, int] | None:
        """Return atomic batch size, accumulation steps and micro-batches of the highest goodput;
        None if it is unknown, 0 micro-batches if the script sets their number.
        """
        goodput_fn, limits = self.goodput_function(), self._context.batch.limits
        if goodput_fn is None or limits is None:
            return None
        best = self.best_with(goodput_fn, limits, self.cut, self._size_corrections())
        if best.goodput <= 0.0:
            return None
        follow = self._context.pipeline.microbatches_follow
        num_microbatches = int(best.num_microbatches) if follow else 0
        return int(best.atomic_bsz), int(best.accum_steps), num_microbatches

    def _size_corrections(self) -> SizeCorrections | None:
        if self.perf_params is None:
            return None
        return left_over_by_size(self.perf_params, self.profile, self.configuration(0))

    def best_with(
        self,
        goodput_fn: GoodputFunction,
        limits: BatchSizeLimits | None,
        cut: Partitioning | None,
        corrections: SizeCorrections | None = None,
    ) -> Optimum:
        """Return the best batch shape within limits (None: the initial batch size) and the memory
        of a cut, if known; corrections are by measurements on the current replicas.
        """
        from pipollux_perfmodel import StagePlan

        ctx, env = self._context, self._context.env
        fewest, bounds = ctx.pipeline.fewest_samples, dict[str, Any]()
        if limits is None:
            atomic_bsz = math.ceil(goodput_fn.init_batch_size / env.num_replicas)
            counts = [initial_microbatches(self.num_stages, atomic_bsz, fewest)]
        else:
            _, largest = limits.local_bsz_bounds or (1, limits.max_batch_size)
            largest = min(largest, limits.max_batch_size // env.num_replicas)
            counts = [*candidate_microbatches(self.num_stages, largest, fewest)]
            bounds["max_batch_size"] = limits.max_batch_size
            bounds["atomic_bsz_range"] = limits.local_bsz_bounds
            bounds["accumulation"] = limits.gradient_accumulation
        follow, plans, memory_limit = ctx.pipeline.microbatches_follow, [], None
        if cut is not None and cut.profile is not None and cut.memory_limit is not None:
            params, shards = goodput_fn.perf_params, ctx.pipeline.shards_optimizer
            plans = [StagePlan(tuple(cut.balance), params, cut.profile, shards)]
            memory_limit = cut.memory_limit
        return goodput_fn.optimize(
            env.num_nodes,
            env.num_replicas,
            **bounds,
            num_microbatches=counts if follow else ctx.batch.num_microbatches,
            plans=plans,
            memory_limit=memory_limit,
            corrections=corrections,
        )

    def hints(self) -> SchedHints | None:
        """Return the hints; None before the first fit for this number of stages."""
        from pipollux_perfmodel import SchedHints  # imports pydantic
        from pipollux_perfmodel.hints.codec import MAX_LAYERS

        if self.perf_params is None or self.noise is None:
            return None
        if self.perf_params.num_stages != self.num_stages:
            return None  # measured before a restart with another number of stages
        limits, cut = self._context.batch.limits, self.cut
        if self._context.pipeline.chunks_per_stage > 1:
            cut = None  # a scheduler's cuts are contiguous layers
        layers, balance = (cut.in_blocks() if cut else None) or (None, None)
        if layers is not None and layers.num_layers > MAX_LAYERS:
            layers = balance = None
        return SchedHints(
            init_batch_size=self.noise.init_batch_size,
            **self._batch_bounds(limits),
            global_batch_size=self._global_batch_size(),
            max_profiled_replicas=self.profile.max_replicas,
            gradient_accumulation=limits.gradient_accumulation if limits else False,
            grad_params=self.noise.grad_params,
            perf_params=self.perf_params,
            num_stages=self.num_stages,
            num_microbatches=self._context.batch.num_microbatches,
            layers=layers,
            balance=balance,
            memory_limit=cut.memory_limit if cut else None,
            sharded_optimizer=self._context.pipeline.shards_optimizer,
            remaining_samples=self._remaining_samples(),
            trained_samples=self.progress * self.noise.init_batch_size,
            step_profile=(
                rows_to_pass_on(self.profile, self.traits)
                if self._context.at_servers is None
                else None
            ),
            step_ratios=tuple(one if one.level > 1 else one[:3] for one in self.step_ratios)
            or None,
        )

    def _batch_bounds(self, limits: BatchSizeLimits | None) -> dict[str, Any]:
        """Return the bounds of the batch size for hints."""
        if self._context.at_servers is not None and self.noise is not None:
            of_one = self.noise.init_batch_size  # which each replica keeps
            largest = MOST_REPLICAS * of_one
            return {"local_bsz_bounds": (of_one, of_one), "max_batch_size": largest}
        if limits is None:
            return {}
        both = {"local_bsz_bounds": limits.local_bsz_bounds}
        return {**both, "max_batch_size": limits.max_batch_size}

    def _global_batch_size(self) -> int | None:
        shape, ctx = self._training_shape, self._context
        if shape is None:
            return None
        return shape.batch_size * ctx.num_replicas // ctx.env.num_replicas

    def _remaining_samples(self) -> float | None:
        """Return the remaining samples, in units of samples at the initial batch size."""
        if self.samples_left is None or self.noise is None:
            return None
        scale = self.scale
        efficiency = self.noise.gain(scale) / scale if scale > 1.0 else 1.0
        return self.samples_left * efficiency

    def _better_shape(self) -> tuple[int, int, int]:
        shape, goodput_fn = self._training_shape, self.goodput_function()
        best, ctx = self.best_shape(), self._context
        if shape is None or best is None or goodput_fn is None:
            return (0, 0, 0)
        if shape.batch_size < goodput_fn.init_batch_size:
            return best
        atomic_bsz, accum_steps, num_microbatches = best
        present = ctx.batch.num_microbatches
        now, then = (
            goodput_fn.evaluate(ctx.env.num_nodes, ctx.env.num_replicas, *candidate)
            for candidate in (
                (shape.atomic_bsz, shape.accum_steps, present),
                (atomic_bsz, accum_steps, num_microbatches or present),
            )
        )
        corrections = self._size_corrections()
        if corrections is not None:
            now, then = corrections.factors([shape.atomic_bsz, atomic_bsz]) * [now, then]
        return best if then > RETUNE_GAIN * now else (0, 0, 0)

    def noise_scale(self) -> float | None:
        """Return the batch size at which the gradient is half noise; None if unknown."""
        grad_params = self.noise.grad_params if self.noise else None
        if self.noise is None or grad_params is None or grad_params.sqr <= 0.0:
            return None
        return float(self.noise.init_batch_size * grad_params.var / grad_params.sqr)
