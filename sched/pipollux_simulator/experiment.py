"""Simulations by name: a cluster, a workload and a policy, to an outcome as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipollux_perfmodel import fit_perf_params
from pipollux_policies import NodeInfo, make_policy
from pipollux_simulator.applications.base import Application
from pipollux_simulator.applications.devices import A100_40G
from pipollux_simulator.applications.gpt import GPT_MODELS
from pipollux_simulator.applications.registry import check_room, devices_of, load_applications
from pipollux_simulator.applications.trace_model import Fit
from pipollux_simulator.engine.cluster import Cluster, Options, Watch
from pipollux_simulator.engine.experience import Experience
from pipollux_simulator.engine.failures import (
    FAILURES,
    SPOT,
    NodeEvent,
    merge_events,
    outages,
)
from pipollux_simulator.engine.isolated import IsolatedTimes
from pipollux_simulator.engine.outcome import SimulationOutcome, outcome
from pipollux_simulator.workload.arrivals import JobArrival


@dataclass(frozen=True)
class Workload:
    """Named jobs."""

    name: str
    jobs: tuple[JobArrival, ...]
    applications: Mapping[str, Application] = field(default_factory=dict)
    """Applications that are not found by name."""


@dataclass(frozen=True)
class Experiment:
    """A cluster for evaluating workloads and policies; deterministic.

    >>> experiment = Experiment(make_nodes({"": (2, 4)}))
    >>> jobs = (JobArrival("a", 0.0, "gpt-1.3b", 1, 32),)
    >>> outcome = experiment.run(Workload("one", jobs), "fifo")
    >>> outcome.jobs[0].started
    60.0
    """

    nodes: Mapping[str, NodeInfo]
    options: Options = field(default_factory=Options)
    traces: Path | None = None
    """Folder of the public traces, for their applications."""
    seed: int = 0
    fit: Fit = fit_perf_params
    _applications: dict[str, Application] = field(default_factory=dict, init=False, repr=False)
    _isolated: list[IsolatedTimes] = field(default_factory=list, init=False, repr=False)

    def applications(self, workload: Workload) -> dict[str, Application]:
        """Return the applications of a workload; each is read once. Raises ValueError if one is
        unknown, its traces are missing or invalid, or it fits on no node.
        """
        own = workload.applications
        names = {job.application for job in workload.jobs} - own.keys()
        gpu_types = {node.gpu_type for node in self.nodes.values()}
        devices = devices_of(gpu_types) if names & GPT_MODELS.keys() else (A100_40G,)
        missing = names - self._applications.keys()
        loaded = load_applications(missing, traces=self.traces, devices=devices, fit=self.fit)
        for application in loaded.values():
            check_room(application, self.nodes)
        self._applications.update(loaded)
        return {**{name: self._applications[name] for name in names}, **own}

    def run(
        self,
        workload: Workload,
        policy: str,
        watch: Watch | None = None,
        *,
        experience: Experience | None = None,
    ) -> SimulationOutcome:
        """Simulate a workload under a policy, such as "fifo" or "exact:tail=1"; `watch` as of
        `Cluster.run`.

        `experience` is of previously completed jobs, extended by this workload's; None: a new
        cluster. Raises SimulationError if the policy broke a rule, or some job never runs; else
        ValueError.
        """
        applications = self.applications(workload)
        made = make_policy(policy, seed=self.seed)
        known = Experience() if experience is None else experience
        nodes = dict(self.nodes)
        cluster = Cluster(workload.jobs, applications, nodes, made, self.options, known)
        result = cluster.run(watch)
        if not self._isolated:
            self._isolated.append(IsolatedTimes(self.nodes, self.options.restart_seconds))
        return outcome(
            result,
            applications,
            self._isolated[0],
            workload=workload.name,
            policy=policy,
            seed=self.seed,
            known_length=self.options.known_length,
            teams=self.options.teams,
        )


def make_nodes(
    counts: Mapping[str, tuple[int, int]],
    *,
    preemptible: bool = False,
    domains: Sequence[int] = (),
) -> dict[str, NodeInfo]:
    """Return nodes by name, from the number of nodes and GPUs per node by type of GPU. `domains`
    are nodes per domain of each network level, the narrowest first, such as rack and zone.

    >>> list(make_nodes({"a100-40g": (2, 8)}))
    ['a100-40g-0', 'a100-40g-1']
    """
    nodes: dict[str, NodeInfo] = {}
    for gpu_type, (number, gpus) in counts.items():
        digits = len(str(number - 1))
        for index in range(number):
            name = f"{gpu_type or 'node'}-{index:0{digits}}"
            topology = tuple(str(len(nodes) // size) for size in reversed(domains))
            nodes[name] = NodeInfo(
                {"slots": gpus}, preemptible=preemptible, gpu_type=gpu_type, topology=topology
            )
    return nodes


def node_events(
    nodes: Sequence[str], days: float, seed: int, *, failures: bool, spot: bool
) -> tuple[NodeEvent, ...]:
    """Draw the events of nodes: rare failures, spot preemptions, both or none."""
    kinds = [kind for kind, wanted in ((FAILURES, failures), (SPOT, spot)) if wanted]
    streams = [
        outages(nodes, days * 86400, kind, seed + number) for number, kind in enumerate(kinds)
    ]
    return tuple(merge_events(*streams))
