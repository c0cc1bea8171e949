"""Applications from Pollux's public traces (OSDI'21 artifact, Apache-2.0), read unchanged.

A folder per application contains `placements.csv` (step and synchronization times on up to 4 nodes
of 4 GPUs, by placement and local batch size), `scalability.csv` (the same on up to 16 nodes), and
`validation-B.csv` (progress and gradient statistics at the end of every epoch at batch size B).
Between measurements, times are interpolated linearly as in the artifact: over the batch size if the
placement was measured, else over nodes, replicas and batch size.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel import GradParams, PerfParams, fit_perf_params
from pipollux_perfmodel.errors import InputError

from .base import JobModel, RunningJob, TrueStepTimes
from .trace_model import Fit, FixedBatchModel, TraceJobModel, split_batch

if TYPE_CHECKING:
    from scipy.interpolate import LinearNDInterpolator

_MOST_NODES = 16  # of scalability.csv
_MOST_REPLICAS = 64
SLOTS_PER_NODE = 4
_REQUESTED = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
_LEAST_SCALING, _MOST_SCALING = 0.5, 0.8


@dataclass(frozen=True)
class Constants:
    """Constants of an application, from the artifact."""

    max_epochs: int
    max_local_bsz: int | None = None
    """Maximum local batch size; None: the largest measured one."""
    fixed_batch_size: int | None = None
    """Batch size of every job, with one replica; None: jobs adapt."""


CONSTANTS: Mapping[str, Constants] = {
    "bert": Constants(2),
    "cifar10": Constants(100),
    "deepspeech2": Constants(80),
    "imagenet": Constants(90),
    "ncf": Constants(10, fixed_batch_size=32768),
    "yolov3": Constants(50, max_local_bsz=8),
}


class TraceError(InputError):
    """A missing or unreadable trace; with file, row and remedy."""


class _Validation:
    def __init__(self, path: Path, num_epochs: int) -> None:
        self.path = path
        columns = _read_columns(path, ("progress", "grad_sqr", "grad_var"))
        rows = len(columns["progress"])
        if rows < num_epochs:
            raise TraceError(
                f"{path}: holds {rows} epochs, jobs train for {num_epochs}; give a whole trace"
            )
        self.progress = columns["progress"]
        self.grad_sqr = columns["grad_sqr"]
        self.grad_var = columns["grad_var"]


class TraceApplication:
    """An application whose truth is one folder of the public traces, which has its name.

    `constants` are by default those of `CONSTANTS`; `fit` is for its jobs' step times. Raises
    TraceError if a file is missing or invalid.
    """

    def __init__(
        self, folder: Path, constants: Constants | None = None, fit: Fit = fit_perf_params
    ) -> None:
        self.name = folder.name
        if constants is None and self.name not in CONSTANTS:
            raise TraceError(
                f"{folder}: {self.name!r} is no known application; "
                f"choose from {', '.join(CONSTANTS)}"
            )
        self.constants = constants or CONSTANTS[self.name]
        self.max_epochs = self.constants.max_epochs
        validations = {
            _batch_size(path): _Validation(path, self.max_epochs)
            for path in sorted(folder.glob("validation-*.csv"))
        }
        if not validations:
            raise TraceError(f"{folder}: holds no validation-B.csv; give a folder of the traces")
        self._batch_sizes = np.array(sorted(validations))
        self._validations = [validations[size] for size in sorted(validations)]
        self._placements = _read_placements(folder / "placements.csv")
        self._scalability = folder / "scalability.csv"
        self._times: dict[tuple[tuple[int, ...], int], TrueStepTimes] = {}
        sizes = np.concatenate([rows[:, 0] for rows in self._placements.values()])
        self.init_batch_size = int(self._batch_sizes[0])
        self.max_batch_size = int(self._batch_sizes[-1])
        self.min_local_bsz = int(sizes.min())
        self.max_local_bsz = self.constants.max_local_bsz or int(sizes.max())
        self.fit = fit
        self.fits: dict[frozenset[tuple[int, int, int, int]], PerfParams] = {}

    def step_times(self, running: RunningJob) -> TrueStepTimes:
        """Return measured or interpolated step times; TraceError if no trace covers them."""
        # Placements were measured once for all permutations: the sorted one represents them.
        placement = running.placement
        key = min(placement[i:] + placement[:i] for i in range(len(placement)))
        known = self._times.get((key, running.atomic_bsz))
        if known is None:
            known = self._interpolate(key, running.atomic_bsz)
            self._times[key, running.atomic_bsz] = known
        return known

    def gradients(self, batch_size: int, epoch: int) -> GradParams:
        """Return the statistics of an epoch, interpolated linearly over the batch size. Raises
        TraceError for a batch size outside the validated range.
        """
        if not self.init_batch_size <= batch_size <= self.max_batch_size:
            raise TraceError(
                f"{self.name}: batch size {batch_size} lies outside the traces' "
                f"{self.init_batch_size} to {self.max_batch_size}"
            )
        upper = int(np.searchsorted(self._batch_sizes, batch_size))
        lower = upper if self._batch_sizes[upper] == batch_size else upper - 1
        low, high = self._validations[lower], self._validations[upper]
        span = self._batch_sizes[upper] - self._batch_sizes[lower]
        part = (batch_size - self._batch_sizes[lower]) / span if span else 0.0
        return GradParams(
            float(low.grad_sqr[epoch] * (1 - part) + high.grad_sqr[epoch] * part),
            float(low.grad_var[epoch] * (1 - part) + high.grad_var[epoch] * part),
        )

    def progress(self, epoch: int) -> float:
        """Return the minimum progress over the validated batch sizes at that epoch."""
        if epoch == 0:
            return 0.0
        return float(min(v.progress[epoch - 1] for v in self._validations))

    def completion_epoch(self, batch_size: int) -> int:  # noqa: ARG002  # the protocol's
        """Return the last epoch: jobs train for a fixed number of epochs."""
        return self.max_epochs - 1

    def max_replicas(self, batch_size: int | None = None) -> int:
        """Return the maximum replicas within the bounds of the batch size and the traces."""
        if self.constants.fixed_batch_size is not None:
            return 1
        shared = self.max_batch_size if batch_size is None else batch_size
        return max(min(shared // self.min_local_bsz, _MOST_REPLICAS), 1)

    def new_model(self, batch_size: int | None = None) -> JobModel:
        """Return a model with an adaptive or a fixed batch size, which must be validated."""
        fixed = self.constants.fixed_batch_size or batch_size
        if fixed is None:
            return TraceJobModel(self)
        if not self.init_batch_size <= fixed <= self.max_batch_size:
            raise ValueError(
                f"batch_size is {fixed}, and the traces of {self.name} cover "
                f"{self.init_batch_size} to {self.max_batch_size}; give a batch_size in this range"
            )
        return FixedBatchModel(self, fixed)

    def requests(self, rng: np.random.Generator) -> tuple[int, int]:
        """Draw (num_replicas, batch_size) of an informed user, as in `JobArrival`."""
        return self.configurations[int(rng.integers(len(self.configurations)))]

    @cached_property
    def configurations(self) -> tuple[tuple[int, int], ...]:
        """(num_replicas, batch_size) pairs that scale, but not perfectly, on nodes of 4 GPUs.

        Each number of replicas has the validated batch size with the shortest training. As in the
        artifact, only numbers with 50 to 80 % of perfect scaling are included; one replica if none.
        """
        if self.constants.fixed_batch_size is not None:
            return ((1, self.constants.fixed_batch_size),)
        one, batch_size = self._best_batch(1)
        chosen = []
        for replicas in _REQUESTED:
            if replicas <= self.max_replicas():
                seconds, best = self._best_batch(replicas)
                if _LEAST_SCALING < one / seconds / replicas < _MOST_SCALING:
                    chosen.append((replicas, best))
        return tuple(chosen) or ((1, batch_size),)

    def _best_batch(self, num_replicas: int) -> tuple[float, int]:
        """Return (seconds of a whole training, batch size) of the best validated batch size."""
        full, rest = divmod(num_replicas, SLOTS_PER_NODE)
        placement = (SLOTS_PER_NODE,) * full + ((rest,) if rest else ())
        found = []
        for batch_size in map(int, self._batch_sizes):
            if batch_size >= num_replicas * self.min_local_bsz:
                atomic_bsz, accum_steps = split_batch(self, batch_size, num_replicas)
                optim, accum = self.step_times(RunningJob(placement, 1, 1, atomic_bsz, accum_steps))
                seconds = self._iterations[batch_size] * (optim + accum_steps * accum)
                found.append((seconds, batch_size))
        return min(found)

    @cached_property
    def _iterations(self) -> dict[int, float]:
        return {
            _batch_size(v.path): _read_columns(v.path, ("iteration",))["iteration"][
                self.max_epochs - 1
            ]
            for v in self._validations
        }

    def _interpolate(self, placement: tuple[int, ...], local_bsz: int) -> TrueStepTimes:
        rows = self._placements.get(placement)
        if rows is not None:
            step, sync = (np.interp(local_bsz, rows[:, 0], rows[:, i]) for i in (1, 2))
            inside = rows[0, 0] <= local_bsz <= rows[-1, 0]
        else:
            nodes = min(len(placement), _MOST_NODES)
            step, sync = np.ravel(self._surface(nodes, sum(placement), local_bsz))
            inside = not math.isnan(step)
        if not inside:
            raise TraceError(
                f"{self.name}: the traces lack placement {placement} with local batch "
                f"size {local_bsz}; keep to {self.min_local_bsz} to {self.max_local_bsz}"
            )
        return TrueStepTimes(float(step), float(step - sync))

    @cached_property
    def _surface(self) -> LinearNDInterpolator:
        """(num_nodes, num_replicas, local_bsz) -> (step time, sync time)."""
        from scipy.interpolate import LinearNDInterpolator  # imports slowly

        groups: dict[tuple[float, ...], list[NDArray[np.float64]]] = defaultdict(list)
        for placement, rows in self._placements.items():
            for local_bsz, *times in rows:
                groups[len(placement), sum(placement), local_bsz].append(np.array(times))
        names = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        columns = _read_columns(self._scalability, names)
        far = np.stack([columns[name] for name in names], axis=1)
        near = np.array([[*key, *np.mean(times, axis=0)] for key, times in sorted(groups.items())])
        points = np.concatenate([near, far])
        return LinearNDInterpolator(points[:, :3], points[:, 3:])


def read_applications(folder: Path) -> dict[str, TraceApplication]:
    """Read every application of `CONSTANTS` in a folder of traces, by name; at least one."""
    there = [name for name in CONSTANTS if (folder / name).is_dir()]
    found = {name: TraceApplication(folder / name) for name in there}
    if not found:
        raise TraceError(
            f"{folder}: holds no application's traces; give the folder in which "
            f"{', '.join(CONSTANTS)} lie"
        )
    return found


def _batch_size(path: Path) -> int:
    try:
        return int(path.stem.removeprefix("validation-"))
    except ValueError:
        raise TraceError(
            f"{path}: has no batch size in its name; name it validation-B.csv with B samples"
        ) from None


def _read_placements(path: Path) -> dict[tuple[int, ...], NDArray[np.float64]]:
    """Return rows (local_bsz, step_time, sync_time) by placement, sorted by local_bsz."""
    columns = _read_columns(path, ("placement", "local_bsz", "step_time", "sync_time"))
    rows = np.stack([columns[name] for name in ("local_bsz", "step_time", "sync_time")], axis=1)
    result = {}
    for code in np.unique(columns["placement"]):
        chosen = rows[columns["placement"] == code]
        placement = tuple(int(digit) for digit in str(int(code)))
        result[placement] = chosen[np.argsort(chosen[:, 0], kind="stable")]
    return result


def _read_columns(path: Path, names: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); give a folder of the traces") from None
    if not rows:
        raise TraceError(f"{path}: holds no rows; give a whole trace")
    return {name: _column(path, rows, name) for name in names}


def _column(path: Path, rows: Sequence[Mapping[str, str]], name: str) -> NDArray[np.float64]:
    values = []
    for number, row in enumerate(rows, start=2):
        try:
            value = float(row[name])
        except (KeyError, TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise TraceError(
                f"{path}, line {number}: {name} is {row.get(name)!r}; give a finite number"
            )
        values.append(value)
    return np.array(values)
