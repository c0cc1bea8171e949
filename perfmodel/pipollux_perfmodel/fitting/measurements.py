"""Measured step times, the input of a fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipollux_perfmodel.timing.params import BACKWARD_SHARE, FORWARD_SHARE, MAX_LEVELS

Floats = NDArray[np.float64]


class Profile(NamedTuple):
    """Step times by configuration (T_pipe, T_optim, C(b)); float arrays of shape (points,)."""

    num_nodes: Floats
    num_replicas: Floats
    num_microbatches: Floats
    micro_bsz: Floats
    accum_time: Floats
    optim_time: Floats
    compute_time: Floats
    """Nan if not measured."""
    weight: Floats
    """Number of measurements of each configuration."""
    level: Floats = np.ones(1)
    """Network level at which the nodes meet, of every configuration or of all; 1 on one node."""

    @property
    def row_level(self) -> Floats:
        """The network level of every configuration, (points,)."""
        return np.broadcast_to(self.level, self.num_nodes.shape)

    @property
    def keys(self) -> Floats:
        """The configurations as columns, (5, points)."""
        return np.stack((*self[:4], self.row_level))

    @property
    def levels(self) -> list[int]:
        """The measured network levels, ascending."""
        return [int(level) for level in np.unique(self.row_level[self.num_nodes > 1])]


def merge(profile: Profile) -> Profile:
    """Return one measurement per configuration: the medians, weighted by their number."""
    distinct, inverse, counts = np.unique(
        profile.keys, axis=1, return_inverse=True, return_counts=True
    )
    if len(counts) == len(profile.weight):
        return profile
    order = np.argsort(inverse, kind="stable")
    groups = np.split(order, np.cumsum(counts)[:-1])
    times = [np.array([_median(column[group]) for group in groups]) for column in profile[4:7]]
    nodes, replicas, microbatches, sizes, level = distinct
    accum, optim, compute = times
    weight = counts.astype(float)
    return Profile(nodes, replicas, microbatches, sizes, accum, optim, compute, weight, level)


def _median(values: Floats) -> float:
    measured = values[~np.isnan(values)]
    return float(np.median(measured)) if measured.size else float("nan")


def make_profile(
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_bsz: ArrayLike,
    accum_step_time: ArrayLike,
    optim_step_time: ArrayLike,
    num_microbatches: ArrayLike | None,
    compute_time: ArrayLike | None,
    level: ArrayLike | None = None,
) -> Profile:
    """Return arrays of one length; ValueError for empty ones, or values or lengths out of range."""
    given: dict[str, Any] = {
        "num_nodes": num_nodes,
        "num_replicas": num_replicas,
        "num_microbatches": 1 if num_microbatches is None else num_microbatches,
        "atomic_bsz": atomic_bsz,
        "accum_step_time": accum_step_time,
        "optim_step_time": optim_step_time,
        "compute_time": np.nan if compute_time is None else compute_time,
        "level": 1 if level is None else level,
    }
    columns = {name: np.atleast_1d(np.asarray(values, float)) for name, values in given.items()}
    length = len(columns["atomic_bsz"])
    if length == 0:
        raise ValueError("atomic_bsz is empty; give at least one measurement")
    for name, values in columns.items():
        if values.shape not in ((length,), (1,)):
            raise ValueError(
                f"{name} has shape {values.shape}, atomic_bsz ({length},); give one per measurement"
            )
        _check_range(name, values)
        columns[name] = np.broadcast_to(values, (length,))
    if np.any((columns["level"] > MAX_LEVELS) | (columns["level"] % 1 != 0)):
        wrong = columns["level"][(columns["level"] > MAX_LEVELS) | (columns["level"] % 1 != 0)][0]
        raise ValueError(f"level has {wrong:g}; give a whole number from 1 to {MAX_LEVELS}")
    if np.any(columns["num_nodes"] > columns["num_replicas"]):
        raise ValueError("num_nodes is above num_replicas; a replica lies on one node")
    return Profile(
        columns["num_nodes"],
        columns["num_replicas"],
        columns["num_microbatches"],
        columns["atomic_bsz"] / columns["num_microbatches"],
        columns["accum_step_time"],
        columns["optim_step_time"],
        columns["compute_time"],
        np.ones(length),
        np.where(columns["num_nodes"] > 1, columns["level"], 1.0),
    )


class StageShares(NamedTuple):
    """Shares of C(b) by measured stage times: φ_k, ψ_k and C(b)."""

    forward_shares: tuple[float, ...]
    backward_shares: tuple[float, ...]
    compute_time: Floats
    """Nan if not measured; shape (points,)."""


def stage_shares(forward: ArrayLike, backward: ArrayLike, num_stages: int) -> StageShares:
    """Return the stages' shares of C(b) from seconds of one micro-batch, shape (points,
    num_stages). Nan is not measured. Raises ValueError for a wrong shape or a negative time.
    """
    arrays = []
    for name, given in (("forward", forward), ("backward", backward)):
        times = np.asarray(given, float)
        if times.ndim != 2 or times.shape[1] != num_stages:
            raise ValueError(
                f"{name} has shape {times.shape}; give (points, {num_stages}), one per stage"
            )
        if np.any((times < 0) | np.isinf(times)):
            wrong = times[(times < 0) | np.isinf(times)][0]
            raise ValueError(f"{name} has {wrong:g}; give a finite time >= 0 s, or nan")
        arrays.append(times)
    both = np.concatenate(arrays, axis=1)
    compute = both.sum(axis=1)
    measured = compute > 0  # False for nan
    if not measured.any():
        shares = np.repeat((FORWARD_SHARE, BACKWARD_SHARE), num_stages) / num_stages
    else:
        # Medians are robust against single slow micro-batches.
        found = both[measured] / compute[measured, None]
        shares = np.median(found, axis=0)
        if not shares.any():  # each stage was idle in most points
            shares = found.mean(axis=0)
        shares /= shares.sum()
    return StageShares(
        tuple(shares[:num_stages].tolist()),
        tuple(shares[num_stages:].tolist()),
        np.where(measured, compute, np.nan),
    )


def _check_range(name: str, values: Floats) -> None:
    if name == "compute_time":
        values = values[~np.isnan(values)]
    if name.endswith("time"):
        wrong = ~(np.isfinite(values) & (values > 0))
        allowed = "a finite time above 0 s"
    else:
        wrong = ~(np.isfinite(values) & (values >= 1))
        allowed = "a number from 1 on"
    if wrong.any():
        raise ValueError(f"{name} has {values[wrong][0]:g}; give {allowed}")
