"""The choice of K, M, b and schedule, against all of them played by the event simulator.

Memory is followed event by event, and efficiency and the network are written out, so nothing here
shares a formula with what chooses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from pipollux_perfmodel import (
    GoodputFunction,
    GradParams,
    Layer,
    LayerProfile,
    Link,
    PerfParams,
    StagePlan,
    plan_stages,
    reschedule,
)
from pipollux_perfmodel.timing.params import SCHEDULES, Checkpoints, ScheduleKind, stage_modes
from pipollux_perfmodel.timing.step_time import step_time
from tests.extent import first
from tests.perfmodel.simulator import Case, Result, last_all_reduce, simulate

NETWORK = 0.02
"""Seconds of T_net for two replicas on a node; γ is 1."""
BASE = PerfParams(0, 3, 9.0, 9.0, NETWORK, 0.0, 1.0)
GRADIENT, INIT, MOST = GradParams(1.0, 12.0), 8, 24
COUNTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Job:
    """A model of equal layers, and the devices it runs on."""

    num_layers: int = 8
    checkpoint: Checkpoints = "never"
    copy: float = 0.0
    """Seconds that one sample takes from stage to stage."""
    state: float = 0.0
    """Bytes of parameters of a layer, and of the optimizer's state of it."""
    num_shards: int = 1
    """Replicas that divide the latter."""

    def plan(self, num_stages: int, schedule: ScheduleKind) -> StagePlan:
        """Cut it, as the choice is given it."""
        layer = Layer(0.01, 0.01, 0.01, 0.03, self.state, self.state, 5.0, 1.0)
        link = Link(0.0, 1.0 / self.copy) if self.copy else None
        plan = plan_stages(
            LayerProfile((layer,) * self.num_layers, 1.0),
            num_stages,
            8,
            BASE,
            micro_bsz=1,
            checkpoint=self.checkpoint,
            schedule=schedule,
            link=link,
            transfers_overlap=False,
        )
        return replace(plan, shards_optimizer=self.num_shards > 1)

    def played(self, plan: StagePlan, micro_bsz: int, num_microbatches: int) -> Result:
        """Play its stages, or chunks, one layer's formula at a time."""
        how = tuple(plan.balance), plan.perf_params.num_stages, plan.schedule
        return self._played(*how, micro_bsz, num_microbatches)

    @cache  # noqa: B019  # of a few jobs
    def _played(
        self,
        balance: tuple[int, ...],
        num_stages: int,
        schedule: ScheduleKind,
        micro_bsz: int,
        num_microbatches: int,
    ) -> Result:
        forward = tuple(n * (0.01 + 0.01 * micro_bsz) for n in balance)
        kept = tuple(n * (0.01 + 0.03 * micro_bsz) for n in balance)
        modes = stage_modes(self.checkpoint, num_stages)
        each = modes * (len(kept) // len(modes))
        times = [*zip(forward, kept, each, strict=True)]
        case = Case(
            forward,
            tuple(g + f * (mode != "never") for f, g, mode in times),
            tuple(g + f * (mode == "always") for f, g, mode in times),
            (self.copy * micro_bsz,) * (len(balance) - 1),
            num_microbatches,
            overlapping=False,
        )
        return simulate(case, schedule, num_stages)

    def memory(self, plan: StagePlan, played: Result, micro_bsz: int) -> float:
        """Return the most bytes of any device, by following what comes and goes on each."""
        num_stages, most = plan.perf_params.num_stages, 0.0
        counts = {i for phase, _, i in played.spans if phase == "forward"}
        for device, mode in enumerate(stage_modes(self.checkpoint, num_stages)):
            # At one moment what ends frees memory before what begins takes it.
            moments: list[tuple[float, int, float]] = []
            for stage in range(device, len(plan.balance), num_stages):
                full, inputs = 5.0 * plan.balance[stage] * micro_bsz, 1.0 * micro_bsz
                for i in counts:
                    there, back = (played.spans[p, stage, i] for p in ("forward", "backward"))
                    last = i == max(counts)
                    again = mode == "always" or (mode == "except_last" and not last)
                    kept = inputs if again else full
                    moments += [(there[0], 1, kept), (back[1], 0, -kept)]
                    if again:
                        moments += [(back[0], 1, full), (back[1], 0, -full)]
            held = 0.0
            for _, _, change in sorted((round(t, 9), order, x) for t, order, x in moments):
                held += change
                layers = sum(plan.balance[device::num_stages])
                # Of the optimizer's state at most a share, and what one layer is above that.
                owned = (layers - 1) / self.num_shards + 1
                most = max(most, held + self.state * (2 * layers + owned))
        return most


def goodput_of(makespan: float, step: float, batch_size: int, accum_steps: int) -> float:
    """Return samples' worth per second, from Pollux's formulas."""
    sqr, var = GRADIENT
    scale = batch_size / INIT
    efficiency = (var + sqr) / (var / scale + sqr) / scale
    return batch_size / (accum_steps * makespan + step) * efficiency


def everything(
    job: Job, plans: Sequence[StagePlan], num_replicas: int, limit: float | None
) -> dict[tuple[int, int, int, int], float]:
    """Return the goodput of whatever fits, by (plan, M, atomic batch size, accumulation)."""
    found = {}
    for (index, plan), count in itertools.product(enumerate(plans), COUNTS):
        for micro_bsz in range(1, MOST // count + 1):
            played = job.played(plan, micro_bsz, count)
            if limit is not None and job.memory(plan, played, micro_bsz) > limit * (1 + 1e-9):
                continue
            end = step = max(end for _, end in played.spans.values())
            if num_replicas > 1:
                # Stages are equally large; a stage's gradients are final with its first chunk's.
                stages = plan.perf_params.num_stages
                shares = [NETWORK / stages if job.state else 0.0] * stages
                step = last_all_reduce(played.final[:stages], shares, shared_link=True)
                step = step if job.state else end + NETWORK
            for accum_steps in range(MOST):
                batch_size = num_replicas * count * micro_bsz * (accum_steps + 1)
                if INIT <= batch_size <= MOST:
                    key = index, count, count * micro_bsz, accum_steps
                    found[key] = goodput_of(end, step, batch_size, accum_steps)
    return found


def chosen(job: Job, num_replicas: int = 1, limit: float | None = None, **asked: Any) -> str:
    """Check the choice against everything, and return its schedule; empty: nothing fits."""
    stages = asked.get("stages", (2, 4))
    kinds = asked.get("kinds", SCHEDULES)
    plans = [job.plan(k, kind) for k, kind in itertools.product(stages, kinds)]
    every = everything(job, plans, num_replicas, limit)
    best = GoodputFunction(BASE, GRADIENT, INIT).optimize(
        1,
        num_replicas,
        MOST,
        accumulation=True,
        num_microbatches=COUNTS,
        plans=plans,
        memory_limit=limit,
    )
    if not every:
        assert best.goodput == 0
        return ""
    plan, count = plans[best.plan], best.num_microbatches
    key = best.plan, count, best.atomic_bsz, best.accum_steps
    assert every[key] == pytest.approx(best.goodput, rel=1e-6)
    assert best.goodput >= max(every.values()) * (1 - 1e-6)
    assert best.num_stages == plan.perf_params.num_stages
    if limit is not None:
        micro_bsz = math.ceil(best.atomic_bsz / count)
        assert job.memory(plan, job.played(plan, micro_bsz, count), micro_bsz) <= limit * (1 + 1e-9)
    return plan.schedule


@pytest.mark.parametrize(
    "case",
    first(
        1,
        [
            ("except_last", 2),
            ("never", 1),
            ("always", 1),
            ("never", 2),
            ("except_last", 1),
            ("always", 2),
        ],
    ),
)
def test_the_choice_is_the_best_of_all_that_fit(case: tuple[Checkpoints, int]) -> None:
    checkpoint, num_replicas = case
    job = Job(checkpoint=checkpoint, copy=0.002, state=1.0)
    kinds = {
        limit: chosen(job, num_replicas, limit)
        for limit in (None, 1000.0, 300.0, 200.0, 120.0, 60.0, 30.0, 5.0)
    }
    assert kinds[5.0] == ""
    assert kinds[None] == "interleaved"


@pytest.mark.parametrize(
    "modes", first(1, [("always", "never"), ("never", "except_last"), ("except_last", "always")])
)
def test_the_choice_knows_each_stages_own_mode(modes: Checkpoints) -> None:
    job = Job(checkpoint=modes, copy=0.002, state=1.0)
    limits = (None, 300.0, 200.0, 120.0, 60.0, 30.0, 5.0)
    kinds = {limit: chosen(job, limit=limit, stages=(2,)) for limit in limits}
    assert kinds[5.0] == ""
    assert kinds[None] != ""


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_divided_optimizer_state_leaves_room(num_replicas: int) -> None:
    """K and b gain by it; where nothing else fits, the job can run at all."""
    ask: dict[str, Any] = {"stages": (2, 4), "kinds": ("1f1b",)}
    whole = Job(state=20.0)
    divided = replace(whole, num_shards=num_replicas)
    for limit in (400.0, 200.0, 145.0):
        assert chosen(whole, num_replicas, limit, **ask) == "1f1b"
        assert chosen(divided, num_replicas, limit, **ask) == "1f1b"
    # Of two layers 80 bytes of parameters and gradients, 40 of state, 10 of a sample.
    assert chosen(whole, num_replicas, 129.0, **ask) == ""
    assert chosen(divided, num_replicas, 129.0, **ask) == "1f1b"


def test_one_forward_one_backward_where_gpipe_does_not_fit() -> None:
    job = Job(state=2.0)
    ask: dict[str, Any] = {"stages": (4,), "kinds": ("gpipe", "1f1b")}
    assert chosen(job, limit=1e6, **ask) == "gpipe"  # as fast, and named first
    # Eight micro-batches of one sample: activations of all of them, or of the first stage's four.
    limit = 3 * 2.0 * 2 + 8 * 10.0 - 1.0
    assert chosen(job, limit=limit, **ask) == "1f1b"


def test_interleaved_where_stages_wait_and_not_where_messages_are_slow() -> None:
    ask: dict[str, Any] = {"stages": (4,), "kinds": ("1f1b", "interleaved")}
    assert chosen(Job(), **ask) == "interleaved"
    assert chosen(Job(copy=0.08), **ask) == "1f1b"


def test_a_run_tells_what_another_schedule_takes() -> None:
    """Stages that are 1F1B's take as long interleaved, but for messages that are more."""
    for copy in (0.0, 0.03):
        job = Job(copy=copy)
        own, other = (job.plan(4, kind) for kind in ("1f1b", "interleaved"))
        assert reschedule(own.perf_params, "interleaved") == other.perf_params
        assert reschedule(other.perf_params, "1f1b") == own.perf_params
    # Of a fit, which knows no copies apart: 7 messages in the place of 3 there, and as many back.
    fitted = Job().plan(4, "1f1b").perf_params._replace(overlap=0.0)
    more = reschedule(fitted, "interleaved", alpha_t=(0.5,) * 3, beta_t=(0.25,) * 3)
    one = (1, 1, 6, 0, 3)
    extra = step_time(more, *one).accum_time - step_time(fitted, *one).accum_time
    assert extra == pytest.approx(3 * 2 * (7 - 3) * (0.5 + 0.25 * 2))
    assert reschedule(more, "gpipe") == more._replace(schedule="gpipe", chunks_per_stage=1)
