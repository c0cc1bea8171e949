"""What slots of a scarce type of GPU cost jobs that could run on another type.

Some jobs run on one type of GPU only, for want of memory on the others, say. They are *captive*:
whatever else runs on these GPUs makes all of them wait, also while others stand idle. Symbols:

    n_t        captive jobs of type t
    share      largest share of any resource of the nodes of its type that one replica holds
    R          replicas

In each second, a job that has a choice and holds R replicas on type t makes every captive job wait
for `share · R` seconds of the whole type. So it is charged

    n_t · share · R

seconds of waiting per second. A sum over jobs as they are now does not see that: what it takes now
may be little, but captive jobs wait for all of it, until the type has worked off its queue. Captive
jobs are not charged, and without them nobody is: on one type of GPU nothing changes.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pipollux_sched.policy.placement.node_choice import Floats

from .configurations import Instance, JobConfigurations

LEAST_KEPT = 0.01
"""The share of its gain that a charge leaves at least: a slot that nobody else wants is used."""


def waiting_charges(instance: Instance) -> list[Floats]:
    """Return n_t · share of every shape of every job; 0.0 where there is nothing to pay."""
    types = [_types(configs) for configs in instance.jobs]
    captives = Counter(next(iter(kinds)) for kinds in types if len(kinds) == 1)
    return [
        _charges(instance, configs, captives) if len(kinds) > 1 else np.zeros(len(configs.shapes))
        for configs, kinds in zip(instance.jobs, types, strict=True)
    ]


def charged(gains: Floats, charges: Floats) -> Floats:
    """Return gains of at least 0 less charges, above 0 where they were."""
    left: Floats = np.maximum(gains - charges, LEAST_KEPT * gains)
    return left


def _types(configs: JobConfigurations) -> set[str | None]:
    """Return the types of GPU that a job runs on; None: any."""
    return {configs.shapes[shape].gpu_type for shape in set(configs.shape[configs.speedup > 0])}


def _charges(
    instance: Instance, configs: JobConfigurations, captives: Counter[str | None]
) -> Floats:
    # A shape for any type is charged nothing: which one it takes is not chosen here.
    return np.array(
        [
            captives[shape.gpu_type] * instance.nodes.share(shape)
            if shape.gpu_type is not None
            else 0.0
            for shape in configs.shapes
        ]
    )
