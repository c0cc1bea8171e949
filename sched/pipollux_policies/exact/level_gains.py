"""The gains of configurations whose nodes meet at a higher network level than listed.

A `Table` lists each configuration at the lowest level with room for it on empty nodes. While jobs
are placed, that room gets used, so the same configuration may be left at a higher level only. Its
gain there is priced when it matters, for many jobs at once, and kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipollux_policies.jobs.job_info import find_speedups
from pipollux_policies.placement.node_choice import Bools, Floats, Ints

from .configurations import Instance
from .objective import ObjectiveValue


class LevelGains:
    """Gains of all configurations by network level."""

    def __init__(self, instance: Instance, worth: ObjectiveValue, gains: Floats) -> None:
        self._instance, self._worth, self._gains = instance, worth, gains
        table = instance.table
        self.num_levels = instance.nodes.topology.num_levels
        self.suffers: Bools = table.level < self.num_levels
        """(P,): configurations that a higher level than the listed one costs more."""
        self.sensitive: Bools = np.zeros(len(instance.jobs), dtype=bool)
        """(J,): jobs with such configurations."""
        self.sensitive[table.job[self.suffers & (table.num_nodes > 1)]] = True
        self._known: dict[int, Floats] = {}

    def at(self, levels: Ints) -> Floats:
        """Return the gain of every configuration at a level, (P,); at an unknown one, and at or
        below the listed level, the listed gain, which is no lower.
        """
        gains = self._gains.copy()
        for level, known in self._known.items():
            here = (levels == level) & ~np.isnan(known)
            gains[here] = known[here]
        return gains

    def of_job(self, job: int, levels: Ints) -> Floats:
        """Return the gains of a job's configurations, (C,), as `at`; unknown ones are priced."""
        first, end = self._instance.table.first[job : job + 2].tolist()
        self.price(np.arange(first, end), levels)
        gains = self._gains[first:end].copy()
        for level, known in self._known.items():
            here = (levels == level) & ~np.isnan(known[first:end])
            gains[here] = known[first:end][here]
        return gains

    def price(self, configs: Ints, levels: Ints) -> None:
        """Price configurations at levels above the listed ones, all at once."""
        table = self._instance.table
        missing = levels > table.level[configs]
        for level, known in self._known.items():
            missing &= (levels != level) | np.isnan(known[configs])
        missing &= table.replicas[configs] > 0
        configs, levels = configs[missing], levels[missing]
        if not configs.size:
            return
        parts = list(_parts(table.shape[configs], levels))
        asked = [
            (table.shapes[shape], table.num_nodes[configs[part]], table.replicas[configs[part]], at)
            for part, shape, at in parts
        ]
        for (part, shape, at), speedups in zip(parts, find_speedups(asked), strict=True):
            if at not in self._known:
                self._known[at] = np.full(len(table.job), np.nan)
            known = self._known[at]
            mine, job = configs[part], int(table.shape_job[shape])
            known[mine] = self._worth.moved_all(
                job,
                np.nan_to_num(speedups),
                shape - int(table.first_shape[job]),
                table.replicas[mine],
                elastic=table.elastic[mine],
            )


def _parts(shapes: Ints, levels: Ints) -> Iterator[tuple[Ints, int, int]]:
    """Return the indices of the entries of every shape and level."""
    order = np.lexsort((levels, shapes))
    keys = np.stack((shapes[order], levels[order]))
    starts = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    for part, start in zip(np.split(order, starts[1:]), starts.tolist(), strict=True):
        yield part, int(keys[0, start]), int(keys[1, start])
