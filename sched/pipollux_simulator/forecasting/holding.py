"""Jobs of a sample that may not arrive yet, as they wait for others or for room in their sweep."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from .state import ForecastState


class Holding:
    """Tells when jobs arrive that wait for the end of others.

    Predecessors are assumed to end as the jobs that wait for them need. One that is not part of the
    state never ends.

    Args:
        state: of the cluster.
        planned: names of the trials to come, by sweep.
    """

    def __init__(self, state: ForecastState, planned: Mapping[str, Sequence[str]]) -> None:
        waits = {entry.name: set(entry.after) for entry in state.jobs_and_sweeps}
        self._missing = {name: len(after) for name, after in waits.items() if after}
        """Number of predecessors that have not ended, of those that wait for any."""
        self._waiting: dict[str, list[str]] = {}
        """The jobs and sweeps that wait for each job or sweep."""
        for name, after in waits.items():
            for before in after:
                self._waiting.setdefault(before, []).append(name)
        self.sweep_of = {
            name: sweep.name
            for sweep in state.sweeps
            for name in (*sweep.trials, *planned[sweep.name])
        }
        """The sweep of each trial."""
        self._planned = {name: deque(trials) for name, trials in planned.items()}
        self._left = {
            sweep.name: len(sweep.trials) + len(planned[sweep.name]) for sweep in state.sweeps
        }
        """Number of trials of each sweep that have not ended."""
        self._room = {
            sweep.name: max(sweep.most_unfinished - len(sweep.trials), 0) for sweep in state.sweeps
        }

    def begin(self) -> list[str]:
        """Return the trials that may arrive at once."""
        return [
            name for sweep in self._left if not self._missing.get(sweep) for name in self._go(sweep)
        ]

    def end(self, name: str) -> list[str]:
        """Record the end of a job; return the jobs that may arrive now, in order."""
        free: list[str] = []
        sweep = self.sweep_of.get(name)
        if sweep is not None:
            self._left[sweep] -= 1
            self._room[sweep] += 1
            free += self._go(sweep)
        return free + self._release(name)

    def _go(self, sweep: str) -> list[str]:
        """Return the next trials of a sweep that waits for nothing, or those that wait for it."""
        if not self._left[sweep]:
            return self._release(sweep)
        planned = self._planned[sweep]
        number = min(self._room[sweep], len(planned))
        self._room[sweep] -= number
        return [planned.popleft() for _ in range(number)]

    def _release(self, ended: str) -> list[str]:
        free: list[str] = []
        for name in self._waiting.pop(ended, ()):
            self._missing[name] -= 1
            if not self._missing[name]:
                free += self._go(name) if name in self._left else [name]
        return free
