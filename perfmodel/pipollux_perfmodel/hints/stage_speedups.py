"""Speedups of a job with numbers of stages other than its current one.

The current number has its own measurements. Others are predicted from the profile of the layers,
scaled to the measured stage times (`correct_profile`), with network, γ, ω and schedule of the
current run. Optimistic assumptions (a job of one stage cannot measure ω) remain until a number was
tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from pipollux_perfmodel.goodput.goodput import GoodputFunction
from pipollux_perfmodel.goodput.speedup import SpeedupFunction
from pipollux_perfmodel.partitioning.layer_profile import Floats, LayerProfile
from pipollux_perfmodel.partitioning.partition import partition
from pipollux_perfmodel.partitioning.restage import restage
from pipollux_perfmodel.partitioning.stage_plan import (
    StagePlan,
    correct_profile,
    plan_stages,
)
from pipollux_perfmodel.timing.params import PerfParams, keeps_most

if TYPE_CHECKING:
    from .hints import SchedHints  # imports pydantic

MOST_SHARDS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of replicas for which a cut is searched if replicas shard the optimizer's state."""
FIRST_PER_STAGE = 4
"""Micro-batches per stage from which the bubble is small (Huang et al., 2019, section 2.3)."""


def stage_speedups(
    hints: SchedHints, num_stages: int, choices: Iterable[int] = ()
) -> dict[int, SpeedupFunction]:
    """Return the speedup of a job by number of stages, all relative to one base.

    Args:
        hints: of the job; `hints.num_stages` is the measured number of stages.
        num_stages: K of the job; one replica with K stages has speedup 1.
        choices: additional numbers of stages.

    Returns:
        Speedups by number of stages, `num_stages` first, which is always included; the measured
        number if it is a choice; other choices if the layer profile has such a cut and every
        allowed batch fits the memory of the devices. A list of checkpoint modes, one per stage,
        fixes K. Empty while the goodput is unknown.

    Example:
        >>> from pipollux_perfmodel import GradParams, Layer, SchedHints
        >>> layers = LayerProfile.from_layers([Layer(0.0, 1.0, 0.0, 2.0)] * 4)
        >>> params = PerfParams(0.0, 12.0, 0.2, 0.02, 0.05, 0.01, 1.5)
        >>> hints = SchedHints(
        ...     init_batch_size=64, grad_params=GradParams(1, 8), perf_params=params, layers=layers
        ... )
        >>> {k: round(fn(1, 1), 2) for k, fn in stage_speedups(hints, 1, [2, 4, 8]).items()}
        {1: 1.0, 2: 1.78, 4: 3.37}
    """
    goodput_fn = hints.goodput_function()
    if goodput_fn is None or hints.perf_params is None:
        return {}
    pricing = _Pricing(hints, hints.perf_params, goodput_fn)
    own = pricing.speedup(num_stages, pricing.plan(num_stages), None)
    found = {num_stages: own}
    if own.base_goodput <= 0:
        return found
    for stages in dict.fromkeys(choices):
        plan = pricing.plan(stages)
        if stages not in found and (plan is not None or stages == hints.num_stages):
            found[stages] = pricing.speedup(stages, plan, own.base_goodput)
    return found


@dataclass(frozen=True)
class _DividedPlan(StagePlan):
    """A cut that fits only if enough replicas shard the optimizer's state."""

    fewest: int = 1
    fits: bool = True

    def for_replicas(self, num_replicas: int) -> StagePlan:
        fits = num_replicas >= self.fewest
        return replace(self, profile=self.profile.sharded(num_replicas), fits=fits)

    def largest_micro_bsz(self, memory_limit: float, num_microbatches: ArrayLike) -> Floats:
        found = super().largest_micro_bsz(memory_limit, num_microbatches)
        return found if self.fits else np.zeros_like(found)


@dataclass(frozen=True)
class _Pricing:
    hints: SchedHints
    measured: PerfParams
    goodput_fn: GoodputFunction

    def plan(self, num_stages: int) -> StagePlan | None:
        """Return the cut into K stages; None: measured, no profile, or no such cut."""
        profile, num_replicas = self._profile, 1
        if profile is None or num_stages == self.hints.num_stages:
            return None
        if not isinstance(self.measured.checkpoint, str):
            return None  # the script has one mode per stage, which fixes their number
        counts = self._microbatches(num_stages)
        for num_replicas in MOST_SHARDS if self.hints.sharded_optimizer else (1,):
            plan = self._cut(profile.sharded(num_replicas), num_stages, counts[-1])
            if plan is not None and all(self._fits(plan, count) for count in counts):
                break
        else:
            return None
        if self.hints.sharded_optimizer:
            cut = plan.balance, plan.perf_params, profile, True
            plan = _DividedPlan(*cut, fewest=num_replicas)
        if self.measured.num_stages > 1 and not self.measured.gradient_shares:
            # The network was fitted as the part that the backward does not hide.
            return replace(plan, perf_params=plan.perf_params._replace(gradient_shares=()))
        return plan

    def _cut(
        self, profile: LayerProfile, num_stages: int, num_microbatches: int
    ) -> StagePlan | None:
        bounded = self.hints.memory_limit is not None
        micro_bsz = (self._most_micro_bsz if bounded else self._micro_bsz)(num_microbatches)
        try:
            return plan_stages(
                profile,
                num_stages,
                num_microbatches,
                self.measured,
                micro_bsz=micro_bsz,
                memory_limit=self.hints.memory_limit,
                checkpoint=keeps_most(self.measured.checkpoint),
            )
        except ValueError:
            # The arguments are valid: there are fewer layers than stages, or too little memory.
            return None

    def _fits(self, plan: StagePlan, num_microbatches: int) -> bool:
        limit = self.hints.memory_limit
        if limit is None:
            return True
        micro_bsz = self._most_micro_bsz(num_microbatches)
        return bool(plan.memory(micro_bsz, num_microbatches).max() <= limit)

    def speedup(
        self, num_stages: int, plan: StagePlan | None, base_goodput: float | None
    ) -> SpeedupFunction:
        """Return the speedup with K stages; without a plan as measured, or for an even cut."""
        params = plan.perf_params if plan else restage(self.measured, num_stages)
        hints = self.hints
        return SpeedupFunction(
            self.goodput_fn.with_params(params),
            max_batch_size=hints.max_batch_size,
            atomic_bsz_range=hints.local_bsz_bounds,
            accumulation=hints.gradient_accumulation,
            num_microbatches=self._microbatches(num_stages),
            plans=(plan,) if plan else (),
            memory_limit=hints.memory_limit if plan else None,
            base_goodput=base_goodput,
            corrections=hints.corrections if num_stages == hints.num_stages else None,
        )

    def _microbatches(self, num_stages: int) -> tuple[int, ...]:
        present = self.hints.num_microbatches
        if num_stages == self.hints.num_stages:
            return (present,)
        first = FIRST_PER_STAGE * num_stages if num_stages > 1 else 1
        return tuple(sorted({present, first}))

    def _micro_bsz(self, num_microbatches: int) -> float:
        """Return b with one replica at the initial batch size, within bounds."""
        low, high = self.hints.local_bsz_bounds or (None, None)
        samples = max(self.hints.init_batch_size or 1, low or 1)
        return max(min(samples, high or samples) / num_microbatches, 1.0)

    def _most_micro_bsz(self, num_microbatches: int) -> float:
        _, high = self.hints.local_bsz_bounds or (None, None)
        bounds = [size for size in (high, self.hints.max_batch_size) if size is not None]
        samples = min(bounds, default=self.hints.init_batch_size or 1)
        return max(samples / num_microbatches, 1.0)

    @cached_property
    def _profile(self) -> LayerProfile | None:
        hints, layers = self.hints, self.hints.layers
        if layers is None or layers.num_layers < hints.num_stages:
            return None
        micro_bsz = self._micro_bsz(hints.num_microbatches)
        balance = hints.balance or partition(
            layers, hints.num_stages, hints.num_microbatches, micro_bsz=micro_bsz
        )
        return correct_profile(layers, self.measured, balance, micro_bsz)
