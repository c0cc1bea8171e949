"""Histories whose truth is known: those of a simulated scheduler, written into a real store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipollux_perfmodel import SchedHints
from pipollux_policies import NodeInfo
from pipollux_sched.history.application import HistoryApplication
from pipollux_sched.lifecycle import Allocate, Exited, FirstStep, Outcome, Started
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import Store
from pipollux_simulator import (
    Experiment,
    JobArrival,
    JobOutcome,
    JobTerms,
    KnownLength,
    Options,
    SimulationOutcome,
    Workload,
)
from tests.sched.sane_hints import SANE
from tests.sched.store.stores import Clock, serve_nodes

HINTS = {
    **{key: SANE[key] for key in ("initBatchSize", "localBszBounds", "gradParams", "perfParams")},
    "maxBatchSize": 512,
}
"""Of a job that trains 205 samples a second on one replica."""
NODES = {"node-a": 2, "node-b": 2, "node-c": 4}
START, RESTART, ASSUMED, INTERVAL = 5.0, 8.0, 12.0, 30.0


def spec_of(name: str, **fields: Any) -> JobSpec:
    return JobSpec(**{"name": name, "script": "train.py", "max_replicas": 8, **fields})


def node_infos(nodes: Mapping[str, int] = NODES) -> dict[str, NodeInfo]:
    """As the scheduler has nodes whose specifications name slots alone."""
    unstated = {"cpus": 2**50, "memory": 2**50}
    return {name: NodeInfo({"slots": slots, **unstated}) for name, slots in nodes.items()}


def simulated(
    jobs: Sequence[tuple[JobSpec, float, float]], policy: str, lineages: Mapping[str, Any]
) -> SimulationOutcome:
    """Simulate a scheduler's life with jobs (specification, arrival, samples)."""
    hints = SchedHints.from_json_object(HINTS)
    rows = [
        JobArrival(
            spec.name,
            arrival,
            spec.name,
            spec.requested_replicas or spec.min_replicas,
            32,
            terms=JobTerms(
                min_replicas=spec.min_replicas,
                max_replicas=spec.max_replicas,
                unmeasured_replicas=max(spec.min_replicas, spec.requested_replicas or 1),
                preemptible=spec.preemptible,
                family="job",
                lineage=lineages[spec.name],
                declares_length=True,
                start_seconds=START,
                restart_seconds=RESTART,
                assumed_restart_seconds=ASSUMED,
            ),
        )
        for spec, arrival, _ in jobs
    ]
    apps = {spec.name: HistoryApplication(spec, hints, samples) for spec, _, samples in jobs}
    options = Options(
        INTERVAL,
        ASSUMED,
        known_length=KnownLength.parse("declared"),
        inherit_models=True,
        decides_at="changes",
    )
    return Experiment(node_infos(), options).run(Workload("life", tuple(rows), apps), policy)


def write_settings(store: Store, policy: str, nodes: Mapping[str, int] = NODES) -> None:
    """Write what a scheduler writes when it begins to serve."""
    serve_nodes(store, **nodes)
    settings = {"policy": policy, "interval": INTERVAL, "restart_seconds": ASSUMED, "even": False}
    store.add_event("cluster", {"nodes": {}, **settings})


def write_history(
    store: Store,
    clock: Clock,
    jobs: Sequence[tuple[JobSpec, float, float]],
    outcome: SimulationOutcome,
) -> None:
    """Write what became of jobs as a scheduler does that decided so."""
    begin, found = clock.now, {job.name: job for job in outcome.jobs}
    todo: list[tuple[float, Callable[[], object]]] = []
    for spec, _, samples in jobs:
        todo += _life(store, spec, samples, found[spec.name])
    for moment, act in sorted(todo, key=lambda entry: entry[0]):
        clock.now = begin + moment
        act()


def _life(
    store: Store, spec: JobSpec, samples: float, job: JobOutcome
) -> Iterator[tuple[float, Callable[[], object]]]:
    name = spec.name
    document = spec.model_dump(mode="json")
    yield job.arrived, lambda: store.submit(name, document, f"token of {name}", 3)
    holds = [*job.history, None]
    for number, (hold, then) in enumerate(pairwise(holds), start=1):
        assert hold is not None
        moves = number > 1 and job.history[number - 2].end == hold.start
        if not moves:
            yield hold.start, _does(store, name, Allocate(list(hold.nodes), "it pays"))
        yield hold.start, _does(store, name, Started(number, ("1",) * len(hold.nodes)))
        cost = RESTART if moves else START
        if hold.start + cost < hold.end:
            seconds = RESTART if moves else None
            yield hold.start + cost, _does(store, name, FirstStep(number, number, seconds))
        if then is not None:
            nodes = list(then.nodes) if then.start == hold.end else []
            yield hold.end, _does(store, name, Allocate(nodes, "others gain more"))
            yield hold.end, _does(store, name, Exited(number, Outcome.STOPPED, step=number))
    last = len(job.history)
    told = {**HINTS, "trainedSamples": samples, "remainingSamples": 0, "maxProfiledReplicas": 1}
    yield job.completed, lambda: store.put_hints(name, last, told)
    yield job.completed, _does(store, name, Exited(last, Outcome.COMPLETE))


def _does(store: Store, name: str, event: Any) -> Callable[[], object]:
    return lambda: store.transition(name, event)
