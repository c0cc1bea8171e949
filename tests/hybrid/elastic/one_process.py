"""Runs of a job in one process, for tests of what loaders give over any history of a job.

Every replica has a context and loaders of its own and runs the real code; only what carries
messages between replicas is replaced. Replicas take their steps in turn, as between two
collectives they may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job import signals
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.control_plane import ControlMessage, ControlPlane
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.telemetry.metrics import Metrics

Script = Callable[[], Iterator[list[int]]]
"""Yields, for each batch of a replica, what there is in it that counts."""


class Wire:
    """Sums of the messages of a run, by their number."""

    def __init__(self) -> None:
        self.messages: dict[int, dict[int, ControlMessage]] = {}
        self.places: dict[int, set[str]] = {}
        self.exchanged: dict[int, tuple[ControlMessage, str]] = {}
        """What replica 0 told in each exchange, and where it was; it comes first."""
        self.first: dict[int, Any] = {}
        """What replica 0 gave to each gathering; it comes first."""

    def total(self, number: int, num_replicas: int) -> ControlMessage:
        messages = self.messages[number]
        assert len(messages) == num_replicas, "a replica read before all had spoken"
        assert len(self.places[number]) == 1, f"replicas disagree: {self.places[number]}"
        return ControlMessage.read(sum(message.vector() for message in messages.values()))


class SimulatedControl(ControlPlane):
    """A control plane over a :class:`Wire`."""

    def __init__(self, wire: Wire, rank: int, num_replicas: int) -> None:
        super().__init__(1, 1.0)
        self._wire, self._rank, self._num_replicas = wire, rank, num_replicas
        self._number = self._num_gathered = self._num_exchanged = 0
        self._is_under_way = False

    @property
    def under_way(self) -> bool:
        return self._is_under_way

    def launch(self, message: ControlMessage, place: str = "") -> None:
        self._is_under_way = True
        self._number += 1
        self._wire.messages.setdefault(self._number, {})[self._rank] = message
        self._wire.places.setdefault(self._number, set()).add(place)

    def collect(self) -> ControlMessage | None:
        if not self._is_under_way:
            return None
        self._is_under_way = False
        return self._wire.total(self._number, self._num_replicas)

    def exchange(self, message: ControlMessage, place: str = "") -> ControlMessage:
        # Replicas cannot wait for each other here; only what replica 0 says matters.
        self.collect()
        self._num_exchanged += 1
        told, where = self._wire.exchanged.setdefault(self._num_exchanged, (message, place))
        assert where == place, f"replicas disagree: {where}, {place}"
        return told

    def gather(self, tensor: Any) -> list[Any]:
        self._num_gathered += 1
        first = self._wire.first.setdefault(self._num_gathered, tensor)
        return [first] + [tensor] * (self._num_replicas - 1)

    def gather_bytes(self, content: bytes, call: str = "") -> list[bytes]:  # noqa: ARG002  # base's
        return self.gather(content)


class Job:
    """A job, run after run, in one process.

    Args:
        directory: Where its checkpoints go.
        script: What each replica runs.
    """

    def __init__(self, directory: Path, script: Script) -> None:
        self.directory = directory
        self.script = script
        self.steps: list[list[list[int]]] = []
        """What each replica had, for each pass of the loop body; in the history that survived."""
        self.is_done = False
        self._num_saved = 0

    def run(
        self,
        num_replicas: int,
        *,
        stop_at: int | None = None,
        crash_at: int | None = None,
        save_at: int | None = None,
        propose: dict[int, tuple[int, int, int]] | None = None,
    ) -> None:
        """Run until a pass of the loop body, or to the end.

        Args:
            num_replicas: Replicas of this run.
            stop_at: The pass during which the job is asked to stop.
            crash_at: The pass in which it is lost.
            save_at: The pass during which a periodic checkpoint falls due.
            propose: What the goodput model proposes during which pass.
        """
        wire = Wire()
        replicas = [self._context(wire, rank, num_replicas) for rank in range(num_replicas)]
        scripts = []
        for ctx in replicas:
            contexts._context = ctx
            _ = ctx.component(Metrics)  # restores itself from the context of its replica
            scripts.append(self.script())
        passes = 0
        try:
            while passes != crash_at:
                metrics = replicas[0].component(Metrics)
                if passes == stop_at:
                    signals.request_stop()
                metrics.checkpoint_due = lambda now=passes: now == save_at  # type: ignore[method-assign]  # a clock would decide
                metrics._proposal = (propose or {}).get(passes, (0, 0, 0))
                taken: list[list[int]] = []
                for rank, (ctx, script) in enumerate(zip(replicas, scripts, strict=True)):
                    contexts._context = ctx
                    versions = self._versions()
                    try:
                        taken.append(next(script))
                    except StopIteration:
                        assert not taken, "replicas end together"
                        if rank == num_replicas - 1:
                            self.is_done = True
                            return
                    except SystemExit:
                        assert not taken, "replicas stop together"
                        if rank == 0:  # at the very beginning there is nothing to save
                            assert passes == 0 or self._versions() > versions
                        if rank == num_replicas - 1:
                            return
                    if rank == 0 and self._versions() > versions:
                        self._num_saved = len(self.steps)
                self.steps.append(taken)
                passes += 1
            # What was done since the last checkpoint is lost with the replicas.
            del self.steps[self._num_saved :]
        finally:
            self._num_saved = len(self.steps)
            for ctx, script in zip(replicas, scripts, strict=True):
                contexts._context = ctx
                script.close()  # type: ignore[attr-defined]  # scripts are generators
            contexts._context = None
            signals.reset()

    def finish(self, num_replicas: int) -> None:
        """Run to the end."""
        if not self.is_done:
            self.run(num_replicas)
        assert self.is_done

    def taken(self) -> list[int]:
        """Everything that all replicas had, pass by pass and in the order of ranks."""
        return [number for step in self.steps for replica in step for number in replica]

    def _versions(self) -> int:
        names = [path.name.removeprefix("checkpoint-") for path in self.directory.iterdir()]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _context(self, wire: Wire, rank: int, num_replicas: int) -> JobContext:
        env = JobEnvironment(rank=rank, num_replicas=num_replicas, checkpoint_dir=self.directory)
        control = SimulatedControl(wire, rank, num_replicas)
        return JobContext(env=env, control=control)
