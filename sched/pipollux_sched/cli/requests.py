"""`pipollux cancel`, `suspend`, `resume`, `rerun`, `delete`: what users ask of submitted jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipollux_sched.errors import SchedulerError
from pipollux_sched.store import StateDir

from .console import USAGE, CommandError, OutputFormat, print_data
from .failure import one_sentence
from .jobs import print_answers
from .options import JobNames, StateDirectory, TableOutput
from .wording import one_line

if TYPE_CHECKING:
    # What it imports in turn takes longer than a shell that completes should wait.
    from pipollux_sched.client import Client


def cancel(
    names: JobNames, output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None
) -> None:
    """Cancel jobs: their processes save and end, and they are not started again.

    A job that was cancelled can be submitted again: it goes on from its last
    checkpoint.

        pipollux cancel char-lm digits
    """
    _ask_each(StateDir.choose(state_dir), names, lambda client, name: client.cancel(name), output)


def suspend(
    names: JobNames, output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None
) -> None:
    """Suspend jobs: they checkpoint and release their slots.

    pipollux suspend char-lm
    pipollux resume char-lm
    """
    _ask_each(StateDir.choose(state_dir), names, lambda client, name: client.suspend(name), output)


def resume(
    names: JobNames, output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None
) -> None:
    """Resume suspended jobs as soon as there is room for them.

    A job that was not suspended by its user stays as it is; one that has ended is
    refused.
    """
    _ask_each(StateDir.choose(state_dir), names, lambda client, name: client.resume(name), output)


def rerun(
    names: JobNames,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Start from scratch; old checkpoints are not used."),
    ] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Run jobs again that have ended, as they were submitted.

    A job that failed or was cancelled goes on from its last checkpoint. One that
    is complete can only be trained again --from-scratch. What was saved before is
    kept until the job is deleted; a job with a checkpoint_dir begins anew
    only once you have moved away what is there.

        pipollux rerun char-lm
        pipollux rerun digits --from-scratch
    """
    _ask_each(
        StateDir.choose(state_dir),
        names,
        lambda client, name: client.rerun(name, from_scratch=from_scratch),
        output,
    )


def delete(
    names: JobNames,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Delete jobs that have ended, with their logs, events and checkpoints.

    A checkpoint_dir of a job's own is left as it is. Of the events there is left
    that the job was deleted. On a terminal you are asked first; elsewhere it
    needs --yes.

        pipollux delete char-lm digits
    """
    wanted = list(dict.fromkeys(names))
    if not yes:
        if output is not OutputFormat.table or not sys.stdin.isatty():
            raise CommandError("there is nobody to ask: give --yes to delete", USAGE)
        question = f"Delete {', '.join(wanted)}, with logs, events and checkpoints?"
        if not typer.confirm(question, err=True):
            raise CommandError("nothing was deleted")
    _ask_each(
        StateDir.choose(state_dir),
        wanted,
        lambda client, name: client.delete(name),
        output,
        _print_deleted,
    )


def _print_deleted(jobs: Sequence[Mapping[str, Any]], output: OutputFormat) -> None:
    if output is not OutputFormat.table:
        print_data(list(jobs), output)
        return
    for job in jobs:
        left = f"; left is {', '.join(map(one_line, job['left']))}" if job["left"] else ""
        typer.echo(f"{job['name']}: The job was deleted{left}.")


def _ask_each(
    directory: StateDir,
    names: Sequence[str],
    ask: Callable[[Client, str], Mapping[str, Any]],
    output: OutputFormat,
    tell: Callable[[Sequence[Mapping[str, Any]], OutputFormat], None] = print_answers,
) -> None:
    """Ask the same for each job; one that is refused does not keep the others from it."""
    from pipollux_sched.client import Client

    answers: list[Mapping[str, Any]] = []
    refused: list[str] = []
    with one_sentence(), Client(directory) as client:
        for name in dict.fromkeys(names):
            try:
                answers.append(ask(client, name))
            except SchedulerError as error:
                refused.append(str(error))
                if not directory.is_served():
                    break
    tell(answers, output)
    if refused:
        raise CommandError("\n".join(refused))
