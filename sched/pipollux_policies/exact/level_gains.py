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
        self.spread: Ints = np.flatnonzero(self.suffers & (table.num_nodes > 1))
        """Such configurations on several nodes."""
        self.sensitive: Bools = np.zeros(len(instance.jobs), dtype=bool)
        """(J,): jobs with configurations in `spread`."""
        self.sensitive[table.job[self.spread]] = True
        self._known: dict[int, Floats] = {}
        self._expected: Ints | None = None

    def expect(self, configs: Ints) -> None:
        """Price these configurations at all higher levels as soon as one of them is needed."""
        several = self._instance.table.num_nodes[configs] > 1
        self._expected = configs[self.suffers[configs] & several]

    def need(self) -> None:
        """Price what `expect` named."""
        configs, self._expected = self._expected, None
        if configs is not None:
            above = np.arange(2, self.num_levels + 1)
            self.price(np.repeat(configs, len(above)), np.tile(above, len(configs)))

    def of(self, configs: Ints, levels: Ints) -> Floats:
        """Return the gains of some configurations at a level each, (C,): at or below the listed
        level the listed gain, which is no lower. Unknown ones are priced.
        """
        gains = self._gains[configs]
        if (levels > self._instance.table.level[configs]).any():
            self.need()
            self.price(configs, levels)
            for level, known in self._known.items():
                here = (levels == level) & ~np.isnan(known[configs])
                gains[here] = known[configs[here]]
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
        order = np.concatenate([part for part, _, _ in parts])
        speedups = np.nan_to_num(np.concatenate(find_speedups(asked)))
        configs, levels = configs[order], levels[order]
        gains = self._worth.moved_all(configs, speedups)
        for level in np.unique(levels).tolist():
            if level not in self._known:
                self._known[level] = np.full(len(table.job), np.nan)
            here = levels == level
            self._known[level][configs[here]] = gains[here]


def _parts(shapes: Ints, levels: Ints) -> Iterator[tuple[Ints, int, int]]:
    """Return the indices of the entries of every shape and level."""
    order = np.lexsort((levels, shapes))
    keys = np.stack((shapes[order], levels[order]))
    starts = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    for part, start in zip(np.split(order, starts[1:]), starts.tolist(), strict=True):
        yield part, int(keys[0, start]), int(keys[1, start])
