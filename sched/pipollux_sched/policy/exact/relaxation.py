"""The best choice of options that the cluster's slots allow, wherever they lie.

Nodes are thrown together: of every kind of resource there is as much as all of them have. What can
be placed on nodes can be chosen here, so the value of this choice bounds that of any allocation.

On one type of GPU only the scarcest resource is counted, and the choice is a multiple-choice
knapsack (`knapsack`). With several types, or with jobs that are for one of them, it is a
mixed-integer program over the options and as many resources as there are types and kinds, solved by
HiGHS (Huangfu & Hall, 2018) to its optimum:

    max Σ gain_c · x_c     Σ_c∈job x_c = 1     Σ_c cost_c,t · x_c ≤ capacity_t     x_c ∈ {0, 1}
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, vstack

from .configurations import Floats, Instance, Ints, JobOptions
from .knapsack import knapsack

_STAY_BONUS = 1e-9
"""By how much, relatively, staying is preferred to what is as good."""


SCALE = 1e5
"""The greatest gain as HiGHS sees it, which ends within 1e-6 of the optimum whatever the unit."""


def relax(
    instance: Instance, gains: Sequence[Floats], *, whole_nodes: bool = False
) -> tuple[list[int], float]:
    """Choose one option for every job.

    Args:
        instance: jobs and nodes.
        gains: what the options of every job are worth.
        whole_nodes: count an option on several nodes, unless it is to stay, as if it took all of
            them: what is chosen then fits where distributed jobs are in each other's way.

    Returns:
        The option of every job, and the sum of their gains, which no allocation exceeds; with
        `whole_nodes` some may.
    """
    preferred = [_prefer_stay(options, gain) for options, gain in zip_jobs(instance, gains)]
    costs = [_costs(instance, options, whole_nodes) for options in instance.jobs]
    if any(shape.gpu_type is not None for options in instance.jobs for shape in options.shapes):
        chosen = _choose_over_types(instance, costs, preferred)
    else:
        kind = _scarcest(instance, costs)
        capacity = int(instance.nodes.free[:, kind].sum())
        chosen, _ = knapsack([cost[:, kind] for cost in costs], preferred, capacity)
    return chosen, float(sum(gain[option] for gain, option in zip(gains, chosen, strict=True)))


def zip_jobs(instance: Instance, gains: Sequence[Floats]) -> list[tuple[JobOptions, Floats]]:
    """Pair every job's options with their gains."""
    return list(zip(instance.jobs, gains, strict=True))


def _prefer_stay(options: JobOptions, gains: Floats) -> Floats:
    if options.stay is None:
        return gains
    preferred = gains.copy()
    preferred[options.stay] += _STAY_BONUS * abs(gains[options.stay])
    return preferred


def _costs(instance: Instance, options: JobOptions, whole_nodes: bool) -> Ints:
    """Return what every option takes: (C, T)."""
    needs = np.stack([instance.nodes.need(shape) for shape in options.shapes])
    replicas = options.replicas
    if whole_nodes:
        reach = np.stack([instance.nodes.reach(shape) for shape in options.shapes])
        held = reach[options.shape, np.maximum(options.num_nodes, 1) - 1]
        spread = options.num_nodes > 1
        if options.stay is not None:
            spread[options.stay] = False
        replicas = np.where(spread, held, replicas)
    costs: Ints = replicas[:, None] * needs[options.shape]
    return costs


def _scarcest(instance: Instance, costs: Sequence[Ints]) -> int:
    """Return the resource of which there is least for what all jobs could take at most."""
    wanted = sum(cost.max(axis=0) for cost in costs)
    free = instance.nodes.free.sum(axis=0)
    return int((wanted / np.maximum(free, 1)).argmax())


def _choose_over_types(
    instance: Instance, all_costs: Sequence[Ints], gains: Sequence[Floats]
) -> list[int]:
    nodes = instance.nodes
    types = sorted({s.gpu_type for o in instance.jobs for s in o.shapes if s.gpu_type is not None})
    # A resource of its own for every type, and one of all nodes together.
    of_type = [nodes.gpu_types == kind for kind in types]
    capacity = np.concatenate(
        [nodes.free.sum(axis=0), *(nodes.free[mask].sum(axis=0) for mask in of_type)]
    )
    blocks, owners = [], []
    for number, (options, costs) in enumerate(zip(instance.jobs, all_costs, strict=True)):
        kinds = np.array([shape.gpu_type for shape in options.shapes], dtype=object)[options.shape]
        typed = [np.where((kinds == kind)[:, None], costs, 0) for kind in types]
        blocks.append(np.concatenate([costs, *typed], axis=1))
        owners.append(np.full(len(costs), number))
    owner = np.concatenate(owners)
    one_each = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    rows = vstack([one_each, csr_array(np.concatenate(blocks).T)])
    upper = np.concatenate([np.ones(len(instance.jobs)), capacity])
    lower = np.concatenate([np.ones(len(instance.jobs)), np.full(len(capacity), -np.inf)])
    value = np.concatenate(gains)
    scale = SCALE / (float(np.abs(value).max()) or 1.0)
    answer = milp(
        -value * scale,
        integrality=np.ones(len(value)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(rows, lower, upper),
        options={"mip_rel_gap": 0.0},
    )
    if answer.x is None:
        raise RuntimeError(f"HiGHS found no choice of options: {answer.message}")
    picked = np.flatnonzero(answer.x > 0.5)
    first = np.concatenate([[0], np.cumsum([len(gain) for gain in gains])])[:-1]
    return [int(option) for option in picked - first[owner[picked]]]
