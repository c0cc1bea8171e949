"""The best choice of configurations within the total resources of the cluster.

All nodes count as one with their total resources, so the value of this choice bounds that of any
allocation. With one type of GPU only the scarcest resource is counted, and the choice is a
multiple-choice knapsack (`knapsack`). With jobs for one of several types, it is a mixed-integer
program over the configurations and the resources of each type, solved by HiGHS (Huangfu & Hall,
2018):

    max Σ gain_c · x_c     Σ_c∈job x_c = 1     Σ_c cost_c,t · x_c ≤ capacity_t     x_c ∈ {0, 1}
"""

from __future__ import annotations

import numpy as np

from pipollux_policies.placement.node_choice import Floats, Ints
from pipollux_utils.c_stdout import silent_c_stdout

from .configurations import Instance
from .knapsack import knapsack

_STAY_BONUS = 1e-9
"""The relative bonus of staying over an equally good configuration."""
SCALE = 1e5
"""Gains are scaled to this maximum for HiGHS, which stops within 1e-6 of the optimum."""


_MOST_UNITS = 10**6


def relax(instance: Instance, gains: Floats, *, whole_nodes: bool = False) -> tuple[Ints, float]:
    """Return the best configuration for every job, (J,), and the sum of their gains.

    No allocation exceeds it, except with `whole_nodes`: then a configuration on several nodes,
    except the one to stay, counts as if it took these nodes whole, so that the choice fits where
    distributed jobs must not share nodes.
    """
    table = instance.table
    preferred = gains.copy()
    preferred[table.stay] += _STAY_BONUS * abs(gains[table.stay])
    costs = _costs_of_whole_nodes(instance) if whole_nodes else instance.asked
    if any(shape.gpu_type is not None for shape in table.kinds):
        chosen = _choose_over_types(instance, costs, preferred)
    else:
        kind = _scarcest(instance, costs)
        # Count bytes of memory in their greatest common unit.
        unit = int(np.gcd.reduce(costs[:, kind])) or 1
        capacity = int(instance.nodes.free[:, kind].sum()) // unit
        if capacity <= _MOST_UNITS:
            units = costs[:, kind] // unit
            picks, _ = knapsack(table.split(units), table.split(preferred), capacity)
            chosen = np.array(picks)
        else:
            chosen = _choose_over_types(instance, costs, preferred)
    return chosen, float(sum(gains[table.first[:-1] + chosen].tolist()))


def _costs_of_whole_nodes(instance: Instance) -> Ints:
    """Return the resources of every configuration, whole nodes for those on several, (P, T)."""
    table = instance.table
    reach = np.stack([instance.nodes.reach(shape) for shape in table.kinds])
    held = reach[table.kind[table.shape], np.maximum(table.num_nodes, 1) - 1]
    spread = table.num_nodes > 1
    spread[table.stay] = False
    replicas = np.where(spread, held, table.replicas)
    costs: Ints = replicas[:, None] * instance.need[table.shape]
    return costs


def _scarcest(instance: Instance, costs: Ints) -> int:
    wanted = np.maximum.reduceat(costs, instance.table.first[:-1], axis=0).sum(axis=0)
    free = instance.nodes.free.sum(axis=0)
    return int((wanted / np.maximum(free, 1)).argmax())


def _choose_over_types(instance: Instance, costs: Ints, gains: Floats) -> Ints:
    from scipy.optimize import Bounds, LinearConstraint, milp  # imports slowly
    from scipy.sparse import csr_array, vstack

    nodes, table = instance.nodes, instance.table
    types = sorted({kind.gpu_type for kind in table.kinds if kind.gpu_type is not None})
    # One constraint per type, and one for all nodes together.
    of_type = [nodes.gpu_types == kind for kind in types]
    capacity = np.concatenate(
        [nodes.free.sum(axis=0), *(nodes.free[mask].sum(axis=0) for mask in of_type)]
    )
    own = np.array([kind.gpu_type for kind in table.kinds], dtype=object)[table.kind][table.shape]
    typed = [np.where((own == kind)[:, None], costs, 0) for kind in types]
    one_each = csr_array((np.ones(len(gains)), (table.job, np.arange(len(gains)))))
    rows = vstack([one_each, csr_array(np.concatenate([costs, *typed], axis=1).T)])
    upper = np.concatenate([np.ones(len(instance.jobs)), capacity])
    lower = np.concatenate([np.ones(len(instance.jobs)), np.full(len(capacity), -np.inf)])
    scale = SCALE / (float(np.abs(gains).max()) or 1.0)
    with silent_c_stdout():
        answer = milp(
            -gains * scale,
            integrality=np.ones(len(gains)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(rows, lower, upper),
            options={"mip_rel_gap": 0.0},
        )
    if answer.x is None:
        raise RuntimeError(f"HiGHS found no choice of configs: {answer.message}")
    picked = np.flatnonzero(answer.x > 0.5)
    chosen: Ints = picked - table.first[table.job[picked]]
    return chosen
