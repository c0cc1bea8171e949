"""Exact solution of a small cluster: configurations and nodes in one mixed-integer program.

Symbols: job j, shape s, node n, R replicas on m nodes.

    x[j, s, R, m]  1 if job j gets R replicas of shape s on m nodes      x[j, stay], x[j, nothing]
                   two of them if it is resizable: with and without a survivor
                   one more per domain of a network level that its speedup distinguishes
    y[j, s, n]     replicas on a node, an integer         z[j, s, n]  1 if there are any
    d[j, n]        1 if job j is distributed and lies on node n

    max Σ gain · x            Σ x = 1 for every job
    Σ_n y = Σ R · x           Σ_n z = Σ m · x             z ≤ y ≤ fits · z
    Σ need · y + resources of staying jobs ≤ free         for every node and resource
    d ≥ z + Σ_{m>1} x − 1     Σ_j d + staying distributed jobs ≤ 1 on every node
    Σ x with a survivor ≤ Σ z on the nodes where the job has replicas
    Σ z outside of a domain ≤ N · (1 − Σ x in the domain)

It is exact where free slots are scattered, and the knapsack is not. It is slow: use it only for a
handful of jobs and nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipollux_policies.jobs.job_info import ReplicaShape
from pipollux_policies.placement.node_choice import Floats, NodeCapacity
from pipollux_utils.c_stdout import silent_c_stdout

from .assignment import Placed
from .configurations import NOTHING, Instance, JobConfigurations
from .objective import Held, ObjectiveValue
from .relaxation import SCALE

_NODE_LIMIT = 5000  # search tree; a time limit would make results depend on the machine


class _Choice(NamedTuple):
    job: int
    shape: int
    """−1: the empty allocation; −2: to stay."""
    replicas: int
    num_nodes: int
    gain: float
    elastic: bool = False
    domain: tuple[int, int] | None = None
    """Network level and domain that contain all its nodes; None: any nodes."""


_NO_SHAPE, _STAY = -1, -2


class _Program:
    def __init__(self) -> None:
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.value: list[float] = []
        self._rows: list[dict[int, float]] = []
        self._bounds: list[tuple[float, float]] = []

    def column(self, upper: float, value: float = 0.0, *, integral: bool = True) -> int:
        self.upper.append(upper)
        self.value.append(value)
        self.integral.append(int(integral))
        return len(self.upper) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        self._rows.append(terms)
        self._bounds.append((low, high))

    def solve(self) -> Floats | None:
        from scipy.optimize import Bounds, LinearConstraint, milp  # imports slowly
        from scipy.sparse import csr_array

        entries = [(r, c, v) for r, terms in enumerate(self._rows) for c, v in terms.items()]
        rows, columns, values = (np.array(part) for part in zip(*entries, strict=True))
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self.upper)))
        low, high = np.array(self._bounds).T
        value = np.array(self.value)
        with silent_c_stdout():
            answer = milp(
                -value * (SCALE / (np.abs(value).max() or 1.0)),
                integrality=np.array(self.integral),
                bounds=Bounds(0, np.array(self.upper)),
                constraints=LinearConstraint(matrix, low, high),
                options={"mip_rel_gap": 0.0, "node_limit": _NODE_LIMIT},
            )
        return None if answer.x is None else np.asarray(answer.x)


def solve_whole(instance: Instance, worth: ObjectiveValue, gains: Floats) -> list[Placed] | None:
    """Return the best allocation of every job of a small cluster; None: no solution in time."""
    program = _Program()
    nodes = instance.nodes
    used: list[list[dict[int, float]]] = [[{} for _ in nodes.kinds] for _ in nodes.names]
    spread: list[dict[int, float]] = [{} for _ in nodes.names]
    parts = [
        _add_job(program, instance, job, list(_choices(instance, worth, job, own)), used, spread)
        for job, own in enumerate(instance.table.split(gains))
    ]
    for node, kinds in enumerate(used):
        for kind, terms in enumerate(kinds):
            if terms:
                program.row(terms, -np.inf, float(nodes.free[node, kind]))
        if spread[node]:
            program.row(spread[node], -np.inf, 1.0)
    solution = program.solve()
    if solution is None:
        return None
    return [_read(instance, job, part, solution) for job, part in enumerate(parts)]


class _Part(NamedTuple):
    choices: dict[int, _Choice]
    cells: dict[tuple[int, int], int]


def _choices(
    instance: Instance, worth: ObjectiveValue, job: int, gains: Floats
) -> Iterator[_Choice]:
    configs = instance.jobs[job]
    yield _Choice(job, _NO_SHAPE, 0, 0, float(gains[NOTHING]))
    if configs.stay is not None:
        stay = configs.stay
        yield _Choice(
            job, _STAY, int(configs.replicas[stay]), len(configs.base), float(gains[stay])
        )
    for number, shape in enumerate(configs.shapes):
        reach = instance.nodes.reach(shape)
        most = min(configs.job.most_replicas(shape), int(reach[-1]))
        for replicas in range(configs.job.least_replicas, most + 1):
            fewest = int(np.searchsorted(reach, replicas)) + 1
            possible = int(np.count_nonzero(np.diff(reach, prepend=0)))
            for num_nodes in range(fewest, min(replicas, possible) + 1):
                for speedup, domain in _speedups(instance, shape, num_nodes, replicas):
                    held = Held(number, replicas)
                    gain = worth.moved(job, speedup, held)
                    yield _Choice(job, number, replicas, num_nodes, gain, domain=domain)
                    if number == configs.elastic_shape:
                        gain = worth.moved(job, speedup, held, elastic=True)
                        yield _Choice(
                            job, number, replicas, num_nodes, gain, elastic=True, domain=domain
                        )


def _speedups(
    instance: Instance, shape: ReplicaShape, num_nodes: int, replicas: int
) -> Iterator[tuple[float, tuple[int, int] | None]]:
    """Return the speedup on any nodes, and in each domain that makes a difference."""
    topology = instance.nodes.topology
    anywhere = shape.speedup_at(topology.num_levels if num_nodes > 1 else 1)
    yield float(anywhere(num_nodes, replicas)), None
    for level in range(1, topology.num_levels if num_nodes > 1 else 1):
        inside = shape.speedup_at(level)
        if inside is anywhere:
            continue
        sizes = np.bincount(topology.domains[level - 1])
        for domain in np.flatnonzero(sizes >= num_nodes).tolist():
            yield float(inside(num_nodes, replicas)), (level, domain)


def _add_job(
    program: _Program,
    instance: Instance,
    job: int,
    choices: Sequence[_Choice],
    used: list[list[dict[int, float]]],
    spread: list[dict[int, float]],
) -> _Part:
    configs = instance.jobs[job]
    columns = {program.column(1.0, choice.gain): choice for choice in choices}
    program.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
    _add_stay(instance, configs, columns, used, spread)
    cells: dict[tuple[int, int], int] = {}
    capacity = NodeCapacity(instance.nodes.free)
    for number, shape in enumerate(configs.shapes):
        mine = {column: c for column, c in columns.items() if c.shape == number}
        need, allowed = instance.nodes.wanted(shape)
        fits = capacity.counts(need, allowed)
        counts = {column: -float(choice.replicas) for column, choice in mine.items()}
        places = {column: -float(choice.num_nodes) for column, choice in mine.items()}
        several = [column for column, choice in mine.items() if choice.num_nodes > 1]
        survive = {column: -1.0 for column, choice in mine.items() if choice.elastic}
        homes = {node for node, _ in configs.survivors} if survive else set()
        inside: dict[tuple[int, int], list[int]] = {}
        for column, choice in mine.items():
            if choice.domain is not None:
                inside.setdefault(choice.domain, []).append(column)
        outside: dict[tuple[int, int], dict[int, float]] = {key: {} for key in inside}
        for node in np.flatnonzero(fits).tolist():
            y = program.column(float(fits[node]))
            z = program.column(1.0)
            cells[number, node] = y
            counts[y] = places[z] = 1.0
            if node in homes:
                survive[z] = 1.0
            for (level, domain), terms in outside.items():
                if instance.nodes.topology.domains[level - 1, node] != domain:
                    terms[z] = 1.0
            program.row({y: 1.0, z: -1.0}, 0.0, np.inf)
            program.row({y: 1.0, z: -float(fits[node])}, -np.inf, 0.0)
            for kind, amount in enumerate(need.tolist()):
                if amount:
                    used[node][kind][y] = float(amount)
            if several:
                d = program.column(1.0, integral=False)
                program.row({d: 1.0, z: -1.0, **dict.fromkeys(several, -1.0)}, -1.0, np.inf)
                spread[node][d] = 1.0
        if homes:
            program.row(survive, 0.0, np.inf)
        for key, terms in outside.items():
            most = float(len(terms))
            program.row({**terms, **dict.fromkeys(inside[key], most)}, -np.inf, most)
        if mine:
            program.row(counts, 0.0, 0.0)
            program.row(places, 0.0, 0.0)
    return _Part(columns, cells)


def _add_stay(
    instance: Instance,
    configs: JobConfigurations,
    columns: dict[int, _Choice],
    used: list[list[dict[int, float]]],
    spread: list[dict[int, float]],
) -> None:
    for column, choice in columns.items():
        if choice.shape != _STAY:
            continue
        need = instance.nodes.need(configs.shapes[configs.shape[-1]])
        for node, count in configs.base:
            for kind, amount in enumerate(need.tolist()):
                if amount:
                    used[node][kind][column] = float(count * amount)
            if len(configs.base) > 1:
                spread[node][column] = 1.0


def _read(instance: Instance, job: int, part: _Part, solution: Floats) -> Placed:
    configs = instance.jobs[job]
    choice = next(c for column, c in part.choices.items() if solution[column] > 0.5)
    if choice.shape == _NO_SHAPE:
        return Placed(0, (), choice.gain)
    if choice.shape == _STAY:
        return Placed(int(configs.shape[-1]), configs.base, choice.gain)
    counts = {
        node: round(float(solution[y]))
        for (shape, node), y in part.cells.items()
        if shape == choice.shape
    }
    placed = tuple(sorted((node, count) for node, count in counts.items() if count))
    return Placed(choice.shape, placed, choice.gain)
