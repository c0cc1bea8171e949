"""The best choice of configurations within the cluster's total resources.

All nodes are treated as one, with as much of every resource as they have together. What can be
placed on nodes can be chosen here, so the value of this choice bounds that of any allocation.

On one type of GPU only the scarcest resource is counted, and the choice is a multiple-choice
knapsack (`knapsack`). With jobs that are for one of several types, it is a mixed-integer program
over the configurations and the resources of each type, solved by HiGHS (Huangfu & Hall, 2018) to
its optimum:

    max Σ gain_c · x_c     Σ_c∈job x_c = 1     Σ_c cost_c,t · x_c ≤ capacity_t     x_c ∈ {0, 1}
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, vstack

from pipollux_sched.policy.placement.node_choice import Floats, Ints
from pipollux_sched.utils.c_stdout import silent_c_stdout

from .configurations import Instance, JobConfigurations
from .knapsack import knapsack

_STAY_BONUS = 1e-9
"""The relative bonus of staying over what is as good."""
SCALE = 1e5
"""The greatest gain as HiGHS sees it: it stops within 1e-6 of the optimum, whatever the unit."""


_MOST_UNITS = 10**6
"""Units of the scarcest resource up to which the knapsack is solved by dynamic programming."""


def relax(
    instance: Instance, gains: Sequence[Floats], *, whole_nodes: bool = False
) -> tuple[list[int], float]:
    """Choose one configuration for every job.

    Args:
        instance: jobs and nodes.
        gains: the gains of every job's configurations.
        whole_nodes: count a configuration on several nodes, unless it is to stay, as if it took all
            of these nodes: the choice then fits where distributed jobs must not share nodes.

    Returns:
        The configuration of every job, and the sum of their gains. No allocation exceeds it, except
        with `whole_nodes`.
    """
    preferred = [_prefer_stay(configs, gain) for configs, gain in zip_jobs(instance, gains)]
    costs: Sequence[Ints] = instance.asked
    if whole_nodes:
        costs = [_costs_of_whole_nodes(instance, configs) for configs in instance.jobs]
    if any(shape.gpu_type is not None for configs in instance.jobs for shape in configs.shapes):
        chosen = _choose_over_types(instance, costs, preferred)
    else:
        kind = _scarcest(instance, costs)
        # Bytes of memory are counted in units as large as they can be.
        unit = int(np.gcd.reduce(np.concatenate([cost[:, kind] for cost in costs]))) or 1
        capacity = int(instance.nodes.free[:, kind].sum()) // unit
        if capacity <= _MOST_UNITS:
            units = [cost[:, kind] // unit for cost in costs]
            chosen, _ = knapsack(units, preferred, capacity)
        else:
            chosen = _choose_over_types(instance, costs, preferred)
    return chosen, float(sum(gain[config] for gain, config in zip(gains, chosen, strict=True)))


def zip_jobs(instance: Instance, gains: Sequence[Floats]) -> list[tuple[JobConfigurations, Floats]]:
    """Pair every job's configurations with their gains."""
    return list(zip(instance.jobs, gains, strict=True))


def _prefer_stay(configs: JobConfigurations, gains: Floats) -> Floats:
    if configs.stay is None:
        return gains
    preferred = gains.copy()
    preferred[configs.stay] += _STAY_BONUS * abs(gains[configs.stay])
    return preferred


def _costs_of_whole_nodes(instance: Instance, configs: JobConfigurations) -> Ints:
    """Return the resources of every configuration, those on several nodes as if whole: (C, T)."""
    needs = np.stack([instance.nodes.need(shape) for shape in configs.shapes])
    reach = np.stack([instance.nodes.reach(shape) for shape in configs.shapes])
    held = reach[configs.shape, np.maximum(configs.num_nodes, 1) - 1]
    spread = configs.num_nodes > 1
    if configs.stay is not None:
        spread[configs.stay] = False
    replicas = np.where(spread, held, configs.replicas)
    costs: Ints = replicas[:, None] * needs[configs.shape]
    return costs


def _scarcest(instance: Instance, costs: Sequence[Ints]) -> int:
    """Return the resource that is scarcest relative to what all jobs could take."""
    wanted = sum(cost.max(axis=0) for cost in costs)
    free = instance.nodes.free.sum(axis=0)
    return int((wanted / np.maximum(free, 1)).argmax())


def _choose_over_types(
    instance: Instance, all_costs: Sequence[Ints], gains: Sequence[Floats]
) -> list[int]:
    nodes = instance.nodes
    types = sorted({s.gpu_type for o in instance.jobs for s in o.shapes if s.gpu_type is not None})
    # One resource for every type, and one of all nodes together.
    of_type = [nodes.gpu_types == kind for kind in types]
    capacity = np.concatenate(
        [nodes.free.sum(axis=0), *(nodes.free[mask].sum(axis=0) for mask in of_type)]
    )
    blocks, owners = [], []
    for number, (configs, costs) in enumerate(zip(instance.jobs, all_costs, strict=True)):
        kinds = np.array([shape.gpu_type for shape in configs.shapes], dtype=object)[configs.shape]
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
    with silent_c_stdout():
        answer = milp(
            -value * scale,
            integrality=np.ones(len(value)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(rows, lower, upper),
            options={"mip_rel_gap": 0.0},
        )
    if answer.x is None:
        raise RuntimeError(f"HiGHS found no choice of configs: {answer.message}")
    picked = np.flatnonzero(answer.x > 0.5)
    first = np.concatenate([[0], np.cumsum([len(gain) for gain in gains])])[:-1]
    return [int(config) for config in picked - first[owner[picked]]]
