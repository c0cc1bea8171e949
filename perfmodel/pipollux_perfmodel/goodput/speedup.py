"""Speedup of a job: its best goodput on an allocation over that on one replica.

Results are cached by the numbers of nodes and replicas that the model distinguishes, as a scheduler
requests the same few thousands of times. `speedups_of` computes many jobs together, which is many
times as fast. More replicas may be slower, if the batch size has reached its limit or nodes are
slow. The monotone speedup is that of the best number of replicas up to the given one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.gpipe import Numbers

from .config_search import ConfigSearch, PricedCut, best_goodputs
from .corrections import StepCorrections
from .goodput import AtomicBszRange, GoodputFunction

_BASE_SEARCH = 256  # numbers of replicas tried for one within bounds


class Configuration(NamedTuple):
    """The configuration of a job on an allocation, and its goodput."""

    num_stages: int
    num_replicas: int
    num_microbatches: int
    atomic_bsz: int
    """Samples per replica in one forward and backward; 0 if no batch size is within bounds."""
    accum_steps: int
    goodput: float
    """Samples (in units of the initial batch size) per second; 0.0 if none is within bounds."""
    speedup: float

    @property
    def batch_size(self) -> int:
        """R · atomic_bsz · (accum_steps + 1)."""
        return self.num_replicas * self.atomic_bsz * (self.accum_steps + 1)

    @property
    def micro_bsz(self) -> float:
        """Samples per micro-batch, atomic_bsz / M."""
        return self.atomic_bsz / self.num_microbatches


class SpeedupFunction:
    """Speedup as a function of (num_nodes, num_replicas), scalars or arrays.

    Relative to one replica. If no single replica can satisfy the bounds, relative to the minimum
    number r of replicas that can, which have speedup r; if there is none, speedup is 0 everywhere.

    Args:
        goodput_fn: the job's goodput; further arguments as of its `optimize`.
        mem_size: initial size of the cache, in replicas; it grows on demand.
        monotone: whether replicas that reduce goodput may stay idle, so that more are never worse.
        base_goodput: goodput with speedup 1, as a common base of several configurations of a job
        (numbers of stages, types of GPU), finite and above 0; None: that of one replica, as above.
        corrections: corrections of the model by measured steps.

    Example:
        >>> goodput_fn = GoodputFunction((0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5), (1.0, 8.0), 32)
        >>> speedup_fn = SpeedupFunction(goodput_fn, max_batch_size=256)
        >>> speedup_fn(0, 0), speedup_fn(1, 1)
        (0.0, 1.0)
    """

    def __init__(
        self,
        goodput_fn: GoodputFunction,
        max_batch_size: float | None = None,
        atomic_bsz_range: AtomicBszRange | None = None,
        accumulation: bool = False,
        mem_size: int = 32,
        num_microbatches: int | Sequence[int] = 1,
        *,
        plans: Sequence[PricedCut] = (),
        memory_limit: float | None = None,
        monotone: bool = False,
        base_goodput: float | None = None,
        corrections: StepCorrections | None = None,
    ) -> None:
        if base_goodput is not None and not (math.isfinite(base_goodput) and base_goodput > 0):
            raise ValueError(
                f"base_goodput is {base_goodput}; give finite samples per second > 0, or None"
            )
        self._goodput_fn = goodput_fn
        self._bounds: dict[str, Any] = {
            "max_batch_size": max_batch_size,
            "atomic_bsz_range": atomic_bsz_range,
            "accumulation": accumulation,
            "num_microbatches": num_microbatches,
            "plans": plans,
            "memory_limit": memory_limit,
        }
        self._monotone = monotone
        self._most_nodes = _count_distinguished(goodput_fn, plans)
        # Rows: nodes, columns: replicas. NaN: not computed yet.
        self._known = np.full((1, max(mem_size, 1)), np.nan)
        self._known[0, 0] = 0.0
        self._base_goodput = base_goodput
        self._corrections = corrections
        self._level, all_params = 1, [goodput_fn.perf_params, *(x.perf_params for x in plans)]
        self._num_levels = max(len(params.alpha_levels) + 1 for params in all_params)
        self._at_levels: dict[int, SpeedupFunction] = {}

    def __call__(self, num_nodes: Numbers, num_replicas: Numbers) -> Numbers:
        """Return the speedup, a float for scalars, else an array of the broadcast shape. Raises
        ValueError unless 1 <= num_nodes <= num_replicas, or both are 0.
        """
        speedup = self._answer(_cells(num_nodes, num_replicas, self._most_nodes))
        return speedup.item() if speedup.ndim == 0 else speedup

    def at_level(self, level: int) -> SpeedupFunction:
        """Return the speedup of allocations whose nodes meet at a network level, with the same
        base. It is this function for level 1, and if the model does not distinguish levels.
        """
        level = min(level, self._num_levels)
        if level <= 1:
            return self
        found = self._at_levels.get(level)
        if found is None:
            found = SpeedupFunction(
                self._goodput_fn.with_params(self._goodput_fn.perf_params.at_level(level)),
                **{**self._bounds, "plans": [x.at_level(level) for x in self._bounds["plans"]]},
                monotone=self._monotone,
                base_goodput=self._base_goodput or None,
                corrections=self._corrections,
            )
            found._level = level
            self._at_levels[level] = found
        return found

    @property
    def num_levels(self) -> int:
        """Number of network levels that the model distinguishes, at least 1."""
        return self._num_levels

    @property
    def goodput_fn(self) -> GoodputFunction:
        """The job's goodput, with the step times of the plan if there is only one."""
        if len(self._bounds["plans"]) == 1:
            return self._goodput_fn.with_params(self._bounds["plans"][0].perf_params)
        return self._goodput_fn

    @property
    def base_goodput(self) -> float:
        """Goodput with speedup 1; 0.0: no batch size is within bounds, all speedups are 0."""
        if self._base_goodput is None:
            self._base_goodput = self._find_base(float(self._goodput(1, 1)))
        return self._base_goodput

    def configuration(self, num_nodes: int, num_replicas: int) -> Configuration:
        """Return the job's configuration on an allocation; if monotone, possibly with fewer
        replicas. Raises ValueError unless 1 <= num_nodes <= num_replicas.
        """
        speedup = self(num_nodes, num_replicas)
        if self._monotone:
            num_replicas = self._fewest_as_good(num_nodes, num_replicas, speedup)
            num_nodes = min(num_nodes, num_replicas)
        best = self._goodput_fn.optimize(num_nodes, num_replicas, **self._bounds)
        found = best.goodput > 0
        return Configuration(
            num_stages=best.num_stages,
            num_replicas=num_replicas,
            num_microbatches=best.num_microbatches,
            atomic_bsz=best.atomic_bsz if found else 0,
            accum_steps=best.accum_steps,
            goodput=float(self._corrected(best.goodput, num_nodes, num_replicas)),
            speedup=speedup,
        )

    def _fewest_as_good(self, num_nodes: int, num_replicas: int, speedup: float) -> int:
        # If the model does not distinguish more nodes, idle replicas may free some.
        nodes = min(num_nodes, self._most_nodes)
        replicas = np.arange(nodes, num_replicas + 1)
        row = np.full_like(replicas, nodes)
        as_good = np.flatnonzero(self._look_up(row, replicas) >= speedup)
        return int(replicas[as_good[0]]) if as_good.size else num_replicas

    def _answer(self, cells: _Cells) -> NDArray[np.float64]:
        if self._monotone:
            known = self._known_up_to(cells.num_rows, cells.num_columns)
            return np.fmax.accumulate(known, axis=1)[cells.rows, cells.replicas]
        return self._look_up(cells.rows, cells.replicas)

    def _known_up_to(self, num_rows: int, num_columns: int) -> NDArray[np.float64]:
        rows, replicas = np.mgrid[:num_rows, :num_columns]
        possible = (rows <= replicas) & ((rows > 0) == (replicas > 0))
        self._look_up(rows[possible], replicas[possible])
        return self._known

    def _look_up(self, rows: NDArray[Any], replicas: NDArray[Any]) -> NDArray[np.float64]:
        known = self._grown(int(rows.max(initial=0)) + 1, int(replicas.max(initial=0)) + 1)
        speedup: NDArray[np.float64] = np.asarray(known[rows, replicas])
        missing = np.isnan(speedup)
        if missing.any():
            self._learn(known, rows[missing], replicas[missing])
            speedup = np.asarray(known[rows, replicas])
        return speedup

    def _find_base(self, goodput: float) -> float:
        """Return the goodput with speedup 1, given one replica's; 0.0: there is none."""
        if goodput > 0:
            return goodput
        _, max_atomic_bsz = self._bounds["atomic_bsz_range"] or (None, None)
        init_batch_size = self._goodput_fn.init_batch_size
        fewest = 1
        if max_atomic_bsz and not self._bounds["accumulation"]:
            fewest = math.ceil(init_batch_size / max_atomic_bsz)
        replicas = np.arange(fewest, fewest + _BASE_SEARCH)
        many = self._goodput(np.ones_like(replicas), replicas)
        feasible = np.flatnonzero(many > 0)
        if not feasible.size:
            return 0.0
        return float(many[feasible[0]] / replicas[feasible[0]])

    def _goodput(self, num_nodes: Numbers, num_replicas: Numbers) -> Any:
        found = self._goodput_fn.optimize(num_nodes, num_replicas, **self._bounds)[0]
        return self._corrected(found, num_nodes, num_replicas)

    def _corrected(self, goodput: Any, num_nodes: Numbers, num_replicas: Numbers) -> Any:
        if self._corrections is None:
            return goodput
        return goodput * self._corrections.factors(num_nodes, num_replicas, self._level)

    def _grown(self, num_rows: int, num_columns: int) -> NDArray[np.float64]:
        known = self._known
        rows, columns = known.shape
        if num_rows > rows or num_columns > columns:
            larger = np.full(
                (
                    rows if num_rows <= rows else max(num_rows, 2 * rows),
                    columns if num_columns <= columns else max(num_columns, 2 * columns),
                ),
                np.nan,
            )
            larger[:rows, :columns] = known
            self._known = known = larger
        return known

    def _learn(
        self, known: NDArray[np.float64], rows: NDArray[np.int64], replicas: NDArray[np.int64]
    ) -> None:
        codes = np.unique(rows * known.shape[1] + replicas)
        rows, replicas = np.divmod(codes, known.shape[1])
        if self.base_goodput > 0:
            known[rows, replicas] = self._goodput(rows, replicas) / self.base_goodput
        else:
            known[rows, replicas] = 0.0

    def _lesson(self, cells: _Cells, missing: NDArray[np.bool_]) -> _Lesson | None:
        """Return the search for missing entries; None: this function computes them itself."""
        if type(self._goodput_fn).optimize is not GoodputFunction.optimize:
            return None
        if self._base_goodput == 0:
            return None
        rows, replicas = cells.rows, cells.replicas
        if missing.ndim != 1 or not missing.all():
            rows, replicas = rows[missing], replicas[missing]
        if self._base_goodput is None:
            rows, replicas = np.append(rows, 1), np.append(replicas, 1)
        return _Lesson(
            self, rows, replicas, self._goodput_fn.search(rows, replicas, **self._bounds)
        )

    def _take_in(self, lesson: _Lesson, goodput: NDArray[np.float64]) -> None:
        goodput = self._corrected(goodput, lesson.rows, lesson.replicas)
        if self._base_goodput is None:
            self._base_goodput = self._find_base(float(goodput[-1]))
        base = self._base_goodput
        known = self._grown(2, 2)  # contains the requested allocations and the base
        known[lesson.rows, lesson.replicas] = goodput / base if base > 0 else 0.0


class _Cells(NamedTuple):
    rows: NDArray[np.int64]
    replicas: NDArray[np.int64]
    num_rows: int
    num_columns: int


def _cells(num_nodes: Numbers, num_replicas: Numbers, most_nodes: int) -> _Cells:
    nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
    if np.any((nodes < 0) | (nodes > replicas) | ((nodes == 0) != (replicas == 0))):
        raise ValueError(
            f"num_nodes is {num_nodes}, num_replicas {num_replicas}; "
            "give 1 <= num_nodes <= num_replicas, or 0 and 0"
        )
    rows = np.minimum(nodes, most_nodes)
    return _Cells(rows, replicas, int(rows.max(initial=0)) + 1, int(replicas.max(initial=0)) + 1)


class _Lesson(NamedTuple):
    speedup_fn: SpeedupFunction
    rows: NDArray[np.int64]
    replicas: NDArray[np.int64]
    search: ConfigSearch


def speedups_of(
    asked: Iterable[tuple[SpeedupFunction, Numbers, Numbers]],
) -> list[NDArray[np.float64]]:
    """Return the speedups of many jobs, and compute the missing ones together.

    The results equal those of each function. Passing the same arrays for jobs with the same
    allocations is fastest.

    Args:
        asked: functions, each with numbers of nodes and of replicas: integers, or arrays that
            broadcast.

    Raises:
        ValueError: as of each function.

    Example:
        >>> goodput_fn = GoodputFunction((0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5), (1.0, 8.0), 32)
        >>> functions = [SpeedupFunction(goodput_fn, size) for size in (64, 256)]
        >>> [len(found) for found in speedups_of((fn, 1, np.arange(1, 5)) for fn in functions)]
        [4, 4]
    """
    asked = list(asked)  # keeps the arrays alive, so that their ids differ
    known: dict[tuple[int, int, int], _Cells] = {}
    places: list[tuple[SpeedupFunction, _Cells]] = []
    for speedup_fn, num_nodes, num_replicas in asked:
        key = id(num_nodes), id(num_replicas), speedup_fn._most_nodes
        cells = known.get(key)
        if cells is None:
            cells = known[key] = _cells(num_nodes, num_replicas, speedup_fn._most_nodes)
        places.append((speedup_fn, cells))
    found = [
        fn._grown(cells.num_rows, cells.num_columns)[cells.rows, cells.replicas]
        for fn, cells in places
    ]
    unknown = [np.isnan(speedup) for speedup in found]
    missing = [cells.any() for cells in unknown]
    lessons = [
        lesson
        for (fn, cells), those, some in zip(places, unknown, missing, strict=True)
        if some and (lesson := fn._lesson(cells, those)) is not None
    ]
    goodputs = best_goodputs([lesson.search for lesson in lessons])
    for lesson, goodput in zip(lessons, goodputs, strict=True):
        lesson.speedup_fn._take_in(lesson, goodput)
    for number, ((fn, cells), some) in enumerate(zip(places, missing, strict=True)):
        if some:
            found[number] = fn._known[cells.rows, cells.replicas]
            some = np.isnan(found[number]).any()
        if some or fn._monotone:
            found[number] = fn._answer(cells)
    return [np.asarray(speedup) for speedup in found]


def _count_distinguished(goodput_fn: GoodputFunction, plans: Sequence[PricedCut]) -> int:
    all_params = [plan.perf_params for plan in plans] or [goodput_fn.perf_params]
    if any(params.contention for params in all_params):
        return sys.maxsize
    return 3 if any(params.two_node_penalty for params in all_params) else 2
