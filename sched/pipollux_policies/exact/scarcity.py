"""The cost of slots on a scarce type of GPU, charged to jobs that could run on another type.

Jobs that can run on one type of GPU only, for example because of its memory, are *captive*: they
all wait for any other job on these GPUs, even while other GPUs stand idle. With n_t captive jobs of
type t, and the largest `share` of any resource of its nodes that one replica holds, a job with a
choice that holds R replicas there delays each captive job by `share · R` seconds of the whole type
in each second, and is charged

    n_t · share · R

seconds of waiting per second. A sum over the present jobs does not contain this cost: captive jobs
wait until the type has worked off its queue. Without captive jobs nobody is charged.
"""

from __future__ import annotations

import numpy as np

from pipollux_policies.placement.node_choice import Floats

from .configurations import Instance

LEAST_KEPT = 0.01
"""The least share of its gain that a charge leaves: a slot that nobody else wants is used."""


def waiting_charges(instance: Instance) -> Floats:
    """Return n_t · share of every shape of every job, (S,); 0.0 without a charge."""
    table = instance.table
    charges = np.zeros(len(table.shapes))
    if all(shape.gpu_type is None for shape in table.kinds):
        return charges
    names = list(dict.fromkeys(shape.gpu_type for shape in table.kinds))
    gpu_type = np.array([names.index(shape.gpu_type) for shape in table.kinds])[table.kind]
    # The types of GPU that each job runs on; None: any.
    runs = np.zeros((len(instance.jobs), len(names)), dtype=bool)
    fast = table.speedup > 0
    runs[table.job[fast], gpu_type[table.shape[fast]]] = True
    captive = runs.sum(axis=1) == 1
    captives = runs[captive].sum(axis=0)
    # Shapes for any type are not charged: this choice does not fix their type.
    typed = np.array([name is not None for name in names])[gpu_type]
    pays = typed & (runs.sum(axis=1) > 1)[table.shape_job]
    charges[pays] = captives[gpu_type[pays]] * instance.share[pays]
    return charges


def charged(gains: Floats, charges: Floats) -> Floats:
    """Return gains minus charges; positive gains stay positive."""
    left: Floats = np.maximum(gains - charges, LEAST_KEPT * gains)
    return left
