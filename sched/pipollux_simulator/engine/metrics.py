"""Metrics of a simulation: completion times, restarts, utilization, fairness, policy runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .outcome import SimulationOutcome


@dataclass(frozen=True)
class SimulationMetrics:
    """One row of the table; the first nine are needed in every comparison."""

    workload: str
    policy: str
    avg_jct_s: float
    """JCT: seconds from a job's arrival to its completion."""
    median_jct_s: float
    p99_jct_s: float
    """Interpolated linearly between jobs, as are all percentiles."""
    makespan_s: float
    restarts_per_job: float
    """Starts after the first."""
    gpu_utilization: float
    """Share of the slot-seconds of all nodes, also unavailable ones, between first arrival and last
    completion, that jobs were allocated, including starts."""
    policy_seconds: float
    """Wall-clock seconds in all calls of `optimize`."""
    policy_calls: int
    policy_seconds_median: float
    policy_seconds_max: float
    finish_time_fairness: float
    """Mean rho, JCT over the time alone on an equal share (`isolated`)."""
    finish_time_fairness_p99: float
    finish_time_fairness_worst: float
    unfair_share: float
    """Share of jobs with rho > 1, for which an equal split would have been better."""
    rescales_per_job: float
    avg_wait_s: float
    gpu_hours: float
    jobs: int
    gpus: int
    seed: int
    known_length: str
    """The policy's knowledge of remaining work: exact, none, or an error factor."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def measure(outcome: SimulationOutcome) -> SimulationMetrics:
    """Return the metrics of a simulation."""
    jcts = np.array([job.jct for job in outcome.jobs])
    fairness = np.array([job.finish_time_fairness for job in outcome.jobs])
    calls = np.array(outcome.policy_seconds)
    makespan = outcome.end - outcome.begin
    gpus = sum(outcome.slots.values())
    held = sum(job.slot_seconds for job in outcome.jobs)
    return SimulationMetrics(
        workload=outcome.workload,
        policy=outcome.policy,
        avg_jct_s=float(jcts.mean()),
        median_jct_s=float(np.median(jcts)),
        p99_jct_s=float(np.percentile(jcts, 99)),
        makespan_s=makespan,
        restarts_per_job=float(np.mean([job.num_restarts for job in outcome.jobs])),
        gpu_utilization=held / (gpus * makespan),
        policy_seconds=float(calls.sum()),
        policy_calls=len(calls),
        # The outcome of a real run has no calls of the policy.
        policy_seconds_median=float(np.median(calls)) if calls.size else 0.0,
        policy_seconds_max=float(calls.max(initial=0.0)),
        finish_time_fairness=float(fairness.mean()),
        finish_time_fairness_p99=float(np.percentile(fairness, 99)),
        finish_time_fairness_worst=float(fairness.max()),
        unfair_share=float(np.mean(fairness > 1)),
        rescales_per_job=float(np.mean([job.num_rescales for job in outcome.jobs])),
        avg_wait_s=float(np.mean([job.started - job.arrived for job in outcome.jobs])),
        gpu_hours=held / 3600,
        jobs=len(outcome.jobs),
        gpus=gpus,
        seed=outcome.seed,
        known_length=str(outcome.known_length),
    )


JOB_COLUMNS = (
    *("workload", "policy", "name", "application", "arrived_s", "started_s", "completed_s"),
    *("jct_s", "restarts", "slot_seconds", "lost_progress", "isolated_s", "finish_time_fairness"),
    "resizes",
)


def job_rows(outcome: SimulationOutcome) -> list[tuple[str | float, ...]]:
    """Return one row per job, in order of arrival: `JOB_COLUMNS`."""
    return [
        (
            *(outcome.workload, outcome.policy, job.name, job.application),
            *(job.arrived, job.started, job.completed, job.jct, job.num_restarts),
            *(job.slot_seconds, job.lost_progress, job.isolated, job.finish_time_fairness),
            job.num_rescales,
        )
        for job in outcome.jobs
    ]
