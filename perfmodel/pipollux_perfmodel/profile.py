"""Measured step times, the input of a fit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


class Profile(NamedTuple):
    """Step times by configuration; arrays of shape (points,), floats all."""

    num_nodes: Floats
    num_replicas: Floats
    num_microbatches: Floats
    micro_bsz: Floats
    """b = atomic_bsz / M."""
    accum_time: Floats
    """Measured T_pipe."""
    optim_time: Floats
    """Measured T_optim."""
    compute_time: Floats
    """Measured C(b); not a number where not measured."""


def make_profile(
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    atomic_bsz: ArrayLike,
    accum_step_time: ArrayLike,
    optim_step_time: ArrayLike,
    num_microbatches: ArrayLike | None,
    compute_time: ArrayLike | None,
) -> Profile:
    """Check measurements and put them in arrays of one length.

    Raises:
        ValueError: naming the argument that is empty, of another length, or out of range.
    """
    given: dict[str, Any] = {
        "num_nodes": num_nodes,
        "num_replicas": num_replicas,
        "num_microbatches": 1 if num_microbatches is None else num_microbatches,
        "atomic_bsz": atomic_bsz,
        "accum_step_time": accum_step_time,
        "optim_step_time": optim_step_time,
        "compute_time": np.nan if compute_time is None else compute_time,
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
