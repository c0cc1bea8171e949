"""What a fit assumes of what was not measured, and where it starts from.

The priors are AdaptDL's. They keep unexplored regimes optimistic: a job seen on one replica only
must not be priced out of two.

    seen                            assumed
    one micro-batch size b          alpha_c is half of C(b), as accumulation steps have it
    never several nodes             alpha_n = beta_n = 1e-8, but at least 1.1 alpha_r, 1.1 beta_r
    never several replicas a node   alpha_r = beta_r = 1e-8
    never above two replicas        beta_n = beta_r = 1e-8
    one configuration of R > 1      gamma = 1
    one stage, or one M and no C    overlap = 1
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from .params import PerfParams
from .profile import Floats, Profile
from .steptime import EPSILON, pipeline_factor

# Order of the numbers that are fitted: the first seven fields of PerfParams, then overlap.
NAMES = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma", "overlap")
NUM_TIMES = 6  # of these, how many are times
_GAMMA = 1.5  # where the search starts; AdaptDL's own fits end at 1.2 to 2.5
_OVERLAPS = np.linspace(0.0, 1.0, 11)
_INTER_NODE_FACTOR = 1.1

Booleans = NDArray[np.bool_]


class Start(NamedTuple):
    """Where the search starts, in the order of `NAMES`; shape (8,)."""

    values: Floats
    free: Booleans
    """Whether a number is fitted or stays as it is."""


def start(profile: Profile, shape: PerfParams) -> Start:
    """Return first guesses for what data can tell, and priors for what they cannot.

    Args:
        profile: the measurements.
        shape: its shares are those of the job.
    """
    many, across = profile.num_replicas > 1, profile.num_nodes > 1
    inside, beyond_two = many & ~across, bool(np.any(profile.num_replicas > 2))
    values = np.full(len(NAMES), EPSILON)
    free = np.array(
        [
            len(np.unique(profile.micro_bsz)) > 1,
            True,
            across.any(),
            across.any() and beyond_two,
            inside.any(),
            inside.any() and beyond_two,
            _count_distinct(profile, many) > 1,
            _tells_overlap(profile, shape),
        ]
    )
    values[6] = _GAMMA if free[6] else 1.0
    values[7] = _guess_overlap(profile, shape) if free[7] else 1.0
    values[:2] = _guess_compute(profile, shape._replace(overlap=values[7]), alpha_free=free[0])
    for index, seen in ((2, across), (4, inside)):
        if seen.any():
            guess = _guess_network(profile, seen, values[6])
            values[index : index + 2] = np.where(free[index : index + 2], guess, EPSILON)
    return Start(values, free)


def raise_unseen(params: PerfParams, profile: Profile) -> PerfParams:
    """Keep the network between nodes no faster than the one inside, where it was not seen."""
    if np.any(profile.num_nodes > 1):
        return params
    return params._replace(
        alpha_n=max(params.alpha_n, params.alpha_r * _INTER_NODE_FACTOR),
        beta_n=max(params.beta_n, params.beta_r * _INTER_NODE_FACTOR),
    )


def measured_compute(profile: Profile, shape: PerfParams) -> Floats:
    """Return C(b): as measured, or else as the accumulation step and the overlap have it."""
    implied = profile.accum_time / pipeline_factor(shape, profile.num_microbatches)
    return np.where(np.isnan(profile.compute_time), implied, profile.compute_time)


def _count_distinct(profile: Profile, chosen: Booleans) -> int:
    """Return how many different configurations there are among the chosen measurements."""
    return len(np.unique(np.stack(profile[:4])[:, chosen], axis=1).T)


def _tells_overlap(profile: Profile, shape: PerfParams) -> bool:
    """Whether overlap changes predictions of what was measured differently from alpha_c, beta_c."""
    ideal = pipeline_factor(shape._replace(overlap=1.0), profile.num_microbatches)
    matters = ideal < profile.num_microbatches * (1 - 1e-6)
    told_directly = matters & ~np.isnan(profile.compute_time)
    return bool(told_directly.any()) or (
        bool(matters.any()) and len(np.unique(profile.num_microbatches)) > 1
    )


def _guess_overlap(profile: Profile, shape: PerfParams) -> float:
    """Return the overlap under which a line in b explains the accumulation steps best."""
    errors = []
    measured = ~np.isnan(profile.compute_time)
    for overlap in _OVERLAPS:
        factor = pipeline_factor(shape._replace(overlap=overlap), profile.num_microbatches)
        compute = np.concatenate((profile.accum_time / factor, profile.compute_time[measured]))
        sizes = np.concatenate((profile.micro_bsz, profile.micro_bsz[measured]))
        # Where several explain them alike, the most: the loss has the same term.
        errors.append(_fit_line(sizes, compute)[1] + 1e-3 * (overlap - 1) ** 2)
    return float(_OVERLAPS[np.argmin(errors)])


def _guess_compute(profile: Profile, shape: PerfParams, alpha_free: bool) -> Floats:
    if alpha_free:
        return _fit_line(profile.micro_bsz, measured_compute(profile, shape))[0]
    # By the whole step, not by the stages' timers: what a step costs beside its stages (launching
    # them, the loss) is the same for any batch size, and belongs to alpha_c for the most part.
    implied = profile.accum_time / pipeline_factor(shape, profile.num_microbatches)
    half = float(np.mean(implied)) / 2
    return np.array([half, half / profile.micro_bsz[0]])


def _guess_network(profile: Profile, seen: Booleans, gamma: float) -> Floats:
    """Return alpha and beta from what optimizer steps took longer than accumulation steps."""
    accum, optim = profile.accum_time[seen], profile.optim_time[seen]
    rest = np.maximum(optim**gamma - accum**gamma, 0.0) ** (1 / gamma)
    network = np.maximum(rest, 0.05 * accum)
    (alpha, beta), _ = _fit_line(np.maximum(profile.num_replicas[seen] - 2, EPSILON), network)
    # Away from the lower bounds, where a search by logarithms would be stuck.
    alpha = max(alpha, 0.1 * network.min())
    return np.array([alpha, max(beta, 1e-3 * alpha)])


def _fit_line(x: Floats, y: Floats) -> tuple[Floats, float]:
    """Return (alpha, beta) >= EPSILON of y ≈ alpha + beta·x, and its relative rmse."""
    columns = np.stack((np.ones_like(x), x), axis=1) / y[:, None]
    coefficients, error = scipy.optimize.nnls(columns, np.ones_like(y))
    return np.maximum(coefficients, EPSILON), float(error) / math.sqrt(len(y))
