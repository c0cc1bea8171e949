"""Waiting for the end of jobs, also while no scheduler runs."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipollux_sched.lifecycle import Phase
from pipollux_sched.report.event_text import event_line
from pipollux_utils.text import listing

from .console import CommandError
from .reader import POLL_INTERVAL, asking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipollux_sched.client.client import Client
    from pipollux_sched.views.models import JobView


DETACHED = 130
"""Exit status after Ctrl-C, as of a program that SIGINT ends."""
_MOST_NAMED = 5
"""Jobs that a message names one by one."""


class Outage:
    """Tells once that no scheduler answers, and once that one answers again."""

    def __init__(self) -> None:
        self._begun = False

    def begin(self) -> None:
        """Note that nothing answers, and pause before the next request."""
        if not self._begun:
            typer.echo("No scheduler answers; waiting for the next one to go on.", err=True)
        self._begun = True
        time.sleep(POLL_INTERVAL)

    def end(self) -> None:
        """Note that a scheduler has answered."""
        if self._begun:
            typer.echo("A scheduler answers again.", err=True)
        self._begun = False


class JobWait:
    """Waits until jobs have ended, and prints their events.

    Args:
        state_dir: of the scheduler, which may be restarted meanwhile, and then has another port.
        jobs: as they were submitted.
        last: the id of the newest event before the submission.
        to_stderr: where the events are printed.
    """

    def __init__(
        self, state_dir: Path | None, jobs: Collection[JobView], last: int, *, to_stderr: bool
    ) -> None:
        self._state_dir, self._jobs = state_dir, jobs
        self._names = frozenset(job.name for job in jobs)
        self._last, self._to_stderr = last, to_stderr
        self._outage = Outage()

    def run(self) -> list[JobView]:
        """Return the jobs when all have ended; raise `CommandError` if one is deleted, and
        `typer.Exit` after Ctrl-C.
        """
        from pipollux_sched.client.connection import UnreachableError

        try:
            while True:
                try:
                    with asking(self._state_dir) as client:
                        return self._follow(client)
                except UnreachableError:
                    self._outage.begin()
        except KeyboardInterrupt:
            raise detached(self._jobs) from None

    def _follow(self, client: Client) -> list[JobView]:
        changed = True  # meanwhile, perhaps
        while True:
            events = client.events(self._last)
            self._outage.end()
            for event in events:
                self._last = event["id"]
                changed |= event["job"] in self._names
                line = event_line(event)
                if event["job"] in self._names and line:
                    typer.echo(line, err=self._to_stderr)
            if changed and (ended := self._ended(client)):
                return ended
            changed = False
            time.sleep(POLL_INTERVAL)

    def _ended(self, client: Client) -> list[JobView] | None:
        found = {job.name: job for job in client.jobs(trials=False) if job.name in self._names}
        if len(found) < len(self._names):
            raise CommandError(f"{min(self._names - found.keys())} was deleted meanwhile")
        return [*found.values()] if all(job.phase.ended for job in found.values()) else None


def detached(jobs: Collection[JobView]) -> typer.Exit:
    """Say that jobs go on after Ctrl-C, and return the end of the command."""
    names = sorted(job.name for job in jobs)
    if len(names) == 1:
        (name,), (job,) = names, jobs
        shown = f"sweeps {name}" if _is_sweep(job) else f"logs {name} --follow"
        text = f"{name} goes on. Follow it with: pipollux {shown}; end it with"
    else:
        few = len(names) <= _MOST_NAMED
        which, name = (
            (listing(names), " ".join(names)) if few else (f"{len(names)} jobs", "NAME...")
        )
        text = f"{which} go on. Follow them with: pipollux jobs; end them with"
    typer.echo(f"\nDetached: {text}: pipollux cancel {name}", err=True)
    return typer.Exit(DETACHED)


def exit_for(ended: Sequence[JobView]) -> None:
    """Raise `CommandError` if a job has failed."""
    failed = [job for job in ended if job.phase is Phase.FAILED]
    if failed:
        names = ", ".join(job.name for job in failed)
        shown = "sweeps" if _is_sweep(failed[0]) else "logs"
        raise CommandError(f"{names} failed; see: pipollux {shown} {failed[0].name}")


def _is_sweep(job: JobView) -> bool:
    """Return whether a job is a sweep, which has no log."""
    return job.sweep == job.name
