"""Snapshots of Slurm: allocations, steps and nodes, read together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from pipollux_sched.backend.base import BackendError, ClusterUnavailableError

from .commands import run
from .output import (
    JOB_FORMAT,
    STEP_FORMAT,
    NodeLine,
    Share,
    SlurmJob,
    StepLine,
    read_jobs,
    read_nodes,
    read_shares,
    read_steps,
    split_jobs,
)
from .topology import read_topology

_LOG = logging.getLogger(__name__)
REFRESH_INTERVAL = 2.0
"""Seconds between two snapshots, each of which runs three commands."""
HURRIED_INTERVAL = 1.0
"""The same after a change."""
TOPOLOGY_INTERVAL = 60.0
"""Seconds between two queries of the topology, which rarely changes."""
ASKED_FOR_ALONE = 8
"""Most new allocations that are queried one by one; for more, all jobs are queried."""
NODES_AT_ONCE = 500
"""Most nodes per command, because command lines have a limited length."""


@dataclass(frozen=True)
class SlurmAllocation:
    """A running allocation of ours."""

    job: SlurmJob
    shares: Mapping[str, Share]
    """Its share of each of its nodes, by name."""


@dataclass(frozen=True)
class SlurmSnapshot:
    """The state of Slurm at one moment."""

    number: int = 0
    """Grows from one snapshot to the next; 0: none yet."""
    begun: float = 0.0
    """When it was begun, by the monotonic clock: it contains everything before."""
    jobs: Mapping[int, SlurmJob] = field(default_factory=dict)
    """All jobs of this user, including recently ended ones."""
    steps: Mapping[tuple[int, str], StepLine] = field(default_factory=dict)
    """The steps of this user by allocation and name."""
    nodes: Mapping[str, NodeLine] = field(default_factory=dict)
    allocations: Mapping[int, SlurmAllocation] = field(default_factory=dict)
    """The running allocations that were chosen."""
    topology: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The domain of every node by level of the network, the widest first."""


class SlurmReader:
    """Reads snapshots from Slurm, with the allocations that are `chosen`."""

    def __init__(self, chosen: Callable[[Mapping[int, SlurmJob]], Iterable[int]]) -> None:
        self._chosen = chosen
        self._number = 0
        self._shares: dict[tuple[int, str], dict[str, Share]] = {}
        """Shares by allocation and its host list, which shrinks when a node fails."""
        self._topology: Mapping[str, Mapping[str, str]] = {}
        self._topology_of: list[str] | None = None
        self._topology_read = 0.0

    def read(self) -> SlurmSnapshot:
        """Read a snapshot.

        `ClusterUnavailableError`: the controller does not answer; `BackendError`: Slurm rejects a
        command.
        """
        begun = time.monotonic()
        jobs = read_jobs(run(["squeue", "-h", "--me", "-t", "all", "-o", JOB_FORMAT]))
        steps = read_steps(run(["squeue", "-h", "--me", "-s", "-o", STEP_FORMAT]))
        chosen = [jobs[number] for number in self._chosen(jobs) if number in jobs]
        running = [job for job in chosen if job.state == "RUNNING"]
        self._shares = self._shares_of(running)
        allocations = {
            job.job: SlurmAllocation(job, self._shares[job.job, job.nodes]) for job in running
        }
        names = sorted({name for held in allocations.values() for name in held.shares})
        self._number += 1
        return SlurmSnapshot(
            number=self._number,
            begun=begun,
            jobs=jobs,
            steps={(step.job, step.name): step for step in steps},
            nodes=_nodes(names),
            allocations=allocations,
            topology=self._network(names),
        )

    def _network(self, names: list[str]) -> Mapping[str, Mapping[str, str]]:
        """Return the topology, read again for other nodes, and now and then."""
        now = time.monotonic()
        if not names or (
            names == self._topology_of and now - self._topology_read < TOPOLOGY_INTERVAL
        ):
            return self._topology
        try:
            self._topology = read_topology(run(["scontrol", "show", "topology"]), _known_hosts)
        except ClusterUnavailableError:
            raise
        except BackendError as error:  # a Slurm without topology
            _LOG.debug("%s", error)
            self._topology = {}
        self._topology_of, self._topology_read = names, now
        return self._topology

    def _shares_of(self, jobs: list[SlurmJob]) -> dict[tuple[int, str], dict[str, Share]]:
        """Return the shares of allocations on each of their nodes; new ones are queried."""
        keys = [(job.job, job.nodes) for job in jobs]
        new = [key for key in keys if key not in self._shares]
        command = ["scontrol", "show", "job", "-d", "-o"]
        texts: dict[int, str] = {}
        if len(new) > ASKED_FOR_ALONE:
            texts = split_jobs(run(command))
        for key in new:
            number, _ = key
            # An allocation that has just ended is missing here, and Slurm's error says so.
            text = texts.get(number) or run([*command, str(number)])
            self._shares[key] = {
                name: share for share in read_shares(text) for name in host_names(share.nodes)
            }
        return {key: self._shares[key] for key in keys}


def host_names(hosts: str) -> list[str]:
    """Return the names in a Slurm host list; raise `BackendError` if Slurm cannot parse it."""
    if not any(sign in hosts for sign in "[,"):
        return [hosts] if hosts else []
    return run(["scontrol", "show", "hostnames", hosts]).split()


@lru_cache(maxsize=4096)
def _known_hosts(hosts: str) -> tuple[str, ...]:
    return tuple(host_names(hosts))


def _nodes(names: list[str]) -> dict[str, NodeLine]:
    found: dict[str, NodeLine] = {}
    for first in range(0, len(names), NODES_AT_ONCE):
        part = ",".join(names[first : first + NODES_AT_ONCE])
        found.update(read_nodes(run(["scontrol", "show", "node", "-o", part])))
    return found
