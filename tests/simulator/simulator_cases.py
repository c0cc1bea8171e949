"""A cluster so simple that what comes of it can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipollux_perfmodel import GradParams
from pipollux_policies import JobInfo, NodeInfo, ReplicaShape
from pipollux_simulator import (
    Cluster,
    JobArrival,
    Options,
    Result,
    RunningJob,
    TrueStepTimes,
)
from pipollux_simulator.applications.trace_model import linear_speedup


class Steady:
    """Trains an iteration a second per replica, in epochs of 100; its model knows that."""

    name = "steady"
    init_batch_size = 10
    max_batch_size = 10
    max_epochs = 3
    max_profiled_replicas = 8

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        return TrueStepTimes(1.0 / running.num_replicas, 1.0 / running.num_replicas)

    def gradients(self, batch_size: int, epoch: int) -> GradParams:  # noqa: ARG002  # the protocol's
        return GradParams(1.0, 0.0)

    def progress(self, epoch: int) -> float:
        return 100.0 * epoch

    def completion_epoch(self, batch_size: int) -> int:  # noqa: ARG002  # the protocol's
        return self.max_epochs - 1

    def max_replicas(self, batch_size: int | None = None) -> int:  # noqa: ARG002  # the protocol's
        return 8

    def new_model(self, batch_size: int | None = None) -> Steady:  # noqa: ARG002  # the protocol's
        return self

    def observe(self, *_: Any) -> None:
        pass

    def shapes(self) -> tuple[ReplicaShape, ...]:
        return (ReplicaShape(1, {"slots": 1}, linear_speedup),)

    def configure(
        self, _: ReplicaShape, placement: Sequence[int], gpu_type: str = ""
    ) -> RunningJob:
        return RunningJob(tuple(placement), 1, 1, 10, 0, gpu_type)

    def goodput(self, running: RunningJob) -> float:
        return 10.0 * running.num_replicas

    def base_goodput(self) -> float:
        return 10.0


class Give:
    """Gives every job the nodes that a table names, as long as they are there."""

    def __init__(self, **rows: list[str]) -> None:
        self.rows = rows
        self.seen: list[dict[str, JobInfo]] = []

    def allocate_job(self, job: JobInfo, nodes: Any) -> tuple[()]:  # noqa: ARG002  # a policy's
        return ()

    def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:  # noqa: ARG002  # a policy's
        self.seen.append(dict(jobs))
        there = {name: self.rows[name] for name in jobs if set(self.rows[name]) <= nodes.keys()}
        return there, len(nodes)


def simulate(policy: Any, *jobs: tuple[str, float], **options: Any) -> Result:
    """Simulate jobs (name, arrival) on two nodes, a and b, of four slots each."""
    workload = [JobArrival(name, time, "steady", 1, 10) for name, time in jobs]
    nodes = {name: NodeInfo({"slots": 4}) for name in "ab"}
    return Cluster(workload, {"steady": Steady()}, nodes, policy, Options(**options)).run()


def write_traces(folder: Path) -> None:
    """Write traces of cifar10 in the public format: 5 s an epoch on one GPU, perfect scaling.

    A step takes local batch / 512 seconds, half a second of which is never less; gradients are
    all noise, so that a batch of n samples is worth n, and an epoch has 2560 samples.
    """
    cifar10 = folder / "cifar10"
    cifar10.mkdir()
    times = [(size, max(size, 256) / 512) for size in (128, 256, 512, 1024)]
    rows = [
        f"{placement},{size},{step},0.0"
        for placement in ("1", "2", "11", "12", "22")
        for size, step in times
    ]
    _write_csv(cifar10 / "placements.csv", "placement,local_bsz,step_time,sync_time", rows)
    rows = [f"{nodes},{nodes * 2},{size},{step},0.0" for nodes in (8, 16) for size, step in times]
    header = "num_nodes,num_replicas,local_bsz,step_time,sync_time"
    _write_csv(cifar10 / "scalability.csv", header, rows)
    for size in (128, 1024):
        rows = [f"{20 * n},{20 * n * 128 // size},0.5,1e-9,1.0" for n in range(1, 101)]
        header = "progress,iteration,metric,grad_sqr,grad_var"
        _write_csv(cifar10 / f"validation-{size}.csv", header, rows)


def _write_csv(path: Path, header: str, rows: Sequence[str]) -> None:
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
