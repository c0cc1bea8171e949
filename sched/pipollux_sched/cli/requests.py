"""`pipollux cancel`, `suspend`, `resume`: what users ask of jobs that were submitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipollux_sched.errors import SchedulerError
from pipollux_sched.store import StateDir

from .console import CommandError, OutputFormat
from .failure import one_sentence
from .jobs import print_answers
from .options import JobNames, StateDirectory, TableOutput

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
    """Let jobs save and hold nothing until they are resumed.

    pipollux suspend char-lm
    pipollux resume char-lm
    """
    _ask_each(StateDir.choose(state_dir), names, lambda client, name: client.suspend(name), output)


def resume(
    names: JobNames, output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None
) -> None:
    """Let jobs that were suspended go on as soon as there is room for them.

    A job that was not suspended by its user stays as it is; one that has ended is
    refused.
    """
    _ask_each(StateDir.choose(state_dir), names, lambda client, name: client.resume(name), output)


def _ask_each(
    directory: StateDir,
    names: Sequence[str],
    ask: Callable[[Client, str], Mapping[str, Any]],
    output: OutputFormat,
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
    print_answers(answers, output)
    if refused:
        raise CommandError("\n".join(refused))
