"""NSGA-II over allocation states, on pymoo (Deb et al. 2002; Pollux, OSDI'21, §4.2.1).

Crossover exchanges the jobs behind a random point, as in the paper. Mutation draws random replica
counts, or, half of the time, removes a job and perhaps others in its way and places them again.
Part of the survivors use real nodes only, so that the search for a larger cluster cannot crowd out
states that are possible now. All randomness comes from the caller's generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2, binary_tournament
from pymoo.core.crossover import Crossover
from pymoo.core.duplicate import DuplicateElimination
from pymoo.core.mating import Mating
from pymoo.core.mutation import Mutation
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.core.repair import Repair
from pymoo.core.survival import Survival
from pymoo.operators.selection.tournament import TournamentSelection
from pymoo.operators.survival.rank_and_crowding import RankAndCrowding
from pymoo.termination.max_gen import MaximumGenerationTermination

from pipollux_policies.allocations.fitness import TOLERANCE
from pipollux_policies.placement.node_choice import Bools, Floats, Ints

from .problem import AllocationProblem
from .repair import repair
from .state_builder import StateBuilder, replica_steps

REAL_SHARE = 0.5
"""The share of survivors that is reserved for states on real nodes only."""
MATING_ROUNDS = 3
"""Retries for new states per generation; pymoo's 100 take seconds if there are too few."""


@dataclass(frozen=True)
class Evolution:
    """The result of one run."""

    states: Ints
    objectives: Floats
    """(P, 2): minus the fitness, and the cluster size, of each state."""
    best: Ints
    """(I, N): the best state found on real nodes."""
    num_generations: int


def evolve(
    problem: AllocationProblem,
    start: Ints,
    rng: np.random.Generator,
    *,
    population: int,
    generations: int,
    patience: int,
) -> Evolution:
    """Improve feasible states from generation to generation; the first uses real nodes only.

    `population` is the number of survivors of a generation. Stops after `generations`, or
    `patience` of them without a better state on real nodes or overall.
    """
    judge = _Judge(problem, start[0])
    mating = Mating(
        TournamentSelection(func_comp=binary_tournament),
        _Crossover(problem),
        _Mutation(problem),
        repair=_Repair(problem),
        eliminate_duplicates=_Distinct(),
        n_max_iterations=MATING_ROUNDS,
    )
    algorithm = NSGA2(
        pop_size=population,
        sampling=start.reshape(len(start), -1),
        mating=mating,
        survival=_RealNodesSurvive(problem.cluster.num_real),
        eliminate_duplicates=_Distinct(),
        output=None,
    )
    algorithm.setup(
        judge,
        termination=MaximumGenerationTermination(generations),
        seed=int(rng.integers(2**31)),
    )
    idle, seen = 0, judge.progress()
    while algorithm.has_next() and idle < patience:
        algorithm.next()
        idle, seen = (idle + 1, seen) if judge.progress() == seen else (0, judge.progress())
    survivors = algorithm.pop
    return Evolution(
        states=survivors.get("X").reshape(len(survivors), *problem.shape),
        objectives=survivors.get("F").astype(float),
        best=judge.best,
        num_generations=int(algorithm.n_iter) - 1,
    )


class _Judge(Problem):  # type: ignore[misc]  # pymoo is not typed
    """Evaluates states, and stores the best on real nodes."""

    def __init__(self, problem: AllocationProblem, first: Ints) -> None:
        super().__init__(n_var=int(np.prod(problem.shape)), n_obj=2, vtype=int)
        self._problem = problem
        self.best = first
        self._best_rank = self._ranks(first[None], problem.fitness(first[None]))[0]
        self._best_fitness = -np.inf

    def progress(self) -> tuple[float, ...]:
        return (*self._best_rank, self._best_fitness)

    def _ranks(self, states: Ints, fitness: Floats) -> list[tuple[float, float, float]]:
        """Order states: by fitness, then fewest changed jobs, then fewest replicas."""
        changed = self._problem.num_changed(states)
        replicas = states.sum(axis=(1, 2))
        return [(f, -c, -r) for f, c, r in zip(fitness, changed, replicas, strict=True)]

    def _evaluate(self, x: Ints, out: dict[str, Any], *_: Any, **__: Any) -> None:
        states = x.reshape(len(x), *self._problem.shape)
        fitness, sizes = self._problem.fitness(states), self._problem.cluster_sizes(states)
        real = np.flatnonzero(sizes <= self._problem.cluster.num_real)
        ranks = self._ranks(states[real], fitness[real])
        for index, rank in zip(real, ranks, strict=True):
            if is_better(rank, self._best_rank):
                self.best, self._best_rank = states[index].copy(), rank
        if fitness.max() > self._best_fitness * (1 + TOLERANCE):
            self._best_fitness = float(fitness.max())
        out["F"] = np.column_stack([-fitness, sizes])


def is_better(rank: tuple[float, ...], than: tuple[float, ...]) -> bool:
    """Compare two ranks whose first entry is a fitness, taken as equal within `TOLERANCE`."""
    margin = TOLERANCE * abs(than[0])
    if abs(rank[0] - than[0]) <= margin:
        return rank[1:] > than[1:]
    return rank[0] > than[0]


class _Distinct(DuplicateElimination):  # type: ignore[misc]  # pymoo is untyped
    """Drops duplicate states by hash: pymoo's default compares all pairs."""

    def _do(self, pop: Population, other: Population | None, is_duplicate: Any) -> Any:
        seen = set() if other is None else {row.tobytes() for row in other.get("X")}
        for index, row in enumerate(pop.get("X")):
            key = row.tobytes()
            is_duplicate[index] = key in seen
            if other is None:
                seen.add(key)
        return is_duplicate


class _Repair(Repair):  # type: ignore[misc]  # pymoo is untyped
    def __init__(self, problem: AllocationProblem) -> None:
        super().__init__()
        self._problem = problem

    def _do(self, problem: Problem, X: Ints, *, random_state: Any, **_: Any) -> Ints:  # noqa: ARG002  # pymoo's
        states = X.reshape(len(X), *self._problem.shape)
        return repair(self._problem, states, random_state).reshape(len(X), -1)


class _Crossover(Crossover):  # type: ignore[misc]  # pymoo is untyped
    """Exchange the jobs behind a random point, then choose both children's cluster sizes."""

    def __init__(self, problem: AllocationProblem) -> None:
        super().__init__(n_parents=2, n_offsprings=2)
        self._problem = problem

    def _do(self, problem: Problem, X: Ints, *_: Any, random_state: Any, **__: Any) -> Ints:  # noqa: ARG002  # pymoo's
        states = X.reshape(2, -1, *self._problem.shape)
        num_pairs = states.shape[1]
        num_nodes = self._problem.shape[1]
        points = random_state.integers(self._problem.cluster.num_jobs, size=(num_pairs, 1, 1))
        # A job is exchanged whole, with all its rows.
        first = self._problem.cluster.job_of[:, None] < points
        children = np.where(first, states, states[::-1])
        sizes = np.stack([self._problem.cluster_sizes(parent) for parent in states])
        sizes = random_state.integers(sizes.min(axis=0), sizes.max(axis=0) + 1, size=(2, num_pairs))
        inside = np.arange(num_nodes) < sizes[:, :, None, None]
        return np.where(inside, children, 0).reshape(2, num_pairs, -1)


class _Mutation(Mutation):  # type: ignore[misc]  # pymoo is untyped
    """Half of the states get random counts, as in the paper; in half, one to three jobs move."""

    def __init__(self, problem: AllocationProblem) -> None:
        super().__init__()
        self._problem = problem
        self._movable = problem.cluster.movable_jobs

    def _do(self, problem: Problem, X: Ints, *_: Any, random_state: Any, **__: Any) -> Ints:  # noqa: ARG002  # pymoo's
        states = X.reshape(len(X), *self._problem.shape)
        rng = random_state
        random = rng.random(len(states)) < 0.5
        result = states.copy()
        result[random] = self._draw(states[random], rng)
        if len(self._movable) and not random.all():
            # A crossover's child may be infeasible, and jobs can be placed in feasible states only.
            feasible = repair(self._problem, states[~random], rng)
            result[~random] = [self._replace_jobs(state, rng) for state in feasible]
        return result.reshape(len(X), -1)

    def _draw(self, states: Ints, rng: np.random.Generator) -> Ints:
        """Draw counts for random cells; a job's empty and used nodes are hit equally often."""
        real = self._problem.cluster.num_real
        used = np.count_nonzero(states, axis=2, keepdims=True)
        chance = 1.0 / np.maximum(np.where(states > 0, used, states.shape[2] - used), 1)
        hit = rng.random(states.shape) < chance
        # Skip template nodes half of the time: otherwise hardly any state fits the real ones.
        hit[rng.random(len(states)) < 0.5, :, real:] = False
        counts = rng.integers(0, self._problem.fits + 1, size=states.shape)
        drawn = np.where(hit, counts, states)
        if self._problem.cluster.num_jobs == states.shape[1]:
            return drawn
        return np.where(self._draw_rows(states, rng)[:, :, None], drawn, 0)

    def _draw_rows(self, states: Ints, rng: np.random.Generator) -> Bools:
        cluster = self._problem.cluster
        stays = rng.random((len(states), cluster.num_jobs)) > 1.0 / cluster.num_jobs
        score = rng.random(states.shape[:2]) + (states.any(axis=2) & stays[:, cluster.job_of])
        best = np.maximum.reduceat(score, cluster.first_rows, axis=1)
        rows: Bools = score == best[:, cluster.job_of]
        return rows

    def _replace_jobs(self, state: Ints, rng: np.random.Generator) -> Ints:
        problem, cluster = self._problem, self._problem.cluster
        limit = cluster.num_real if rng.random() < 0.7 else problem.shape[1]
        builder = StateBuilder(problem, state, limit)
        chosen = rng.permutation(self._movable)[: 1 + rng.integers(3)]
        before = [int(builder.held(job).sum()) for job in chosen]
        for job in chosen:
            builder.remove(job)
        for job, now in zip(chosen, before, strict=True):
            home = int(cluster.base_rows[job])
            if rng.random() < 0.15 and builder.accepts(home, cluster.base[home]):
                builder.give(home, cluster.base[home])
                continue
            row = self._draw_row(builder.rows[job], cluster.spans[job], rng)
            least, most = int(problem.min_replicas[row]), int(problem.max_replicas[row])
            steps = replica_steps(problem, row, now // 2)
            count = int(rng.choice(steps)) if steps and rng.random() < 0.5 else 0
            count = count or int(rng.integers(0, most + 1))
            cells = builder.place(row, count) if count >= least else None
            if cells is not None:
                builder.give(row, cells)
        return builder.state

    @staticmethod
    def _draw_row(now: int, span: range, rng: np.random.Generator) -> int:
        """Draw a row of a job: half of the time its current one."""
        return now if len(span) == 1 or rng.random() < 0.5 else int(rng.choice(span))


class _RealNodesSurvive(Survival):  # type: ignore[misc]  # pymoo is untyped
    """NSGA-II's survival, run separately for states on real nodes only and for the rest."""

    def __init__(self, num_real: int) -> None:
        super().__init__(filter_infeasible=False)
        self._num_real = num_real
        self._survival = RankAndCrowding()

    def _do(
        self, problem: Problem, pop: Population, *_: Any, n_survive: int, **options: Any
    ) -> Population:
        real = pop.get("F")[:, 1] <= self._num_real
        num_real, num_other = int(real.sum()), int((~real).sum())
        quota = max(round(REAL_SHARE * n_survive), n_survive - num_other)
        quota = min(quota, num_real)
        chosen = Population.create()
        for part, count in ((pop[real], quota), (pop[~real], n_survive - quota)):
            if len(part) and count:
                count = min(count, len(part))
                best = self._survival.do(problem, part, n_survive=count, **options)
                chosen = Population.merge(chosen, best)
        # The tournaments use the rank among all survivors.
        return self._survival.do(problem, chosen, n_survive=len(chosen), **options)
