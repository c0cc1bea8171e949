"""Inheritance of step times measured by related jobs.

Processes started by a scheduler request them once, before the model is wrapped, if the job has no
measurements: the leader sends the request and distributes the result. Inherited step times are used
in fits and for the largest measured number of replicas. All are dropped if they are of a different
model or hardware: at wrapping, if layers or parameters differ, and at a fit, if the job's
measurements contradict them. A job passes on its own measurements and, a limited number of times,
inherited ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipollux_hybrid.job.context import AtServers, JobContext
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_perfmodel import PerfParams
from pipollux_utils.text import count

from .step_profile import STEADY, StepProfile
from .step_summary import FitData, StepConfiguration, StepSummary, fit_data

if TYPE_CHECKING:
    from pipollux_perfmodel.goodput.corrections import StepRatio
    from pipollux_perfmodel.goodput.size_corrections import SizeCorrections
    from pipollux_perfmodel.hints.step_rows import StepRow, StepRows
    from pipollux_perfmodel.timing.params import Checkpoints

LOG = logging.getLogger(__name__)
PATIENCE = 2.0
"""Timeout of the request at the start of a job, in seconds."""
SURE = 5
"""Optimizer steps from which on a measurement may contradict an inherited one, or the model."""
CONTRADICTION = 1.25
"""Ratio of step times that counts as a contradiction, from a different model or hardware."""


class ModelTraits(NamedTuple):
    """Properties that identify a model."""

    num_layers: int
    num_parameters: int
    """Elements of all parameters."""
    checkpoint: Checkpoints
    """The recomputed micro-batches, for all stages or per stage."""

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> ModelTraits:
        """Return traits decoded from JSON."""
        num_layers, num_parameters, checkpoint = content
        several = isinstance(checkpoint, list)
        return cls(num_layers, num_parameters, tuple(checkpoint) if several else checkpoint)

    @classmethod
    def of(cls, rows: StepRows) -> ModelTraits:
        """Return the traits of the model of measured rows."""
        return cls(rows.num_layers, rows.num_parameters, rows.checkpoint)


def inherit(ctx: JobContext, profile: StepProfile) -> ModelTraits | None:
    """Load step times of related jobs into the profile of a job without measurements; return the
    traits of their model. All processes call it at the same point. After any error the job starts
    without them.
    """
    if not ctx.env.attempt or ctx.joins is not None or profile.summaries():
        return None
    if ctx.env.servers is not None:  # steps with a whole push and pull, which others have not
        return None
    answer = _ask(ctx.env) if ctx.env.leads else b""
    answer = ctx.control.gather_bytes(answer)[0]
    if not answer:
        return None
    from pydantic import ValidationError

    from pipollux_perfmodel.hints.step_rows import InheritedRows
    from pipollux_protocol.messages import InheritanceAnswer

    try:
        told = InheritanceAnswer.model_validate_json(answer).step_profile
        if told is None:
            return None
        rows = InheritedRows.model_validate(told)
    except (ValidationError, ValueError, LookupError, TypeError) as error:
        if ctx.env.leads:
            LOG.warning("step times of related jobs cannot be read and are ignored: %s", error)
        return None
    profile.inherit({_configuration(row): _summary(row) for row in rows.rows})
    return ModelTraits.of(rows)


def _ask(env: JobEnvironment) -> bytes:
    """Return the scheduler's answer as JSON; empty: no step times, or no answer."""
    if env.scheduler_url is None or env.job_id is None:
        return b""
    # Takes a third of a second to import, which other jobs need not wait for.
    import httpx

    from pipollux_hybrid.job.supervisor_client import supervisor_client

    url = f"{env.scheduler_url}/jobs/{env.job_id}/inheritance"
    try:
        with supervisor_client(env, timeout=PATIENCE) as client:
            response = client.get(url, params={"attempt": env.attempt})
    except (httpx.HTTPError, OSError) as error:
        LOG.warning(
            "%s did not answer (%s): this job starts without step times of related jobs", url, error
        )
        return b""
    return response.content if response.status_code == httpx.codes.OK else b""


def rows_to_pass_on(profile: StepProfile, traits: ModelTraits | None) -> StepRows | None:
    """Return the step times for related jobs; None: none yet. The latest own measurements come
    first, then inherited ones by how often they were passed on.
    """
    from pipollux_perfmodel.hints.step_rows import MAX_PASSED_ON, MAX_ROWS, StepRows

    own, inherited = profile.own(), profile.inherited
    given = [(c, s) for c, s in inherited.items() if c not in own and s.passed_on < MAX_PASSED_ON]
    given.sort(key=lambda entry: entry[1].passed_on)
    rows = [_row(c, s) for c, s in [*reversed(own.items()), *given][:MAX_ROWS]]
    if traits is None or not rows:
        return None
    return StepRows(**traits._asdict(), rows=tuple(rows))


def contradiction(profile: StepProfile, checkpoint: Checkpoints) -> str | None:
    """Return how own measurements contradict inherited ones; None: they do not.

    Compares an own measurement with the inherited one of the same configuration or, within the
    inherited range, with the prediction of a fit to it. A confirmed inherited one is replaced by
    the own measurement.
    """
    inherited = profile.inherited
    if not inherited:
        return None
    own = profile.unsettled(SURE)
    for configuration, summary in own.items():
        before = inherited.get(configuration)
        expected = (
            before.optim if before is not None else _predicted(configuration, inherited, checkpoint)
        )
        if expected is None:
            continue
        ratio = summary.optim / expected
        if not 1 / CONTRADICTION <= ratio <= CONTRADICTION:
            replicas = count(configuration.num_replicas, "replica")
            take = "takes" if configuration.num_replicas == 1 else "take"
            said = "measured" if before is not None else "foretell"
            return (
                f"{replicas} with an atomic batch size of {configuration.atomic_bsz} "
                f"{take} {summary.optim:.3g} s a step, and other jobs {said} {expected:.3g} s"
            )
    profile.settle(own)
    return None


def fit(data: FitData, order: PipelineSchedule, at_servers: AtServers | None = None) -> PerfParams:
    """Return the fit to step times by a schedule. An optimizer step of replicas that push and pull
    is one with a whole push and pull.
    """
    from pipollux_perfmodel import fit_perf_params  # imports scipy

    fitted = fit_perf_params(
        data.num_nodes,
        data.num_replicas,
        data.atomic_bsz,
        data.accum_step_time,
        data.optim_step_time,
        num_microbatches=data.num_microbatches,
        forward_shares=data.forward_shares,
        backward_shares=data.backward_shares,
        compute_time=data.compute_time,
        checkpoint=data.checkpoint,
        schedule=order.schedule,
        chunks_per_stage=order.chunks_per_stage,
        sync_every=0 if at_servers is None else at_servers.sync_every,
        sync_overlap=0 if at_servers is None else at_servers.sync_overlap,
        level=data.level,
    )
    return fitted._replace(tied_exchange=data.exchange)


def left_over(params: PerfParams, data: FitData) -> tuple[StepRatio, ...]:
    """Return the residuals of a fit on its optimizer steps."""
    from pipollux_perfmodel.goodput.corrections import step_ratios

    return step_ratios(
        params._replace(tied_exchange=0.0),  # the measured times do not include it
        data.num_nodes,
        data.num_replicas,
        data.atomic_bsz,
        data.optim_step_time,
        data.num_microbatches,
        data.level,
    )


def left_over_by_size(
    params: PerfParams, profile: StepProfile, present: StepConfiguration
) -> SizeCorrections | None:
    """Return the residuals of a fit by batch size; None: no reliable measurements. ``present`` has
    the replicas, stages and schedule to select, for any batch size.
    """
    from pipollux_perfmodel.goodput.size_corrections import size_corrections

    rows = [
        (c, s, s.scatter)
        for c, s in {**profile.inherited, **profile.own(STEADY)}.items()
        if present._replace(atomic_bsz=c.atomic_bsz, num_microbatches=c.num_microbatches) == c
        and s.scatter is not None
    ]
    if not rows:
        return None
    return size_corrections(
        params._replace(tied_exchange=0.0),  # the times do not include it
        present.num_nodes,
        present.num_replicas,
        [c.atomic_bsz for c, _, _ in rows],
        [max(s.optim - s.exchange, 1e-9) for _, s, _ in rows],
        [c.num_microbatches for c, _, _ in rows],
        [scatter for _, _, scatter in rows],
        present.level,
    )


def _predicted(
    wanted: StepConfiguration,
    inherited: Mapping[StepConfiguration, StepSummary],
    checkpoint: Checkpoints,
) -> float | None:
    """Return the optimizer step time by inherited measurements; None: outside their range."""
    alike = {
        c: s
        for c, s in inherited.items()
        if (c.num_stages, c.processes, c.order, c.num_microbatches)
        == (wanted.num_stages, wanted.processes, wanted.order, wanted.num_microbatches)
    }
    ranges = (
        [getattr(c, name) for c in alike]
        for name in ("num_nodes", "num_replicas", "atomic_bsz", "level")
    )
    here = (wanted.num_nodes, wanted.num_replicas, wanted.atomic_bsz, wanted.level)
    if not alike or not all(
        min(known) <= value <= max(known) for known, value in zip(ranges, here, strict=True)
    ):
        return None
    from pipollux_perfmodel.timing.step_time import step_time

    params = fit(fit_data(alike, wanted.num_stages, checkpoint), wanted.order)
    params = params.at_level(wanted.level)
    shape = (wanted.num_nodes, wanted.num_replicas, wanted.atomic_bsz, 0, wanted.num_microbatches)
    return float(step_time(params, *map(np.asarray, shape)).total)


def _configuration(row: StepRow) -> StepConfiguration:
    return StepConfiguration(**row.model_dump(include=set(StepConfiguration._fields)))


def _summary(row: StepRow) -> StepSummary:
    times = row.accum_step_time, row.optim_step_time, row.forward, row.backward
    return StepSummary(*times, row.passed_on + 1, row.exchange_time, row.scatter)


def _row(configuration: StepConfiguration, summary: StepSummary) -> StepRow:
    from pipollux_perfmodel.hints.step_rows import StepRow

    return StepRow(
        **configuration._asdict(),
        accum_step_time=summary.accum,
        optim_step_time=summary.optim,
        forward=summary.forward,
        backward=summary.backward,
        exchange_time=summary.exchange,
        scatter=summary.scatter,
        passed_on=summary.passed_on,
    )
