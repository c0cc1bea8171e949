"""Choice of the schedule for scripts with ``schedule="auto"``, and the cut for it.

The schedule is chosen when the model is wrapped, from measurements of earlier attempts: by each
schedule's goodput at its best batch, within the memory limit if layers were profiled. A schedule
that ran with the same number of stages is evaluated by its own steps, others by predictions from
one that ran (:func:`pipollux_perfmodel.reschedule`). Each attempt creates new engines, and
checkpoints are keyed by layer, so a change between attempts costs nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.link_probe import measure_link
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.partition.balance import (
    Partitioning,
    PartitionRequest,
    choose_balance,
    measure_layers,
)

from .autotuner import Autotuner
from .inheritance import ModelTraits

if TYPE_CHECKING:
    from pipollux_perfmodel import Link, Optimum, PerfParams

__all__ = ["ScheduleComparison", "choose_cut"]

_GAIN = 1.05
"""Minimum factor in goodput of a different schedule, which is only predicted."""


def choose_cut(
    ctx: JobContext,
    tuner: Autotuner,
    module: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    request: PartitionRequest,
    orders: Sequence[PipelineSchedule],
) -> Partitioning:
    """Choose one of the script's ``orders``, the default one first, store it in the pipeline's
    specification, and return its cut.

    All processes call it at the same point; the leader chooses, by the measurements of ``tuner``.
    If no cut satisfies the constraints, a ConfigurationError has the default schedule's message.
    """
    ctx.pipeline.shards_optimizer = request.shards_optimizer
    counts = len(module), sum(parameter.numel() for parameter in module.parameters())
    tuner.wrap(ModelTraits(*counts, ctx.pipeline.checkpoint_mode))
    measured = measure_layers(ctx, module, optimizer, ctx.pipeline.devices[0], request)
    if ctx.joins is not None and len(orders) > 1:
        orders = (ctx.joins.order(request.num_stages),)
    cuts: dict[PipelineSchedule, Partitioning] = {}
    refusals: list[ConfigurationError] = []
    for order in orders:
        wish = replace(request, schedule=order.schedule, chunks_per_stage=order.chunks_per_stage)
        try:
            cuts[order] = choose_balance(ctx, module, wish, measured)
        except ConfigurationError as refusal:
            refusals.append(refusal)
    if not cuts:
        raise refusals[0]
    chosen, reason = next(iter(cuts)), "layers, balance and memory limit allow no other one"
    if len(cuts) > 1:
        chosen, reason = _agreed_choice(ctx, tuner, request, cuts)
    if len(orders) > 1 and ctx.env.leads:
        left = "".join(f"; {order} does not fit" for order in orders if order not in cuts)
        print(f"pipollux: schedule {chosen}: {reason}{left}", file=sys.stderr, flush=True)
    ctx.pipeline.schedule, ctx.pipeline.chunks_per_stage = chosen
    return cuts[chosen]


def _agreed_choice(
    ctx: JobContext,
    tuner: Autotuner,
    request: PartitionRequest,
    cuts: Mapping[PipelineSchedule, Partitioning],
) -> tuple[PipelineSchedule, str]:
    """Return the leader's choice and its reason, after measuring messages if necessary."""
    leads = ctx.env.leads
    comparison = ScheduleComparison(ctx, tuner, cuts) if leads else None
    wanted = comparison.message_bytes(request) if comparison is not None else 0
    wanted = json.loads(ctx.control.gather_bytes(json.dumps(wanted).encode())[0])
    link = None
    if wanted and ctx.mesh is not None and ctx.env.rank == 0:
        link = measure_link(ctx.mesh, ctx.pipeline.devices[ctx.env.stage], wanted)
    told = b""
    if comparison is not None:
        chosen, reason = comparison.choose(link)
        told = json.dumps([list(cuts).index(chosen), reason]).encode()
    index, reason = json.loads(ctx.control.gather_bytes(told)[0])
    return list(cuts)[index], reason


class ScheduleComparison:
    """Comparison by measurements of the schedules that the layers allow, the default one first."""

    def __init__(
        self, ctx: JobContext, tuner: Autotuner, cuts: Mapping[PipelineSchedule, Partitioning]
    ) -> None:
        self._context, self._tuner, self._cuts = ctx, tuner, cuts
        known = tuner.profile.orders(tuner.num_stages, ctx.env.processes_per_replica)
        fits = ((order, tuner.fitted(order)) for order in known)
        self._measured = {order: params for order, params in fits if params is not None}
        before = tuner.order_before
        self._before = before if before is not None and before in cuts else next(iter(cuts))
        self._elsewhere = self._of_other_stages()

    def message_bytes(self, request: PartitionRequest) -> int:
        """Return the size of a message between stages, if its time must be measured; else 0."""
        for order, cut in self._cuts.items():
            unknown = order.chunks_per_stage > 1 and order not in self._measured
            if unknown and self._has_basis and cut.profile is not None:
                crossing = cut.profile.boundary_bytes()[1:-1].mean()
                return max(1, int(crossing * request.num_samples / request.num_microbatches))
        return 0

    def choose(self, link: Link | None) -> tuple[PipelineSchedule, str]:
        """Return the best schedule, and a short reason. A schedule that did not run has to promise
        5 % more than the last one. ``link`` is the time of messages between stages, if measured.
        """
        if not self._has_basis or self._tuner.noise is None:
            return self._before, "nothing was measured yet that favours another one"
        found = {order: self._best(order, link) for order in self._cuts}
        goodputs = {order: best.goodput for order, best in found.items() if best is not None}
        best = max(goodputs, key=goodputs.__getitem__, default=self._before)
        before = goodputs.get(self._before, 0.0)
        # The last schedule stays unless another one promises sufficiently more.
        chosen = best if goodputs.get(best, 0.0) > _GAIN * before else self._before
        return chosen, "; ".join(_spell(order, found[order]) for order in found)

    @property
    def _has_basis(self) -> bool:
        return bool(self._measured) or self._elsewhere is not None

    def _best(self, order: PipelineSchedule, link: Link | None) -> Optimum | None:
        """Return the best batch with a schedule; None: its times are unknown."""
        params, noise = self._params(order, link), self._tuner.noise
        if params is None or noise is None or noise.grad_params is None:
            return None
        from pipollux_perfmodel import GoodputFunction

        goodput_fn = GoodputFunction(params, noise.grad_params, noise.init_batch_size)
        return self._tuner.best_with(goodput_fn, self._tuner.limits, self._cuts[order])

    def _params(self, order: PipelineSchedule, link: Link | None) -> PerfParams | None:
        from pipollux_perfmodel import price_stages, reschedule, restage
        from pipollux_perfmodel.partitioning.stage_plan import copy_costs

        if order in self._measured:
            return self._measured[order]
        profile, balance = self._cuts[order].profile, self._cuts[order].balance
        if order.chunks_per_stage > 1 and (profile is None or link is None):
            return None  # its additional messages may cost more than it gains
        num_stages = self._tuner.num_stages
        if self._measured:
            usual = next(iter(self._measured.values()))
            basis = self._measured.get(self._before, usual)
            if profile is None:
                return reschedule(basis, *order)
            alpha_t, beta_t = copy_costs(profile, balance, num_stages, link)
            return reschedule(basis, *order, alpha_t=alpha_t, beta_t=beta_t)
        assert self._elsewhere is not None  # noqa: S101  # there is a basis
        if profile is None:
            return reschedule(restage(self._elsewhere, num_stages), *order)
        return price_stages(
            profile,
            balance,
            self._elsewhere,
            checkpoint=self._context.pipeline.checkpoint_mode,
            schedule=order.schedule,
            chunks_per_stage=order.chunks_per_stage,
            link=link,
            transfers_overlap=False,
        )

    def _of_other_stages(self) -> PerfParams | None:
        """Return the fit with another number of stages, which contains network and γ."""
        params = self._tuner.perf_params
        if params is None or params.num_stages == self._tuner.num_stages:
            return None  # a single-process pipeline does not determine them
        overlap = self._tuner.overlap
        return params if overlap is None else params._replace(overlap=overlap)


def _spell(order: PipelineSchedule, best: Optimum | None) -> str:
    if best is None:
        return f"{order} not compared"
    if best.goodput <= 0.0:
        return f"{order} does not fit"
    shape = f"M={best.num_microbatches}, atomic batch size {best.atomic_bsz}"
    return f"{order} {best.goodput:.4g} samples/s ({shape})"
