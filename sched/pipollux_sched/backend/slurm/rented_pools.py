"""Allocations that the scheduler requests from Slurm: one batch job of one node each.

A replica never spans nodes, so larger allocations have no advantage, and each node can be added,
released, renewed or preempted separately. The jobs are identified by their name, which contains an
id of the state directory: the next scheduler finds them.

Every allocation has a time limit. Another one is requested before the limit, and when that runs, or
`renew_before` seconds before the limit at the latest, the old node is marked as draining: jobs save
and move, and the empty node is released.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipollux_sched.backend.base import BackendError, ClusterUnavailableError

from .commands import SlurmError, run
from .node_check import CHECK_NAME
from .output import SlurmJob
from .pools import Pools, ends_in, ends_within
from .snapshot import SlurmSnapshot

_LOG = logging.getLogger(__name__)
SUBMIT_INTERVAL = 10.0
"""Seconds between two requests for nodes that the autoscaler did not make, in case Slurm ends
allocations as soon as they begin."""
REFUSED_INTERVAL = 60.0
"""The same after a rejection by Slurm."""
PENDING_PATIENCE = 15.0
"""Seconds that an allocation may be pending before Slurm's reason is logged."""
_UNFINISHED = frozenset(("RUNNING", "PENDING", "CONFIGURING", "SUSPENDED", "RESIZING", "REQUEUED"))
_COMING = frozenset(("PENDING", "CONFIGURING", "REQUEUED"))


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """Options of requested allocations.

    Example:
        >>> PoolOptions(name="pipollux-1f", num_nodes=2, partition="main").arguments()[-1]
        '--partition=main'
    """

    name: str
    """Name of the jobs; no others of this user may have it."""
    num_nodes: int
    """Initial number of nodes."""
    partition: str | None = None
    gres: str | None = None
    """GPUs that a node must have, such as gpu:4; the whole node is allocated. None: any."""
    time: str | None = None
    """Time limit in Slurm's format; None: the partition's."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    more: Sequence[str] = ()
    """Further options of sbatch."""
    renew_before: float = 600.0
    """Seconds before its time limit at which jobs leave a node; at most a quarter of the limit."""
    keep: bool = False
    """Whether allocations outlive the scheduler."""

    def arguments(self) -> list[str]:
        """Return the options of sbatch."""
        names = "partition", "gres", "time", "account", "qos", "constraint", "reservation"
        named = {name: getattr(self, name) for name in names}
        return [
            f"--job-name={self.name}",
            *("--nodes=1", "--exclusive", "--mem=0", "--no-requeue"),
            *("--output=/dev/null", "--chdir=/"),
            *(f"--{option}={value}" for option, value in named.items() if value is not None),
            *self.more,
        ]


class RentedPools(Pools):
    """Keeps the requested number of nodes, and renews them; an `allocator.expander.Expander`."""

    def __init__(
        self, options: PoolOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.options = options
        self._clock = clock
        self._lock = threading.RLock()
        self._wanted: int | None = None
        self._released: set[int] = set()
        self._draining: dict[int, str] = {}
        self._stuck: Mapping[int, str] = {}
        self._submitted: dict[int, float] = {}
        """Submission times of jobs that a snapshot may not contain yet."""
        self._waiting: dict[int, tuple[float, str]] = {}
        """Pending allocations: since when, and the last logged reason."""
        self._not_before = 0.0
        self._snapshot = SlurmSnapshot()

    def num_nodes(self) -> int:
        """Return the present number of nodes."""
        with self._lock:
            return len(self._running(self._snapshot.jobs))

    def choose(self, jobs: Mapping[int, SlurmJob]) -> Iterable[int]:
        """Return the jobs with our name, except released ones."""
        with self._lock:
            return sorted(self._running(jobs))

    def request(self, desired_nodes: int, release: Sequence[str] = ()) -> None:
        """Request a number of nodes without those to `release`; or raise `BackendError`."""
        with self._lock:
            self._wanted = desired_nodes
            if not self._snapshot.number:
                return
            for number, allocation in self._snapshot.allocations.items():
                if set(allocation.shares) & set(release):
                    self._release(number)
            self._fill(self._snapshot)

    def look(self, snapshot: SlurmSnapshot) -> None:
        """Replace allocations that have ended or end soon, and release drained ones."""
        with self._lock:
            self._snapshot = snapshot
            self._submitted = {
                number: at
                for number, at in self._submitted.items()
                if number not in snapshot.jobs and at >= snapshot.begun
            }
            self._released &= snapshot.jobs.keys()
            first = self._wanted is None
            if self._wanted is None:
                there = [job for job in snapshot.jobs.values() if self._counts(job)]
                self._wanted = max(len(there), self.options.num_nodes)
            self._drain(snapshot)
            self._tell_what_waits(snapshot)
            if not first and self._clock() < self._not_before:
                return
            try:
                self._fill(snapshot)
            except ClusterUnavailableError:
                if first:
                    raise
            except SlurmError as error:
                if first:
                    raise
                _LOG.warning("no more nodes can be requested: %s", error)
                self._not_before = self._clock() + REFUSED_INTERVAL

    def leaving(self, snapshot: SlurmSnapshot) -> Mapping[str, str]:
        """Return the nodes of allocations that end soon."""
        with self._lock:
            return {
                name: why
                for number, why in self._draining.items()
                if number in snapshot.allocations
                for name in snapshot.allocations[number].shares
            }

    def replace(self, stuck: Mapping[int, str]) -> None:
        """Replace allocations with a step that cannot be ended."""
        with self._lock:
            self._stuck = stuck

    def close(self, busy: Collection[int]) -> None:
        """Release all allocations without replicas, unless they are to be kept."""
        if self.options.keep:
            return
        with self._lock:
            numbers = {job.job for job in self._snapshot.jobs.values() if self._counts(job)}
            for number in sorted((numbers | self._submitted.keys()) - set(busy)):
                try:
                    self._release(number)
                except BackendError as error:
                    _LOG.warning("Slurm's allocation %s was not released: %s", number, error)

    def give_back(self, busy: Collection[int]) -> None:
        """Release draining nodes on which nothing runs."""
        with self._lock:
            left = self._draining.keys() - set(busy)
            if not left:
                return
            steps = self._snapshot.steps.values()
            have_steps = {step.job for step in steps if step.name != CHECK_NAME}
            for number in sorted(left & self._snapshot.allocations.keys()):
                if number in self._stuck or number not in have_steps:
                    self._release(number)

    def _running(self, jobs: Mapping[int, SlurmJob]) -> list[int]:
        return [job.job for job in jobs.values() if self._is_running(job)]

    def _is_running(self, job: SlurmJob) -> bool:
        return self._counts(job) and job.state == "RUNNING"

    def _counts(self, job: SlurmJob) -> bool:
        ours = job.name == self.options.name and job.job not in self._released
        return ours and job.state in _UNFINISHED

    def _ends_soon(self, job: SlurmJob, factor: float = 1.0) -> bool:
        return ends_within(job, self.options.renew_before, factor)

    def _lasts(self, job: SlurmJob) -> bool:
        """Return whether an allocation counts and has at least twice the drain time left."""
        ends = job.job in self._stuck or self._ends_soon(job, 2.0)
        return self._counts(job) and (job.state in _COMING or not ends)

    def _fill(self, snapshot: SlurmSnapshot) -> None:
        """Request missing nodes, or cancel surplus requests."""
        lasting = [job for job in snapshot.jobs.values() if self._lasts(job)]
        wanted = self._wanted or 0
        missing = wanted - len(lasting) - len(self._submitted)
        for _ in range(missing):
            self._submit()
        coming = sorted(job.job for job in lasting if job.state in _COMING)
        for number in coming[len(coming) + min(missing, 0) :]:
            self._release(number)

    def _drain(self, snapshot: SlurmSnapshot) -> None:
        """Mark nodes to drain: their time is over, or they have been replaced."""
        running = [job for job in snapshot.jobs.values() if self._is_running(job)]
        ending = [job for job in running if self._ends_soon(job, 2.0)]
        ending.sort(key=lambda job: job.seconds_left or 0.0)
        stuck = self._stuck.keys() & {job.job for job in running}
        replaced = len(running) - len(stuck) - (self._wanted or 0)
        self._draining = {
            job.job: ends_in(job)
            for place, job in enumerate(ending)
            if place < replaced or self._ends_soon(job)
        }
        self._draining.update({number: self._stuck[number] for number in stuck})

    def _tell_what_waits(self, snapshot: SlurmSnapshot) -> None:
        """Log each reason of Slurm for pending nodes once."""
        now = self._clock()
        pending = {
            job.job: job
            for job in snapshot.jobs.values()
            if self._counts(job) and job.state == "PENDING"
        }
        self._waiting = {number: self._waiting.get(number, (now, "")) for number in sorted(pending)}
        late: dict[str, list[int]] = {}
        for number, (since, told) in self._waiting.items():
            reason = pending[number].reason
            if reason and reason != told and now - since >= PENDING_PATIENCE:
                self._waiting[number] = since, reason
                late.setdefault(reason, []).append(number)
        for reason, numbers in late.items():
            jobs = ",".join(map(str, numbers))
            _LOG.warning(
                "Slurm has not yet given %s of the nodes asked for (%s); see squeue --jobs %s",
                *(len(numbers), reason, jobs),
            )

    def _submit(self) -> None:
        command = ["sbatch", "--parsable", *self.options.arguments(), "--wrap=exec sleep infinity"]
        number = int(run(command).strip().partition(";")[0])
        self._submitted[number] = self._clock()
        self._not_before = self._clock() + SUBMIT_INTERVAL

    def _release(self, number: int) -> None:
        self._released.add(number)
        self._draining.pop(number, None)
        self._submitted.pop(number, None)
        try:
            run(["scancel", str(number)])
        except ClusterUnavailableError:
            self._released.discard(number)
            raise
        except SlurmError as error:  # it has ended
            _LOG.debug("%s", error)
