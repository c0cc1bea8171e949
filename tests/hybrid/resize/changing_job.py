"""A job whose replicas come and go, started and read by tests."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pipollux_hybrid.resize.rendezvous_folder import RendezvousFolder
from tests.hybrid.resize.changing_training import EPOCHS, SIZE
from tests.programs import Forked, Replicas, own_host
from tests.waiting import until

SCRIPT = Path(__file__).with_name("changing_training.py")


class ChangingJob:
    """Replicas of the training script; a context manager that kills what still runs.

    Args:
        folder: for results and the rendezvous.
        repository: where the tests are.
        settings: variables of all replicas, such as DATA and CHANGES; PROCESSES of each.
    """

    script = SCRIPT

    def __init__(self, folder: Path, repository: Path, **settings: str) -> None:
        self.results = folder / "results"
        self.results.mkdir(parents=True)
        self.rendezvous = RendezvousFolder(folder / "rendezvous")
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")]),
            "RESULTS": str(self.results),
            "PIPOLLUX_RENDEZVOUS": str(self.rendezvous.folder),
            "PIPOLLUX_PROGRESS": "0",
            # What a fit makes of batch sizes is the machine's doing.
            "PIPOLLUX_HINTS_INTERVAL": "1000000",
            **settings,
        }
        self.processes = int(settings.get("PROCESSES", "1"))
        self.epochs = int(settings.get("EPOCHS", EPOCHS))
        self._started = ExitStack()
        self.programs: list[Forked] = []

    def begin(self, num_replicas: int) -> None:
        """Start the replicas that begin."""
        count = num_replicas * self.processes
        replicas = Replicas(self.script, count, environment=self.environment)
        self.programs += self._started.enter_context(replicas).programs

    def add(self, **settings: str) -> Forked:
        """Start a replica that joins, which has one process."""
        told = {**self.environment, "NCCL_HOSTID": own_host(), **settings}
        program = Forked(self.script, environment=told)
        self.programs.append(self._started.enter_context(program))
        return program

    def add_stages(self, **settings: str) -> list[Forked]:
        """Start a replica that joins, with a process for each stage."""
        told = {**self.environment, **settings}
        count = int(told.get("PROCESSES", "1"))
        replicas = Replicas(self.script, count, environment=told)
        self.programs += (programs := self._started.enter_context(replicas).programs)
        return programs

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Return when something has happened; that a replica has failed is an error."""

        def happened() -> object:
            for program in self.programs:
                assert program.poll() in (None, 0, -9), program.errors
            codes = [program.poll() for program in self.programs]
            ended = bool(codes) and None not in codes
            found = condition()
            assert found or not ended, f"all replicas have ended before: {what}"
            return found

        until(happened, what)

    def wait_until_at(self, step: int) -> None:
        """Return when a replica waits at a step for others to join or leave."""
        self.wait_for(lambda: list(self.results.glob(f"waits-{step}-*")), f"step {step}")

    def wait(self) -> None:
        """Return when all replicas have ended well."""
        self.wait_for(
            lambda: all(program.poll() is not None for program in self.programs), "the end"
        )

    def stop_at(self, step: int, num_replicas: int) -> None:
        """Begin, and stop two steps later than a step."""
        gate = self.results / f"hold-{step}"
        gate.touch()
        self.begin(num_replicas)
        for what in ("reached", "asked"):
            ranks = range(num_replicas * self.processes)
            files = [self.results / f"{what}-{step}-{rank}" for rank in ranks]
            self.wait_for(lambda files=files: all(path.exists() for path in files), what)
            for program in self.programs if what == "reached" else ():
                program.send_signal(signal.SIGTERM)
        gate.unlink()
        assert {program.wait() for program in self.programs} == {143}
        self.programs.clear()

    def ask_to_leave(self, rank: int, num_replicas: int) -> None:
        """Have a replica leave, as soon as the job tells that there are so many."""

        def told() -> tuple[str, ...]:
            announcement = self.rendezvous.announcement()
            members = announcement.membership.replicas if announcement is not None else ()
            return members if len(members) == num_replicas else ()

        self.wait_for(told, f"{num_replicas} replicas")
        self.rendezvous.ask_to_leave(told()[rank])

    def errors(self) -> list[str]:
        """Return what each replica wrote to its standard error."""
        return [program.errors for program in self.programs]

    def lines(self) -> list[dict[str, Any]]:
        """Return what all replicas wrote of their steps."""
        files = sorted(self.results.glob("[0-9]*.txt"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def states(self) -> list[dict[str, Tensor]]:
        """Return the final state of the model from each process."""
        return [torch.load(x) for x in sorted(self.results.glob("state-*.pt"))]

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """Return the last lines of each step, in the order of ranks, and of stages."""
        found = defaultdict(list)
        for line in self.lines():
            if line["ends"]:
                found[line["step"]].append(line)
        return {step: sorted(found[step], key=_process) for step in sorted(found)}

    def check(self) -> list[tuple[int, int]]:
        """Check that nothing was lost, doubled, or differs between replicas.

        Returns:
            The first steps with another number of replicas, and that number.
        """
        changes: list[tuple[int, int]] = []
        for step, lines in self.steps().items():
            replicas = lines[0]["replicas"]
            everyone = itertools.product(range(replicas), range(self.processes))
            assert [_process(line) for line in lines] == list(everyone), step
            assert {line["replicas"] for line in lines} == {replicas}
            for stage in range(self.processes):
                found = {line["parameters"] for line in lines[stage :: self.processes]}
                assert len(found) == 1, (step, stage)
            for rank in range(replicas):
                found = {tuple(line["numbers"]) for line in lines if line["rank"] == rank}
                assert len(found) == 1, (step, rank)
            assert len({line["rate"] for line in lines}) == 1, step
            if not changes or changes[-1][1] != replicas:
                changes.append((step, replicas))
        for epoch, stage in itertools.product(range(self.epochs), range(self.processes)):
            lines = [x for x in self.lines() if (x["epoch"], x["stage"]) == (epoch, stage)]
            taken = Counter(number for line in lines for number in line["numbers"])
            assert taken == Counter(range(SIZE))
        totals = [json.loads(x.read_text()) for x in self.results.glob("found-*.json")]
        assert len(totals) == changes[-1][1] * self.processes
        whole = {"sum": sum(range(SIZE)), "count": SIZE, "checked": SIZE}
        assert all(found == {k: self.epochs * v for k, v in whole.items()} for found in totals)
        return changes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()


def _process(line: dict[str, Any]) -> tuple[int, int]:
    return line["rank"], line["stage"]
