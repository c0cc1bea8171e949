"""Sia (Subramanya et al., SOSP'23): one integer program over all jobs' configurations.

`milp` solves the program; this module places the solution: jobs that keep their configuration stay,
distributed jobs take whole nodes, others the tightest node that holds them, and jobs in the way are
moved. See `docs/concepts/policies.md` for the differences to the paper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from pipollux_policies.allocations.allocation import Allocation, runs_as, shape_of
from pipollux_policies.allocations.change_cost import ChangeKind, num_survivors, possible_survivors
from pipollux_policies.allocations.order import by_arrival, name_order
from pipollux_policies.allocations.rules import Allocations, Jobs, Nodes, usable_nodes
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo
from pipollux_policies.jobs.topology import build_topology
from pipollux_policies.options import checked
from pipollux_policies.placement.cluster_state import ClusterState
from pipollux_policies.placement.first_fit import place_arrival
from pipollux_policies.placement.node_choice import Floats
from pipollux_policies.placement.packing import answer, num_nodes_as_is, pack

from .milp import Column, Constraint, NodeKind, configurations, cost, current_column, solve

_AGE_WEIGHT = 1e-4
"""The relative surcharge on waiting for the oldest job: of equal jobs, the older one runs."""


class SiaPolicy:
    """Chooses stages, replicas and type of GPU of all jobs together, near the optimum.

    Raises ValueError if an argument is out of range.

    >>> job = JobInfo({"slots": 2}, lambda nodes, replicas: replicas, 0.0, 1, 4)
    >>> node = NodeInfo({"slots": 4})
    >>> SiaPolicy().optimize({"a": job}, {"n": node}, {}, node)[0]
    {'a': ['n', 'n']}
    """

    adapts_batch_size: ClassVar[bool] = True

    @checked
    def __init__(
        self,
        *,
        power: Annotated[float, Field(lt=0, description="p of the sum; lower is fairer.")] = -0.5,
        waiting_cost: Annotated[
            float,
            Field(gt=0, description="λ, the cost of a queued job in the sum of the jobs' G^p."),
        ] = 1.1,
        relative_gap: Annotated[
            float,
            Field(
                ge=0,
                lt=1,
                description="Relative distance from the optimum at which the solver may stop.",
            ),
        ] = 1e-4,
        time_limit: Annotated[
            float,
            Field(
                gt=0,
                description="Seconds for the solver, per program. After them the best solution so "
                "far is used; without one, running jobs stay and queued jobs fill the free room. "
                "Only then does the result depend on the machine.",
            ),
        ] = 60.0,
    ) -> None:
        self._power = power
        self._waiting_cost = waiting_cost
        self._gap = relative_gap
        self._time_limit = time_limit

    allocate_job = staticmethod(place_arrival)

    def optimize(
        self,
        jobs: Jobs,
        nodes: Nodes,
        base_allocations: Allocations,
        node_template: NodeInfo,  # noqa: ARG002  # part of every policy's signature
    ) -> tuple[dict[Any, Allocation], int]:
        """Return every job's allocation (empty: it is queued), and the present number of nodes. The
        sum that the program minimizes is never above that of the current allocations.
        """
        cluster = _Cluster.of(jobs, nodes, base_allocations)
        state = ClusterState(jobs, nodes, base_allocations)
        # Jobs whose shape no longer exists restart in any case.
        state.keep_running(
            lambda name, held: (
                held.shape is not None and runs_as(base_allocations[name], held.shape)
            )
        )
        current = answer(jobs, base_allocations, state.allocations)
        better: dict[Any, Allocation] | None = current
        while better is not None:
            current = better
            better = self._improved(cluster, current)
        return answer(jobs, base_allocations, current), num_nodes_as_is(jobs, nodes)

    def _improved(self, cluster: _Cluster, current: Allocations) -> dict[Any, Allocation] | None:
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
        # A choice that cannot be placed must not keep queued jobs from free room.
        for allocations, numbers in [*attempts, rounds.place(rounds.current, move=False)]:
            worth = rounds.worth(numbers, allocations)
            if worth < now - 1e-9 - self._gap * abs(worth):
                return answer(cluster.jobs, current, allocations)
        return None

    def values(
        self,
        job: JobInfo,
        columns: Sequence[Column],
        current: int | None,
        seniority: float,
        elastic: Collection[int] = (),
    ) -> Floats:
        """Return the costs of columns minus that of waiting: below 0 if running is better.

        `current` is the job's column (None: queued), `seniority` 1 for the oldest job and near 0
        for the youngest, and `elastic` has the columns that a replica can survive to.
        """

        def change(number: int) -> ChangeKind:
            if current is None or number == current:
                return ChangeKind.NONE
            return ChangeKind.RESIZE if number in elastic else ChangeKind.RESTART

        waiting = self._waiting_cost * (1 + _AGE_WEIGHT * seniority)
        costs = [
            cost(job, column, change=change(c), power=self._power)
            for c, column in enumerate(columns)
        ]
        return np.array(costs) - waiting


def _domains(nodes: Sequence[NodeInfo]) -> tuple[int, ...]:
    """Return the most nodes in a domain of each network level but the highest."""
    topology = build_topology(nodes)
    return tuple(topology.largest_rooms(np.ones(len(nodes), np.int64))[:-1].tolist())


@dataclass(frozen=True)
class _Cluster:
    jobs: Jobs
    nodes: Nodes
    kinds: tuple[NodeKind, ...]
    regular: dict[Any, tuple[Column, ...]]
    running: Allocations

    @classmethod
    def of(cls, jobs: Jobs, nodes: Nodes, running: Allocations) -> _Cluster:
        groups: dict[Any, list[Any]] = {}
        usable = usable_nodes(nodes)
        for name in sorted(usable, key=name_order):
            amounts = {kind: amount for kind, amount in usable[name].resources.items() if amount}
            groups.setdefault((usable[name].gpu_type, tuple(sorted(amounts.items()))), []).append(
                name
            )
        kinds = tuple(
            NodeKind(frozenset(names), usable[names[0]], _domains([usable[n] for n in names]))
            for _, names in sorted(groups.items())
        )
        regular = {name: configurations(job, kinds) for name, job in jobs.items()}
        return cls(jobs, nodes, kinds, regular, running)

    def elastic_columns(self, name: Any, columns: Sequence[Column]) -> frozenset[int]:
        job, held = self.jobs[name], self.running.get(name, ())
        survivors = possible_survivors(job, held, self.nodes).keys()
        if not survivors:
            return frozenset()
        shape = shape_of(job, held, self.nodes)
        return frozenset(
            number
            for number, column in enumerate(columns)
            if column.request.shapes[0] is shape
            and not survivors.isdisjoint(column.request.within or survivors)
        )


def _limits(state: ClusterState, kinds: Sequence[NodeKind]) -> dict[Constraint, int]:
    limits: dict[Constraint, int] = {}
    for number, kind in enumerate(kinds):
        for resource, amount in state.free_on(kind.names).items():
            limits[Constraint(number, resource)] = amount
        limits[Constraint(number, None)] = state.num_without_distributed(kind.names)
    return limits


class _Round:
    def __init__(self, policy: SiaPolicy, cluster: _Cluster, current: Allocations) -> None:
        self._cluster, self._base = cluster, current
        jobs = cluster.jobs
        self._kind_of = {
            node: number for number, kind in enumerate(cluster.kinds) for node in kind.names
        }
        state = ClusterState(jobs, cluster.nodes, current)
        self.free = _limits(state, cluster.kinds)
        self._names = [name for name in by_arrival(jobs) if name not in state.pinned]
        self._policy = policy
        self._columns: list[tuple[Column, ...]] = []
        self._elastic: list[frozenset[int]] = []
        self.current: dict[int, int] = {}
        self.rows = []
        for number, name in enumerate(self._names):
            columns = self._add_current(number, cluster.regular[name], current[name])
            self._columns.append(columns)
            self._elastic.append(cluster.elastic_columns(name, columns))
            values = self._values(number, self._elastic[number])
            self.rows.append((number, values, columns))
        self._let_neighbours_stay()

    def _let_neighbours_stay(self) -> None:
        """Raise the limits for distributed jobs that run beside pinned ones."""
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

    def _values(self, job: int, elastic: Collection[int]) -> Floats:
        seniority = 1 - job / len(self._names)
        info, now = self._cluster.jobs[self._names[job]], self.current.get(job)
        return self._policy.values(info, self._columns[job], now, seniority, elastic)

    def worth(self, numbers: dict[int, int], allocations: Allocations | None = None) -> float:
        """Return the program's sum for a choice of columns, by number of the job. Without
        allocations, with the placement that the program assumes.
        """
        total = 0.0
        for job, number in sorted(numbers.items()):
            values = self.rows[job][1]
            if allocations is not None and number in self._elastic[job]:
                name = self._names[job]
                if not num_survivors(self._cluster.running[name], allocations[name]):
                    values = self._values(job, ())
            total += float(values[number])
        return total

    def place(
        self, chosen: dict[int, int], *, move: bool
    ) -> tuple[dict[Any, Allocation], dict[int, int]]:
        """Place the chosen columns, or the job's next best one if a column does not fit.

        Without `move`, all running jobs stay, and queued jobs try all of their columns. Returns the
        allocation of every running job, and its column.
        """
        cluster = self._cluster
        state = ClusterState(cluster.jobs, cluster.nodes, self._base, cluster.running)
        staying = {self._names[j]: n for j, n in chosen.items() if self.current.get(j) == n}
        state.keep_running(lambda name, _: name in staying)
        placed = list(chosen) if move else [j for j in range(len(self._names)) if j not in chosen]
        order = sorted(placed, key=lambda j: self._size(j, chosen.get(j)))
        fallbacks = {self._names[j]: self._fallbacks(j, chosen.get(j)) for j in order}
        wants = {
            name: [self._columns[j][n].request for n in fallbacks[name]]
            for j, name in ((j, self._names[j]) for j in order)
        }
        met = pack(state, [self._names[j] for j in order], wants)
        numbers = {}
        for j, name in enumerate(self._names):
            if name in met:
                numbers[j] = fallbacks[name][met[name]]
            elif name in state.allocations:
                numbers[j] = staying[name]
        return state.allocations, numbers

    def _size(self, job: int, number: int | None) -> tuple[bool, int, int]:
        """Return the order: distributed jobs first, then the largest, then the oldest."""
        if number is None:
            return False, 0, job
        column = self._columns[job][number]
        return column.num_nodes == 1, -column.slots, job

    def _fallbacks(self, job: int, number: int | None) -> list[int]:
        """Return the chosen column, then those with no more slots that beat waiting, best first."""
        columns, values = self._columns[job], self.rows[job][1]
        most = math.inf if number is None else columns[number].slots
        others = [n for n, column in enumerate(columns) if values[n] < 0 and column.slots <= most]
        others.sort(key=lambda n: (n != number, values[n], n))
        return others
