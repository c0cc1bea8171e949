"""Steps without an attempt: kill them, and report those that Slurm cannot end.

A slurmctld that is killed forgets its last seconds. A step that ended in them is listed for as long
as its allocation lasts, keeps its CPUs and GPUs, and no signal ends it: its node is released. The
same is done for a process that cannot be killed, such as one that waits for a file system.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipollux_sched.backend.base import ReplicaKey, Signal

from .commands import SignalSender
from .nodes import is_silent
from .output import StepLine
from .replica_step import signal_command
from .snapshot import SlurmSnapshot

_LOG = logging.getLogger(__name__)
STUCK_AFTER = 60.0
"""Seconds after its first SIGKILL after which a step on a responsive node counts as stuck."""


class StuckStep(NamedTuple):
    """A step that stays listed."""

    pool: int
    """Its allocation."""
    node: str
    why: str
    """The message about its node, in one sentence."""


class Orphans:
    """Kills steps that belong to no attempt."""

    def __init__(self, signals: SignalSender, clock: Callable[[], float] = time.monotonic) -> None:
        self._signals = signals
        self._clock = clock
        self._since: dict[str, float] = {}
        self._stuck: dict[str, StuckStep] = {}

    @property
    def stuck(self) -> tuple[StuckStep, ...]:
        """The listed steps that Slurm cannot end; for any thread."""
        return tuple(self._stuck.values())

    def look(self, found: Mapping[ReplicaKey, StepLine], snapshot: SlurmSnapshot) -> None:
        """Kill the given steps, and record which of them cannot be ended.

        `ClusterUnavailableError`: a signal cannot be sent.
        """
        now = self._clock()
        since: dict[str, float] = {}
        stuck: dict[str, StuckStep] = {}
        for key, step in found.items():
            since[step.step] = self._since.get(step.step, now)
            if is_silent(snapshot.nodes.get(step.node)):
                since[step.step] = now
            if now < since[step.step] + STUCK_AFTER:
                command = signal_command(step.step, insist=True)
                self._signals.send((key, Signal.KILL), command)
            else:
                stuck[step.step] = self._stuck.get(step.step) or _stuck_step(step)
        self._since, self._stuck = since, stuck


def _stuck_step(step: StepLine) -> StuckStep:
    why = f"Slurm lists step {step.step} ({step.name}) there, which is over and cannot be ended."
    _LOG.warning(
        "node %s is released: Slurm lists step %s (%s) there, and does not end it. It keeps its "
        "CPUs and GPUs until allocation %s ends",
        *(step.node, step.step, step.name, step.job),
    )
    return StuckStep(step.job, step.node, why)
