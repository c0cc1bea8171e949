"""A thread that reads the state of the GPUs now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from .foreign import ForeignUse
from .probe_process import SILENT, GpuProbe
from .state import GpuReading, GpuState, Use

INTERVAL = 10.0
"""Seconds between two readings."""
SHARE = 0.02
"""Largest share of the time for readings: without persistence mode the driver is slow to start."""
JOIN_TIMEOUT = 2.0
"""Seconds that the thread has to end; one that waits for a hanging driver does not."""


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """The state of a GPU or MIG slice that is a slot."""

    index: int | None = None
    """The index of its GPU; None: it was never seen."""
    parent: str = ""
    """The UUID of the GPU that it is, or lies on."""
    name: str = ""
    use: Use = field(default_factory=Use)
    problem: str = ""
    """Why nothing must be started on it; empty: it is healthy."""
    foreign: str = ""
    """The processes of others on it."""

    @property
    def reason(self) -> str:
        """Why no job may start on it, as a sentence without a subject; empty: one may."""
        used = f"used by {self.foreign}" if self.foreign else ""
        return "; ".join(filter(None, (self.problem, used)))


def device_states(
    reading: GpuReading, wanted: Collection[str], before: Mapping[str, DeviceState]
) -> dict[str, DeviceState]:
    """Return the states of the wanted GPUs and slices, by UUID, with those of an earlier reading.

    One that the reading does not contain keeps its name and index, and has a problem.
    """
    there = {
        uuid: DeviceState(
            index=gpu.index, parent=gpu.uuid, name=gpu.name, use=use, problem=gpu.problem
        )
        for gpu in reading.gpus
        for uuid, use in gpu.devices()
    }
    found = {}
    for uuid in wanted:
        known = before.get(uuid, DeviceState())
        missing = replace(known, use=Use(), problem=_why_missing(uuid, known, reading))
        found[uuid] = there.get(uuid, missing)
    return found


def _why_missing(uuid: str, known: DeviceState, reading: GpuReading) -> str:
    if reading.error:
        return f"its state cannot be read: {reading.error}"
    if known.index in reading.silent:
        return SILENT
    gpu = next((gpu for gpu in reading.gpus if gpu.uuid in (uuid, known.parent) and gpu.uuid), None)
    if gpu is not None:
        return gpu.problem or _changed(gpu, uuid)
    nameless = [gpu.problem for gpu in reading.gpus if not gpu.uuid and gpu.problem]
    if nameless:  # which GPU this is, the driver cannot tell any more
        return nameless[0]
    return "the driver does not list it"


def _changed(gpu: GpuState, uuid: str) -> str:
    if gpu.uuid == uuid:
        return "it is in MIG mode now; start the scheduler again to use its slices"
    return "this MIG slice does not exist any more"


class GpuMonitor:
    """Keeps the states of some GPUs current, in a thread.

    Args:
        probe: reads them.
        wanted: the UUIDs of the GPUs and slices that are slots.
        is_ours: see `ForeignUse`.
    """

    def __init__(
        self,
        probe: GpuProbe,
        wanted: Collection[str],
        is_ours: Callable[[Mapping[str, str]], bool],
        *,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe, self._interval, self._clock = probe, interval, clock
        self._foreign = ForeignUse(is_ours, clock)
        self.wanted = frozenset(wanted)
        self.held: frozenset[str] = frozenset()
        """Those that jobs hold; the owner replaces it."""
        self.states: Mapping[str, DeviceState] = {}
        """The latest states, by UUID: a new mapping each time, so that readers need no lock."""
        self.gpus: tuple[GpuState, ...] = ()
        """All GPUs at the last reading that succeeded."""
        self.error = ""
        """Why none has succeeded yet; empty: one has."""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipollux-gpus", daemon=True)

    def start(self, first: GpuReading) -> None:
        """Publish a reading, and begin to make further ones."""
        self.note(first)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that waits for the driver ends later."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT)

    def note(self, reading: GpuReading) -> None:
        """Publish the states in a reading."""
        states = device_states(reading, self.wanted, self.states)
        held = self.held
        for uuid, state in states.items():
            # Without a list of processes (another user's driver, WSL) nothing is known of others.
            if state.use.processes is not None:
                foreign = self._foreign.look(uuid, state.use.processes, held=uuid in held)
                states[uuid] = replace(state, foreign=foreign)
        if not reading.error:
            self.gpus, self.error = reading.gpus, ""
        elif not self.gpus:
            self.error = reading.error
        self.states = states

    def _run(self) -> None:
        pause = self._interval
        while not self._ending.wait(pause):
            began = self._clock()
            self.note(self._probe.read())
            pause = max(self._interval, (self._clock() - began) / SHARE)
        self._probe.close()
