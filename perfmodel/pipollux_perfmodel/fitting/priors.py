"""Priors of a fit for unmeasured regimes, and the starting point of its search.

The priors are AdaptDL's. They keep unexplored regimes optimistic, so that a job measured on one
replica only is still tried on two. Data needed for each parameter, and its value otherwise:

    parameter         needs                                        else
    alpha_c           two micro-batch sizes                        half of C(b) of T_pipe
    gamma_c           four micro-batch sizes                       1
    alpha_n           several nodes                                1e-8, but at least 1.1 alpha_r
    beta_n            several nodes, more than two replicas        1e-8, but at least 1.1 beta_r
    growth_n          three numbers of replicas across nodes       0 (logarithmic); 1 without beta_n
    two_node_penalty  two nodes with R > 2, and more than two      0
    alpha_r           several replicas on one node                 1e-8
    beta_r            the same, more than two replicas             1e-8
    gamma             two configurations of R > 1, all-reduces     1
    overlap           several stages, and compute times or two M   1
    contention        two numbers of replicas a node               0
    overhead          two M and two micro-batch sizes, four pairs  0 (in alpha_c)

Each measured network level has its own alpha_n and beta_n. An unmeasured level is optimistic as
well, but costs no less than the next lower one (`place_levels`):

    lowest level      as alpha_n, beta_n above, at most the lowest measured level's
    other levels      the next lower level's; likewise beta without more than two replicas

gamma_c, contention, growth_n, two_node_penalty and overhead are also neutral if the other
parameters explain the measurements (`fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipollux_perfmodel.timing.params import PerfParams
from pipollux_perfmodel.timing.step_time import EPSILON, pipeline_factor

from .loss import NAMES, NEUTRAL, groups_of
from .measurements import Floats, Profile

_GAMMA = 1.5  # starting point; AdaptDL's fits end at 1.2 to 2.5
_GAMMA_C = 1.2
_LOGARITHMIC = 0.0
_OVERLAPS = np.linspace(0.0, 1.0, 11)
_INTER_NODE_FACTOR = 1.1
_REPEATS = 5  # reweightings of a line

Booleans = NDArray[np.bool_]


class StartingPoint(NamedTuple):
    """Starting point of the search, in the order of `NAMES`, then the further levels."""

    values: Floats
    free: Booleans


def start(profile: Profile, shape: PerfParams) -> StartingPoint:
    """Return first guesses for identifiable parameters, and priors for the others."""
    known = identifiable(profile, shape)
    values = dict(zip(NAMES, NEUTRAL, strict=True))
    if known["gamma"]:
        values["gamma"] = _GAMMA
    if known["gamma_c"]:
        values["gamma_c"] = _GAMMA_C
    if known["beta_n"]:
        values["growth_n"] = _LOGARITHMIC
    values.update(_guess_compute(profile, shape, known))
    many, across = profile.num_replicas > 1, profile.num_nodes > 1
    lowest = across & (groups_of(profile) == 0)
    for ending, seen in (("n", lowest), ("r", many & ~across)):
        if seen.any():
            alpha, beta = _guess_network(profile, seen, values["gamma"], logarithmic=ending == "n")
            values["alpha_" + ending] = alpha
            values["beta_" + ending] = beta if known["beta_" + ending] else EPSILON
    numbers, free = [values[name] for name in NAMES], [known[name] for name in NAMES]
    for level in profile.levels[1:]:
        alpha, beta = _guess_network(
            profile, across & (profile.row_level == level), values["gamma"], logarithmic=True
        )
        grows = _grows(profile, level)
        numbers += [alpha, beta if grows else EPSILON]
        free += [True, grows]
    return StartingPoint(np.array(numbers), np.array(free))


def identifiable(profile: Profile, shape: PerfParams) -> dict[str, bool]:
    """Return whether the measurements determine each of `NAMES`."""
    replicas, nodes = profile.num_replicas, profile.num_nodes
    many, across = replicas > 1, nodes > 1
    inside, beyond_two = many & ~across, replicas > 2
    num_sizes = len(np.unique(profile.micro_bsz))
    lowest = across & (groups_of(profile) == 0)
    return {
        "alpha_c": num_sizes > 1,
        "beta_c": True,
        "alpha_n": bool(lowest.any()),
        "beta_n": bool((lowest & beyond_two).any()),
        "alpha_r": bool(inside.any()),
        "beta_r": bool((inside & beyond_two).any()),
        "gamma": shape.sync_every == 0 and _count_distinct(profile, many) > 1,
        "overlap": _determines_overlap(profile, shape),
        "gamma_c": num_sizes > 3,
        "overhead": _determines_overhead(profile),
        "contention": len(np.unique(replicas / nodes)) > 1,
        "growth_n": len(np.unique(replicas[across])) > 2,
        "two_node_penalty": bool(((nodes == 2) & beyond_two).any() and (nodes > 2).any()),
    }


def place_levels(params: PerfParams, further: Sequence[float], profile: Profile) -> PerfParams:
    """Return the parameters of all network levels, unmeasured ones included.

    In `params`, alpha_n and beta_n are of the lowest measured level; `further` has alpha and beta
    of every other one. Without measurements on several nodes, their network is no faster than
    inside a node.
    """
    levels = profile.levels
    if not levels:
        return params._replace(
            alpha_n=max(params.alpha_n, params.alpha_r * _INTER_NODE_FACTOR),
            beta_n=max(params.beta_n, params.beta_r * _INTER_NODE_FACTOR),
        )
    if levels == [1]:
        return params
    pairs = [(params.alpha_n, params.beta_n), *zip(further[::2], further[1::2], strict=True)]
    measured = dict(zip(levels, pairs, strict=True))
    alpha, beta = (max(EPSILON, x * _INTER_NODE_FACTOR) for x in (params.alpha_r, params.beta_r))
    if levels[0] > 1:
        alpha = min(alpha, params.alpha_n)
        if _grows(profile, levels[0]):
            beta = min(beta, params.beta_n)
    costs = []
    for level in range(1, levels[-1] + 1):
        if level in measured:
            alpha, grown = measured[level]
            unknown = level > 1 and not _grows(profile, level)
            beta = max(beta, grown) if unknown else grown
        costs.append((alpha, beta))
    alphas, betas = zip(*costs, strict=True)
    return params._replace(
        alpha_n=alphas[0], beta_n=betas[0], alpha_levels=alphas[1:], beta_levels=betas[1:]
    )


def _grows(profile: Profile, level: int) -> bool:
    """Return whether more than two replicas were measured at a network level."""
    there = (profile.num_nodes > 1) & (profile.row_level == level)
    return bool((there & (profile.num_replicas > 2)).any())


def _count_distinct(profile: Profile, chosen: Booleans) -> int:
    return len(np.unique(profile.keys[:, chosen], axis=1).T)


def _determines_overlap(profile: Profile, shape: PerfParams) -> bool:
    serial, ideal = (
        pipeline_factor(shape._replace(overlap=overlap), profile.num_microbatches)
        for overlap in (0.0, 1.0)
    )
    matters = ideal < serial * (1 - 1e-6)
    directly = matters & ~np.isnan(profile.compute_time)
    return bool(directly.any()) or (
        bool(matters.any()) and len(np.unique(profile.num_microbatches)) > 1
    )


def _determines_overhead(profile: Profile) -> bool:
    sizes, counts = profile.micro_bsz, profile.num_microbatches
    num_distinct = len(np.unique(np.stack((sizes, counts)), axis=1).T)
    return min(len(np.unique(sizes)), len(np.unique(counts))) > 1 and num_distinct > 3


def _guess_compute(profile: Profile, shape: PerfParams, known: dict[str, bool]) -> dict[str, float]:
    """Return alpha_c, beta_c, overhead and overlap that explain accumulation steps best. They are
    linear for a given overlap, so several overlaps are tried.
    """
    guesses = []
    for overlap in _OVERLAPS if known["overlap"] else (1.0,):
        overlapping = shape._replace(overlap=float(overlap))
        factor = pipeline_factor(overlapping, profile.num_microbatches)
        values, error = _fit_steps(profile, factor * np.ones_like(profile.micro_bsz), known)
        # If tied, the larger overlap: the loss has the same term.
        guesses.append((error + 1e-3 * (overlap - 1) ** 2, float(overlap), values))
    _, overlap, values = min(guesses, key=lambda guess: guess[0])
    return {**values, "overlap": overlap}


def _fit_steps(
    profile: Profile, factor: Floats, known: dict[str, bool]
) -> tuple[dict[str, float], float]:
    """Return alpha_c, beta_c and overhead of T_pipe = overhead + C(b)·F(M), and their error."""
    if not known["alpha_c"]:
        # Uses the whole step, not the stages' timers: the cost of a step outside its stages
        # (launching, the loss) does not depend on the batch size, and belongs to alpha_c.
        implied = profile.accum_time / factor
        half = float(np.average(implied, weights=profile.weight)) / 2
        found = {"alpha_c": half, "beta_c": half / float(profile.micro_bsz[0])}
        spread = float(np.mean(np.abs(np.log(implied / (2 * half)))))
        return found, spread
    measured = ~np.isnan(profile.compute_time)
    sizes, times = profile.micro_bsz[measured], profile.compute_time[measured]
    columns = [factor, factor * profile.micro_bsz]
    below = [np.ones_like(sizes), sizes]
    if known["overhead"]:
        columns.append(np.ones_like(factor))
        below.append(np.zeros_like(sizes))
    every = np.concatenate((np.stack(columns, axis=1), np.stack(below, axis=1)))
    coefficients, error = _least_errors(every, np.concatenate((profile.accum_time, times)))
    names = ("alpha_c", "beta_c", "overhead")
    return dict(zip(names, np.maximum(coefficients, EPSILON).tolist(), strict=False)), error


def _guess_network(
    profile: Profile, seen: Booleans, gamma: float, logarithmic: bool
) -> tuple[float, float]:
    """Return alpha and beta from the excess of optimizer steps over accumulation steps."""
    accum, optim = profile.accum_time[seen], profile.optim_time[seen]
    # Relative to the step, so that no power overflows.
    rest = optim * np.maximum(1 - (accum / optim) ** gamma, 0.0) ** (1 / gamma)
    network = np.maximum(rest, 0.05 * accum)
    replicas = profile.num_replicas[seen]
    beyond = np.log(replicas - 1) if logarithmic else replicas - 2
    alpha, beta = _fit_line(np.maximum(beyond, EPSILON), network)
    # Away from the lower bounds, where a search by logarithms would get stuck.
    alpha = max(alpha, 0.1 * float(network.min()))
    return alpha, max(beta, 1e-3 * alpha)


def _fit_line(x: Floats, y: Floats) -> tuple[float, float]:
    """Return (alpha, beta) >= EPSILON of y ≈ alpha + beta·x by relative errors."""
    coefficients, _ = _least_errors(np.stack((np.ones_like(x), x), axis=1), y)
    alpha, beta = np.maximum(coefficients, EPSILON).tolist()
    return alpha, beta


def _least_errors(columns: Floats, y: Floats) -> tuple[Floats, float]:
    """Return coefficients >= 0 of y ≈ columns·coefficients by relative errors, and their mean.
    Absolute errors are robust against stragglers.
    """
    from scipy.optimize import nnls  # imports slowly

    columns = columns / y[:, None]
    weights = np.ones_like(y)
    for _ in range(_REPEATS):
        coefficients, _ = nnls(columns * weights[:, None], weights)
        errors = np.abs(columns @ coefficients - 1)
        weights = 1 / np.sqrt(np.maximum(errors, 1e-3))
    return coefficients, float(np.mean(errors))
