"""Speedup of a job: its best goodput on an allocation over that on one replica.

The scheduler asks for the same few allocations thousands of times, so answers are kept. The model
tells allocations apart by the number of replicas and whether they lie on one node or on several
(`steptime`), so that is what they are kept by.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .goodput import AtomicBszRange, GoodputFunction
from .steptime import Numbers

_BASE_SEARCH = 256  # numbers of replicas tried for one that bounds allow


class Configuration(NamedTuple):
    """How a job would run on an allocation, and what that is worth."""

    num_stages: int
    """K."""
    num_replicas: int
    """R."""
    num_microbatches: int
    """M."""
    atomic_bsz: int
    """Samples per replica in one forward and backward; 0 when no batch size is within bounds."""
    accum_steps: int
    """Accumulation steps before each optimizer step."""
    goodput: float
    """Samples (of the initial batch size's worth) per second; 0.0 when none is within bounds."""
    speedup: float
    """Goodput over that of one replica."""

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

    Relative to one replica. A job whose bounds no single replica can satisfy is measured by the
    fewest replicas r that can, which then have speedup r; when none can, speedup is 0 everywhere.

    Args:
        goodput_fn: the job's goodput.
        max_batch_size: largest batch size; None: the initial one.
        atomic_bsz_range: least and largest atomic batch size; None: unbounded.
        accumulation: whether accumulation steps are allowed.
        mem_size: numbers of replicas to keep answers for at first; it grows when asked for more.
        num_microbatches: M.

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
        num_microbatches: int = 1,
    ) -> None:
        self._goodput_fn = goodput_fn
        self._max_batch_size = max_batch_size
        self._atomic_bsz_range = atomic_bsz_range
        self._accumulation = accumulation
        self._num_microbatches = num_microbatches
        # Row 0: one node, row 1: several; column: replicas. Not a number: not asked for yet.
        self._known = np.full((2, max(mem_size, 1)), np.nan)
        self._known[:, 0] = 0.0
        self._base_goodput = self._find_base()

    def __call__(self, num_nodes: Numbers, num_replicas: Numbers) -> Numbers:
        """Return the speedup, a float for scalars, else an array of the broadcast shape.

        Raises:
            ValueError: unless 1 <= num_nodes <= num_replicas, or both are 0.
        """
        nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
        if np.any((nodes < 0) | (nodes > replicas) | ((nodes == 0) != (replicas == 0))):
            raise ValueError(
                f"num_nodes is {num_nodes}, num_replicas {num_replicas}; "
                "give 1 <= num_nodes <= num_replicas, or 0 and 0"
            )
        rows = (nodes > 1).astype(np.intp)
        known = self._grown(int(replicas.max(initial=0)))
        speedup = known[rows, replicas]
        missing = np.isnan(speedup)
        if missing.any():
            self._learn(known, rows[missing], replicas[missing])
            speedup = known[rows, replicas]
        return speedup.item() if speedup.ndim == 0 else speedup

    def configuration(self, num_nodes: int, num_replicas: int) -> Configuration:
        """Return how the job would run on an allocation.

        Raises:
            ValueError: unless 1 <= num_nodes <= num_replicas.
        """
        goodput, atomic_bsz, accum_steps = self._optimize(num_nodes, num_replicas)
        return Configuration(
            num_stages=self._goodput_fn.perf_params.num_stages,
            num_replicas=num_replicas,
            num_microbatches=self._num_microbatches,
            atomic_bsz=atomic_bsz,
            accum_steps=accum_steps,
            goodput=goodput,
            speedup=self(num_nodes, num_replicas),
        )

    def _optimize(
        self, num_nodes: Numbers, num_replicas: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        return self._goodput_fn.optimize(
            num_nodes,
            num_replicas,
            max_batch_size=self._max_batch_size,
            atomic_bsz_range=self._atomic_bsz_range,
            accumulation=self._accumulation,
            num_microbatches=self._num_microbatches,
        )

    def _find_base(self) -> float:
        """Return the goodput that counts as speedup 1; 0.0 when nothing is within bounds."""
        goodput = float(self._optimize(1, 1)[0])
        if goodput > 0:
            return goodput
        _, max_atomic_bsz = self._atomic_bsz_range or (None, None)
        init_batch_size = self._goodput_fn.init_batch_size
        fewest = 1
        if max_atomic_bsz and not self._accumulation:
            fewest = math.ceil(init_batch_size / max_atomic_bsz)
        replicas = np.arange(fewest, fewest + _BASE_SEARCH)
        many = self._optimize(np.ones_like(replicas), replicas)[0]
        feasible = np.flatnonzero(many > 0)
        if not feasible.size:
            return 0.0
        return float(many[feasible[0]] / replicas[feasible[0]])

    def _grown(self, num_replicas: int) -> NDArray[np.float64]:
        """Return the table of answers, with room for so many replicas."""
        known = self._known
        if num_replicas >= known.shape[1]:
            size = max(num_replicas + 1, 2 * known.shape[1])
            larger = np.full((2, size), np.nan)
            larger[:, : known.shape[1]] = known
            self._known = known = larger
        return known

    def _learn(
        self, known: NDArray[np.float64], rows: NDArray[np.intp], replicas: NDArray[np.int64]
    ) -> None:
        """Fill in the answers of these rows and columns of the table."""
        codes = np.unique(rows * known.shape[1] + replicas)
        rows, replicas = np.divmod(codes, known.shape[1])
        if self._base_goodput > 0:
            goodput = self._optimize(rows + 1, replicas)[0]
            known[rows, replicas] = goodput / self._base_goodput
        else:
            known[rows, replicas] = 0.0
