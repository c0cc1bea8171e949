"""Sia (Subramanya et al., SOSP'23): one integer program over all jobs' configurations.

`milp` states the program and solves it; here its answer is placed: jobs that keep their
configuration stay, distributed jobs take whole nodes, all others the tightest node that holds them,
and whoever is in the way is moved. `docs/policy-sia.md` tells where this differs from the paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pipollux_sched.policy.allocation import Allocation
from pipollux_sched.policy.job_info import JobInfo, NodeInfo
from pipollux_sched.policy.placement.first_fit import place_arrival
from pipollux_sched.policy.placement.free_space import FreeSpace, by_arrival, name_order
from pipollux_sched.policy.placement.packing import answer, num_nodes_as_is, pack
from pipollux_sched.policy.pollux.arrays import Floats
from pipollux_sched.policy.rules import Allocations, Jobs, Nodes, usable_nodes

from .milp import Column, Constraint, NodeKind, configurations, cost, current_column, solve

_AGE_WEIGHT = 1e-4
"""How much dearer, relatively, waiting is for the oldest job: of equals, the older one runs."""


class SiaPolicy:
    """Chooses stages, replicas and type of GPU of all jobs at once, as well as can be.

    Args:
        power: p; below 0, the lower the fairer.
        waiting_cost: λ, what a job that waits adds to the sum of the jobs' G^p.
        relative_gap: how far from the optimum the program's answer may be, relatively.
        time_limit: seconds for the solver, for each program. When they are over, the best answer
            so far is taken; if there is none, running jobs stay and waiting jobs fill what is free.
            Only then does an answer depend on the machine.

    Raises:
        ValueError: a number is out of range; the message names it.

    Example:
        >>> job = JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4)
        >>> node = NodeInfo({"slots": 4})
        >>> SiaPolicy().optimize({"a": job}, {"n": node}, {}, node)[0]
        {'a': ['n', 'n']}
    """

    adapts_batch_size: ClassVar[bool] = True
    """Jobs choose their batch size, as Pollux's do."""

    def __init__(
        self,
        *,
        power: float = -0.5,
        waiting_cost: float = 1.1,
        relative_gap: float = 1e-4,
        time_limit: float = 60.0,
    ) -> None:
        if not -math.inf < power < 0:
            raise ValueError(f"power: {power} must be a finite number below 0")
        for name, value in (("waiting_cost", waiting_cost), ("time_limit", time_limit)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: {value} must be a finite number above 0")
        if not 0 <= relative_gap < 1:
            raise ValueError(f"relative_gap: {relative_gap} must be at least 0 and below 1")
        self._power = power
        self._waiting_cost = waiting_cost
        self._gap = relative_gap
        self._time_limit = time_limit

    def allocate_job(self, job_info: JobInfo, nodes: Nodes) -> list[Any]:
        """Place one arriving job on its fewest replicas, without moving any other.

        Args:
            job_info: the job.
            nodes: nodes with what is FREE on them.

        Returns:
            Its replicas' nodes, or nothing if there is no room.
        """
        return place_arrival(job_info, nodes)

    def optimize(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        node_template: NodeInfo,  # noqa: ARG002  # part of every policy's signature
    ) -> tuple[dict[Any, Allocation], int]:
        """Choose and place all jobs' configurations anew.

        Returns:
            The allocation of every job (empty: it waits), and the number of nodes as it is. The sum
            that the program minimises is never above that of what runs now.
        """
        cluster = _Cluster.of(jobs, nodes)
        space = FreeSpace(jobs, nodes, base_allocations)
        space.keep_running()
        current = answer(jobs, base_allocations, space.allocations)
        better: dict[Any, Allocation] | None = current
        while better is not None:
            current = better
            better = self._improved(cluster, current)
        return answer(jobs, base_allocations, current), num_nodes_as_is(jobs, nodes)

    def _improved(self, cluster: _Cluster, current: Allocations) -> dict[Any, Allocation] | None:
        """Return allocations that are worth more by the program's own measure; None: none found."""
        rounds = _Round(self, cluster, current)
        chosen = solve(
            rounds.rows,
            rounds.free,
            relative_gap=self._gap,
            time_limit=self._time_limit,
        )
        now = rounds.worth(rounds.current)
        attempts = [] if chosen is None else [rounds.place(chosen, move=True)]
        if chosen == rounds.current:
            return None
        # What could not be placed as chosen must not keep waiting jobs from what is free.
        for allocations, numbers in [*attempts, rounds.place(rounds.current, move=False)]:
            worth = rounds.worth(numbers)
            if worth < now - 1e-9 - self._gap * abs(worth):
                return answer(cluster.jobs, current, allocations)
        return None

    def values(
        self, job: JobInfo, columns: Sequence[Column], current: int | None, seniority: float
    ) -> Floats:
        """Return what columns are worth over waiting: cost - λ, below 0 where running is better.

        Args:
            job: the job.
            columns: its configurations.
            current: the number of that in which it runs; None: it waits.
            seniority: 1 for the oldest job, near 0 for the youngest.
        """
        waiting = self._waiting_cost * (1 + _AGE_WEIGHT * seniority)
        costs = [
            cost(job, column, running=current is not None, current=c == current, power=self._power)
            for c, column in enumerate(columns)
        ]
        return np.array(costs) - waiting


@dataclass(frozen=True)
class _Cluster:
    """What does not change while a program's answers are placed."""

    jobs: Jobs
    nodes: Nodes
    kinds: tuple[NodeKind, ...]
    regular: dict[Any, tuple[Column, ...]]
    """Each job's regular configurations."""

    @classmethod
    def of(cls, jobs: Jobs, nodes: Nodes) -> _Cluster:
        groups: dict[Any, list[Any]] = {}
        usable = usable_nodes(nodes)
        for name in sorted(usable, key=name_order):
            amounts = {kind: amount for kind, amount in usable[name].resources.items() if amount}
            groups.setdefault((usable[name].gpu_type, tuple(sorted(amounts.items()))), []).append(
                name
            )
        kinds = tuple(
            NodeKind(frozenset(groups[key]), dict(key[1]), key[0]) for key in sorted(groups)
        )
        return cls(jobs, nodes, kinds, {n: configurations(job, kinds) for n, job in jobs.items()})


def _limits(space: FreeSpace, kinds: Sequence[NodeKind]) -> dict[Constraint, int]:
    """Return what pinned jobs leave, by constraint."""
    limits: dict[Constraint, int] = {}
    for number, kind in enumerate(kinds):
        for resource, amount in space.free_on(kind.names).items():
            limits[Constraint(number, resource)] = amount
        limits[Constraint(number, None)] = space.num_without_distributed(kind.names)
    return limits


class _Round:
    """One program: every job's columns, what it runs in now, and how to place what is chosen."""

    def __init__(self, policy: SiaPolicy, cluster: _Cluster, current: Allocations) -> None:
        self._cluster, self._base = cluster, current
        jobs = cluster.jobs
        self._kind_of = {
            node: number for number, kind in enumerate(cluster.kinds) for node in kind.names
        }
        space = FreeSpace(jobs, cluster.nodes, current)
        self.free = _limits(space, cluster.kinds)
        self._names = [name for name in by_arrival(jobs) if name not in space.pinned]
        self._columns: list[tuple[Column, ...]] = []
        self.current: dict[int, int] = {}
        """Number of the column that each job runs in, by number of the job."""
        self.rows = []
        for number, name in enumerate(self._names):
            columns = self._add_current(number, cluster.regular[name], current[name])
            self._columns.append(columns)
            seniority = 1 - number / len(self._names)
            values = policy.values(jobs[name], columns, self.current.get(number), seniority)
            self.rows.append((number, values, columns))
        self._let_neighbours_stay()

    def _let_neighbours_stay(self) -> None:
        """Make room in the limits for distributed jobs that run beside pinned ones."""
        held: Counter[Constraint] = Counter()
        for job, number in self.current.items():
            held.update(self._columns[job][number].use)
        for limit in (limit for limit in held if limit.resource is None):
            self.free[limit] = max(self.free[limit], held[limit])

    def _add_current(
        self, number: int, regular: tuple[Column, ...], held: Any
    ) -> tuple[Column, ...]:
        if not held:
            return regular
        found, column = current_column(regular, held, self._kind_of)
        self.current[number] = len(regular) if found is None else found
        return (*regular, column) if found is None else regular

    def worth(self, numbers: dict[int, int]) -> float:
        """Return the program's sum for the numbers of columns, by number of the job."""
        return sum(float(self.rows[job][1][number]) for job, number in sorted(numbers.items()))

    def place(
        self, chosen: dict[int, int], *, move: bool
    ) -> tuple[dict[Any, Allocation], dict[int, int]]:
        """Place the columns chosen, or where that is impossible the next best for the job.

        Args:
            chosen: the number of a column, by number of the job.
            move: whether jobs may be moved and stopped; else all stay that run, and all jobs that
                wait try all of their columns.

        Returns:
            What every job that runs holds, and the numbers of the columns that these are.
        """
        space = FreeSpace(self._cluster.jobs, self._cluster.nodes, self._base)
        staying = {self._names[j]: n for j, n in chosen.items() if self.current.get(j) == n}
        space.keep_running(lambda name, _: name in staying)
        placed = list(chosen) if move else [j for j in range(len(self._names)) if j not in chosen]
        order = sorted(placed, key=lambda j: self._size(j, chosen.get(j)))
        options = {self._names[j]: self._options(j, chosen.get(j)) for j in order}
        wants = {
            name: [self._columns[j][n].request for n in options[name]]
            for j, name in ((j, self._names[j]) for j in order)
        }
        met = pack(space, [self._names[j] for j in order], wants)
        numbers = {}
        for j, name in enumerate(self._names):
            if name in met:
                numbers[j] = options[name][met[name]]
            elif name in space.allocations:
                numbers[j] = staying[name]
        return space.allocations, numbers

    def _size(self, job: int, number: int | None) -> tuple[bool, int, int]:
        """Distributed jobs first, then the largest, then the oldest."""
        if number is None:
            return False, 0, job
        column = self._columns[job][number]
        return column.num_nodes == 1, -column.slots, job

    def _options(self, job: int, number: int | None) -> list[int]:
        """The chosen column, then by worth those that hold no more slots; only what is worth it."""
        columns, values = self._columns[job], self.rows[job][1]
        most = math.inf if number is None else columns[number].slots
        others = [n for n, column in enumerate(columns) if values[n] < 0 and column.slots <= most]
        others.sort(key=lambda n: (n != number, values[n], n))
        return others
