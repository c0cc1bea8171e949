"""`ExactPolicy` in Pollux's place in the simulator of Pollux's own artifact.

    python benchmarks/jct/in_artifact.py ARTIFACT --workload 6 --known-length none

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact. It stays unchanged:
jobs, their models, their speedup functions and the passing of time are its own. This script adds an
adapter from its interface to ours, and names that newer releases of its libraries have dropped.
Needs pandas, which Pipollux does not. Prints JSON.
"""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections import ChainMap, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from pipollux_perfmodel.hints.step_rows import MAX_RELATIVES
from pipollux_policies import (
    CompletedJob,
    JobInfo,
    LengthHistory,
    NodeInfo,
    family_of,
    make_policy,
)
from pipollux_simulator import KnownLength

RESTART_SECONDS = 30.0


class Adapter:
    """Answers the artifact's simulator with the decisions of a policy of ours.

    Args:
        policy: name of one of `POLICIES`.
        known_length: the policy's knowledge of job lengths.
        inherit_models: whether a job starts with the measurements of its family, also of running
        jobs, with the fit of the last completed job, or else of the latest running one, and with
        the gradients that this one started with.
    """

    cluster: Any
    """The artifact's `Cluster`, which alone knows the progress of its jobs."""

    def __init__(
        self, policy: str, known_length: KnownLength, *, inherit_models: bool = False
    ) -> None:
        self._policy = make_policy(policy, seed=0)
        self._known_length = known_length
        self._inherit_models = inherit_models
        self._lengths = LengthHistory()
        self._completed: dict[str, list[Any]] = defaultdict(list)
        """The completed jobs of each family, the last one last."""
        self._first_gradients: dict[str, Any] = {}
        """Of each job that has trained."""
        self._seen_done: set[str] = set()
        self.seconds: list[float] = []

    def optimize(self, jobs: Any, nodes: Any, base_allocations: Any, _template: Any) -> Any:
        """Decide one round, in the artifact's terms."""
        trained = {job.name: job for job in self.cluster.jobs}
        self._learn()
        if self._inherit_models:
            for name in jobs:
                if self._inherit(trained[name]):
                    jobs = {**jobs, name: self.cluster.get_pollux_job_info(trained[name])}
        infos = {name: self._job_info(info, trained[name]) for name, info in jobs.items()}
        ours = {
            name: NodeInfo({"slots": info.resources["nvidia.com/gpu"]})
            for name, info in nodes.items()
        }
        base = {name: sorted(given) for name, given in base_allocations.items() if given}
        begin = time.perf_counter()
        answer, _ = self._policy.optimize(infos, ours, base, ours[0])
        self.seconds.append(time.perf_counter() - begin)
        # The artifact compares lists: surviving replicas must stay in their order.
        return {name: sorted(given) for name, given in answer.items()}, len(nodes)

    def _learn(self) -> None:
        """Add the jobs that have completed, in the order of completion."""
        for job in self.cluster.jobs:
            if job.grad_params is not None:
                self._first_gradients.setdefault(job.name, job.grad_params)
        ended = [job for job in self.cluster.jobs if job.completion_time is not None]
        for job in sorted(ended, key=lambda job: (job.completion_time, job.name)):
            if job.name not in self._seen_done:
                self._seen_done.add(job.name)
                family, trained = family_of(job.name), _samples(job)
                self._lengths.add(CompletedJob(family, trained, trained / _base_goodput(job)))
                self._completed[family].append(job)

    def _inherit(self, job: Any) -> bool:
        """Give a job without measurements those of its relatives."""
        relatives = self._relatives(family_of(job.name))
        if job.profile or not relatives:
            return False
        job.profile = dict(ChainMap(*(one.profile for one in relatives)))
        job.perf_params = relatives[0].perf_params
        job.grad_params = self._first_gradients[relatives[0].name]
        return True

    def _relatives(self, family: str) -> list[Any]:
        """Return the jobs that pass on measurements, as a scheduler's store does (`Families`)."""
        completed = self._completed[family]
        at_work = [
            job
            for job in self.cluster.jobs
            if job.perf_params is not None
            and job.completion_time is None
            and family_of(job.name) == family
            and job.name in self._first_gradients
        ]
        latest = reversed([*completed[:-1], *at_work])
        return [*completed[-1:], *latest][:MAX_RELATIVES]

    def _length(self, job: Any) -> dict[str, Any]:
        """Return the policy's knowledge of a job's length, as fields of `JobInfo`."""
        if not self._known_length.learned:
            return {"remaining_work": self._known_length.estimate(job.name, _remaining_work(job))}
        if job.perf_params is None:
            return {}
        family, goodput = family_of(job.name), _base_goodput(job)
        left = self._lengths.work_left(family, _samples(job), goodput)
        return {"family": family, "work_left": left, "work_done": _samples(job) / goodput}

    def _job_info(self, info: Any, job: Any) -> JobInfo:
        return JobInfo(
            resources={"slots": info.resources["nvidia.com/gpu"]},
            speedup_fn=info.speedup_fn,
            creation_timestamp=float(info.creation_timestamp),
            min_replicas=info.min_replicas,
            max_replicas=int(info.max_replicas),
            age=float(info.age),
            num_restarts=info.num_restarts,
            restart_seconds=RESTART_SECONDS,
            attained_service=float(info.attained_service),
            **self._length(job),
        )


def _remaining_work(job: Any) -> float | None:
    """Return the remaining seconds of one replica; None: unknown."""
    if job.perf_params is None:
        return None
    left = job.application.get_progress(job.application.max_epochs) - job.progress
    return float(max(left, 0.0) * job.application.init_batch_size / _base_goodput(job))


def _samples(job: Any) -> float:
    """Return the trained samples of a job, in units of the initial batch size's."""
    return float(job.progress * job.application.init_batch_size)


def _base_goodput(job: Any) -> float:
    """Return the goodput of one replica by a job's model."""
    app = job.application
    bounds = app.min_local_bsz, app.max_local_bsz
    goodput, _, _ = job.get_goodput_fn().optimize(
        1, 1, app.max_batch_size, bounds, accumulation=True
    )
    return float(goodput)


def load_simulator(artifact: Path) -> Any:
    """Import the unchanged artifact's simulator with later releases of its libraries."""
    np.int = int  # type: ignore[attr-defined]  # gone since NumPy 1.24
    pandas.DataFrame.append = _append  # type: ignore[attr-defined]  # gone since pandas 2
    for name in (
        "model.crossover",
        "model.mutation",
        "model.problem",
        "model.repair",
        "optimize",
        "algorithms.nsga2",
        "operators.crossover.util",
        "util.nds.non_dominated_sorting",
    ):
        _stand_in(f"pymoo.{name}")
    sys.path.insert(0, str(artifact))
    simulator = importlib.import_module("simulator")
    simulator.fit_perf_params = _remembered(simulator.fit_perf_params)
    return simulator


def _remembered(fit: Any) -> Any:
    """Cache fits of the same measurements, which take nearly all of a simulation's time."""
    if hasattr(fit, "known"):
        return fit
    known: dict[tuple[bytes, ...], Any] = {}

    def fit_once(*columns: Any) -> Any:
        key = tuple(np.asarray(column, dtype=float).tobytes() for column in columns)
        if key not in known:
            known[key] = fit(*columns)
        return known[key]

    fit_once.known = known  # type: ignore[attr-defined]  # the mark that it is wrapped
    return fit_once


def _append(frame: Any, other: Any, ignore_index: bool = False) -> Any:
    return pandas.concat([frame, other], ignore_index=ignore_index)


def _stand_in(name: str) -> None:
    """Make the artifact's genetic algorithm importable; it does not run here."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        path = ".".join(parts[:number])
        module = sys.modules.setdefault(path, _Anything(path))
        module.__path__ = []
        if number > 1:
            setattr(sys.modules[".".join(parts[: number - 1])], parts[number - 1], module)


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def run(
    artifact: Path,
    workload: Path,
    policy: str,
    known_length: KnownLength,
    *,
    inherit_models: bool = False,
) -> dict[str, Any]:
    """Simulate a workload on 16 nodes of 4 GPUs, in rounds of 60 s."""
    simulator = load_simulator(artifact)
    adapter = Adapter(policy, known_length, inherit_models=inherit_models)
    simulator.PolluxPolicy = Adapter  # its class selects adaptive jobs
    cluster = simulator.Cluster(pandas.read_csv(workload), adapter, 16)
    adapter.cluster = cluster
    while not cluster.all_complete():
        cluster.step(60)
        done = sum(job.completion_time is not None for job in cluster.jobs)
        if cluster.current_time % 3600 == 0:
            print(f"{cluster.current_time / 3600:.0f} h: {done} done", file=sys.stderr)
    return outcome(cluster, adapter.seconds)


def outcome(cluster: Any, policy_seconds: Sequence[float]) -> dict[str, Any]:
    """Return the metrics of a completed simulation."""
    jcts = np.array(list(cluster.get_jcts().values()), dtype=float)
    return {
        "avg_jct_s": float(jcts.mean()),
        "p99_jct_s": float(np.percentile(jcts, 99)),
        "makespan_s": float(
            max(job.completion_time for job in cluster.jobs)
            - min(job.submission_time for job in cluster.jobs)
        ),
        "restarts_per_job": float(np.mean([job.num_restarts or 0 for job in cluster.jobs])),
        "policy_seconds_median": float(np.median(policy_seconds)),
        "jcts": cluster.get_jcts(),
    }
