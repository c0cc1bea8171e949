"""Sia's integer linear program (Subramanya et al., SOSP'23): a configuration for every job.

    minimize   Σ_j [ Σ_c cost_jc · x_jc + λ_j · (1 - Σ_c x_jc) ]       x_jc in {0, 1}, p < 0
    subject to Σ_c x_jc <= 1                                           for every job j
               Σ_j Σ_c use_jc[k, t] · x_jc <= free[k, t]               nodes of kind k, resource t
               Σ_j Σ_c (nodes of jc, if several) · x_jc <= nodes[k]

    cost_jc = (change_jc · G_jc)^p        change_jc = 1 if c is the current configuration

G_jc is the goodput of job j in configuration c, scaled so that the least of a job's row is the
number of slots of its smallest configuration (1 if a replica holds one slot). A *kind* of node is
one type of GPU and one set of resources; the third rule keeps distributed jobs apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from pipollux_policies.allocations.allocation import Allocation, is_first_choice
from pipollux_policies.allocations.change_cost import ChangeKind
from pipollux_policies.jobs.job_info import JobInfo, NodeInfo, ReplicaShape
from pipollux_policies.placement.cluster_state import ReplicaRequest
from pipollux_policies.placement.node_choice import Floats, Ints
from pipollux_policies.placement.packing import speedups
from pipollux_utils.c_stdout import silent_c_stdout


@dataclass(frozen=True)
class Constraint:
    """The total of a resource on all nodes of a kind."""

    kind: int
    resource: str | None
    """None: the number of nodes that carry a distributed job."""


Use: TypeAlias = Mapping[Constraint, int]

_PRESOLVE_COLUMNS = 5000
"""With fewer columns, presolving takes longer than it saves."""
_FEASIBLE = (0, 1)


@dataclass(frozen=True)
class NodeKind:
    """Nodes with equal types of GPU and resources."""

    names: frozenset[Any]
    node: NodeInfo
    domains: tuple[int, ...] = ()
    """The most nodes in a domain of each network level but the highest."""

    def at_levels(
        self, shape: ReplicaShape, counts: Ints, num_nodes: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Return replicas, nodes and the level of every configuration: a number of replicas has one
        for each level that costs it differently, from the lowest with room on empty nodes.
        """
        top = len(self.domains) + 1
        fns = [shape.speedup_at(level) for level in range(1, top + 1)]
        levels = [x for x in range(1, top) if fns[x] is not fns[x - 1]] + [top]
        rooms = np.array([*self.domains, np.iinfo(np.int64).max // 2**32]) * max(
            self.node.num_fitting(shape), 1
        )
        fits = (rooms[np.array(levels) - 1] >= counts[:, None]) | (num_nodes == 1)[:, None]
        # On one node all levels cost the same.
        fits[num_nodes == 1, :-1] = False
        rows, which = np.nonzero(fits)
        return counts[rows], num_nodes[rows], np.array(levels)[which]


@dataclass(frozen=True)
class Column:
    """One configuration of one job, and its scaled goodput."""

    request: ReplicaRequest
    num_nodes: int
    slots: int
    goodput: float
    use: Use
    kind: int | None
    """The index of its kind of nodes; None: the current, irregular configuration of the job."""
    scale: float = 1.0


def configurations(job: JobInfo, kinds: Sequence[NodeKind]) -> tuple[Column, ...]:
    """Return the regular configurations of a job with a goodput above 0. 1, 2, 4, ... replicas on
    one node of a kind; whole nodes; and the job's fewest replicas.
    """
    columns = []
    for number, kind in enumerate(kinds):
        for shape in job.all_shapes:
            usable = is_first_choice(job, shape, kind.node.gpu_type)
            per_node = kind.node.num_fitting(shape) if usable else 0
            counts = _replica_counts(job, shape, per_node, len(kind.names))
            if len(counts):
                columns += _columns(number, kind, shape, counts, -(-counts // per_node))
    return _scaled(columns)


def _replica_counts(job: JobInfo, shape: ReplicaShape, per_node: int, num_nodes: int) -> Ints:
    least, most = job.least_replicas, min(job.most_replicas(shape), per_node * num_nodes)
    if most < least:
        return np.zeros(0, dtype=np.int64)
    powers = 2 ** np.arange(per_node.bit_length())
    whole = per_node * np.arange(1, most // per_node + 1)
    counts: Ints = np.unique([*powers[powers <= per_node].tolist(), *whole.tolist(), least])
    return counts[(counts >= least) & (counts <= most)]


def _columns(
    number: int, kind: NodeKind, shape: ReplicaShape, counts: Ints, num_nodes: Ints
) -> list[Column]:
    counts, num_nodes, levels = kind.at_levels(shape, counts, num_nodes)
    goodputs = speedups(shape, num_nodes, counts, levels)
    columns = []
    for count, nodes, level, goodput in zip(
        *(values.tolist() for values in (counts, num_nodes, levels, goodputs)), strict=True
    ):
        request = ReplicaRequest((shape,), count, kind.names, nodes, max_level=level)
        use = {Constraint(number, name): amount * count for name, amount in shape.resources.items()}
        if nodes > 1:
            use[Constraint(number, None)] = nodes
        if goodput > 0:
            columns.append(Column(request, nodes, shape.slots * count, goodput, use, number))
    return columns


def _scaled(columns: Sequence[Column]) -> tuple[Column, ...]:
    if not columns:
        return ()
    factor = min(c.slots for c in columns) / min(c.goodput for c in columns)
    return tuple(replace(c, goodput=c.goodput * factor, scale=factor) for c in columns)


def current_column(
    columns: Sequence[Column], held: Allocation, kind_of: Mapping[Any, int]
) -> tuple[int | None, Column]:
    """Return the column of a job's allocation: a regular one with its index, or a new one.
    `columns` are its regular ones; `kind_of` has the kind of each usable node.
    """
    shape, num_nodes = held.shape, len(set(held))
    if shape is None:
        raise ValueError(f"allocation: {list(held)} has no shape; give it one")
    kinds = {kind_of[node] for node in held}
    for number, column in enumerate(columns):
        same = column.request.shapes[0] is shape and column.request.num_replicas == len(held)
        same &= held.level <= (column.request.max_level or held.level)
        if same and kinds == {column.kind} and column.num_nodes == num_nodes:
            return number, column
    use: Counter[Constraint] = Counter()
    for node in held:
        use.update({Constraint(kind_of[node], name): n for name, n in shape.resources.items()})
    if num_nodes > 1:
        use.update(Constraint(kind_of[node], None) for node in set(held))
    there = np.array([[num_nodes], [len(held)], [held.level]])
    speedup = float(speedups(shape, *there)[0])
    goodput = speedup * (columns[0].scale if columns else 1.0)
    request = ReplicaRequest((shape,), len(held), stay=held)
    slots = shape.slots * len(held)
    return None, Column(request, num_nodes, slots, goodput, use, None)


def cost(job: JobInfo, column: Column, *, change: ChangeKind, power: float) -> float:
    """Return (change · G)^p; infinite if that is 0 to a negative power. `change` is `NONE` also for
    a queued job, as all starts cost the same.
    """
    unchanged = change is ChangeKind.NONE
    factor = 1.0 if unchanged else job.change_factor(elastic=change is ChangeKind.RESIZE)
    value = factor * column.goodput
    return float(value**power) if value > 0 else np.inf


def solve(
    rows: Sequence[tuple[int, Floats, Sequence[Column]]],
    free: Use,
    *,
    relative_gap: float,
    time_limit: float,
) -> dict[int, int] | None:
    """Return the index of the column of every running job; None: no solution in time.

    `rows` has for every job its number, the cost of each column minus that of waiting (cost - λ;
    columns with 0 or more are ignored), and the columns; `free` the capacity of each constraint.
    The search may stop at a relative gap from the optimum; the time limit is in seconds.
    """
    chosen = [
        (job, number, values[number], column)
        for job, values, columns in rows
        for number, column in enumerate(columns)
        if values[number] < 0
    ]
    if not chosen:
        return {}
    from scipy.optimize import Bounds, LinearConstraint, milp  # imports slowly

    matrix, limits = _constraints(chosen, free)
    with silent_c_stdout():
        found = milp(
            np.array([value for _, _, value, _ in chosen]),
            integrality=np.ones(len(chosen)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, ub=limits),
            options={
                "time_limit": time_limit,
                "mip_rel_gap": relative_gap,
                "presolve": len(chosen) > _PRESOLVE_COLUMNS,
            },
        )
    if found.status not in _FEASIBLE or found.x is None:
        return None
    return {
        job: number
        for (job, number, _, _), share in zip(chosen, found.x, strict=True)
        if share > 0.5
    }


def _constraints(chosen: Sequence[tuple[int, int, float, Column]], free: Use) -> tuple[Any, Floats]:
    from scipy.sparse import csr_array  # imports slowly

    row_of: dict[Any, int] = {}
    entries = []
    for place, (job, _, _, column) in enumerate(chosen):
        entries.append((row_of.setdefault(job, len(row_of)), place, 1))
        for key, amount in column.use.items():
            if amount:
                entries.append((row_of.setdefault(key, len(row_of)), place, amount))
    rows, places, amounts = (np.array(part) for part in zip(*entries, strict=True))
    limits = np.array([free.get(key, 0) if isinstance(key, Constraint) else 1 for key in row_of])
    # Divide by the greatest common divisor, as bytes of memory and slots differ in scale.
    for row in (row for key, row in row_of.items() if isinstance(key, Constraint)):
        here = rows == row
        divisor = np.gcd.reduce(amounts[here])
        amounts[here] //= divisor
        limits[row] //= divisor
    shape = (len(row_of), len(chosen))
    return csr_array((amounts.astype(float), (rows, places)), shape=shape), limits.astype(float)
