"""Commands that change jobs: `pipollux submit`, `cancel`, `suspend`, `resume`, and others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pipollux_sched.errors import PipolluxError, SchedulerError
from pipollux_utils.paths import expanded
from pipollux_utils.text import clean

from .console import USAGE, CommandError, OutputFormat, print_data
from .options import After, JobNames, StateDirectory, TableOutput
from .reader import asking
from .server_choice import chosen_server
from .waiting import JobWait, exit_for

if TYPE_CHECKING:
    # Their own imports would make shell completion slow.
    from pipollux_sched.client.client import Client
    from pipollux_sched.spec.job import JobSpec
    from pipollux_sched.views.models import (
        DeletedJobView,
        EstimateView,
        JobForecastView,
        JobView,
    )

STANDARD_INPUT = Path("-")
T = TypeVar("T", "JobView", "DeletedJobView")


def submit(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="YAML: the jobs to submit; '-' reads standard input.",
            show_default=False,
        ),
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the jobs end; exit 1 if one fails.")
    ] = False,
    team: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Team of the jobs.", show_default="as in the file"),
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(metavar="CLASS", help="Priority of the jobs.", show_default="as in the file"),
    ] = None,
    after: After = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Forecast when the jobs would start and end; submit none."),
    ] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Submit the jobs of a file to the running scheduler.

    If one job is refused, none is submitted. A failed or cancelled job can be
    submitted again under its name; it resumes from its last checkpoint.

        pipollux submit examples/jobs.yaml --wait

    With --dry-run, the scheduler checks the jobs and simulates what would happen if
    they were submitted now. Intervals hold with 80 %.

    Scripts are searched for in the folder of the file, then in the current folder.
    With --server, paths are absolute and belong to the scheduler's machine.

    --wait goes on while the scheduler is restarted. Ctrl-C ends the waiting, not the
    jobs.

    Exit code: 0 submitted (with --wait: all jobs are complete); 1 a job was refused
    (with --wait: or has failed); 2 the file or an option is invalid; 130 the waiting
    was ended by Ctrl-C. With --wait, --output json prints the final state of the jobs.
    """
    given = {"team": team, "priority": priority}
    chosen = {name: value for name, value in given.items() if value is not None}
    from_file = None if file == STANDARD_INPUT else file
    specs = [
        prepared(spec, from_file, after or ()).model_copy(update=chosen) for spec in _jobs_of(file)
    ]
    told = output is OutputFormat.table
    with asking(state_dir) as client:
        if dry_run:
            if wait:
                raise CommandError("--dry-run submits nothing to wait for; leave --wait out", USAGE)
            _print_forecasts(client.forecast_new(specs), output)
            return
        last = client.last_event() if wait else 0
        taken = client.submit_all(specs)
        if told or not wait:
            _print_answers(taken, output, _message)
    if wait:
        ended = JobWait(state_dir, taken, last, to_stderr=not told).run()
        if not told:
            print_data([job.to_dict() for job in ended], output)
        exit_for(ended)


def _jobs_of(file: Path) -> list[JobSpec]:
    from pipollux_sched.spec.job import SpecError, load_jobs, parse_jobs

    if file != STANDARD_INPUT:
        return load_jobs(file)
    try:
        return parse_jobs(sys.stdin.buffer.read().decode("utf-8"), "standard input")
    except UnicodeDecodeError:
        raise SpecError("standard input: is not UTF-8 text; give a job file in YAML") from None
    except (AttributeError, OSError):  # it is closed
        raise SpecError("standard input: cannot be read; give a job file in YAML") from None


def _print_forecasts(found: Sequence[JobForecastView], output: OutputFormat) -> None:
    if output is not OutputFormat.table:
        print_data([job.to_dict() for job in found], output)
        return
    for job in found:
        typer.echo(f"{job.job}: {_foreseen(job)}")


def _foreseen(job: JobForecastView) -> str:
    now = job.made_at
    if job.note and job.end.low is None:
        return f"no forecast: {job.note}"
    told = f"would start {_when(job.start, now)}, and end {_when(job.end, now)}"
    return f"{told}; {job.note}" if job.note else told


def _when(estimate: EstimateView | None, now: float) -> str:
    from .forecast_text import spell_estimate

    if estimate is None or estimate.low is None:
        return "at a time that is not known"
    text = spell_estimate(estimate, now)
    return text if text.startswith(("now", "between")) else f"at {text}"


def cancel(
    names: JobNames, output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None
) -> None:
    """Cancel jobs: their processes save and end.

    A cancelled job can be submitted again under its name; it resumes from its last
    checkpoint.

        pipollux cancel char-lm digits
    """
    _ask_each(state_dir, names, lambda client, name: client.cancel(name), output, _message)


def suspend(
    names: JobNames, output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None
) -> None:
    """Suspend jobs: they save a checkpoint and release their slots.

    Suspended jobs hold no slots. When they are resumed, they continue from their
    last checkpoint.

        pipollux suspend char-lm
        pipollux resume char-lm
    """
    _ask_each(state_dir, names, lambda client, name: client.suspend(name), output, _message)


def resume(
    names: JobNames, output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None
) -> None:
    """Resume suspended jobs; they start when slots are free.

    Jobs that are not suspended stay unchanged; jobs that have ended are refused.
    """
    _ask_each(state_dir, names, lambda client, name: client.resume(name), output, _message)


def rerun(
    names: JobNames,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start without the earlier checkpoints.")
    ] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Run ended jobs again, with their original spec.

    A failed or cancelled job resumes from its last checkpoint. A complete job needs
    --from-scratch. Earlier checkpoints are kept until the job is deleted; a job with
    its own checkpoint_dir starts from scratch only after you have moved the contents
    of that folder away.

        pipollux rerun char-lm
        pipollux rerun digits --from-scratch
    """
    _ask_each(
        state_dir,
        names,
        lambda client, name: client.rerun(name, from_scratch=from_scratch),
        output,
        _message,
    )


def update(
    names: JobNames,
    team: Annotated[
        str | None, typer.Option(metavar="NAME", help="New team of the jobs.", show_default=False)
    ] = None,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Move jobs to another team.

    Running jobs keep running. From the next decision on, the jobs count towards the
    quota and limits of the new team. Jobs that have ended can be moved, too.

        pipollux update char-lm digits --team vision
    """
    if team is None:
        raise CommandError("there is nothing to update; give a team with --team NAME", USAGE)
    _ask_each(
        state_dir,
        names,
        lambda client, name: client.move(name, team),
        output,
        lambda job: f"The job belongs to team {job.spec['team']}.",
    )


def delete(
    names: JobNames,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Delete ended jobs, with their logs, events and checkpoints.

    A job's own checkpoint_dir is kept, and so is the event of the deletion. Deletion
    asks for confirmation on a terminal, and needs --yes elsewhere.

        pipollux delete char-lm digits
    """
    wanted = list(dict.fromkeys(names))
    if not yes:
        if output is not OutputFormat.table or not sys.stdin.isatty():
            raise CommandError("cannot ask for confirmation: give --yes to delete", USAGE)
        question = f"Delete {', '.join(wanted)}, with logs, events and checkpoints?"
        if not typer.confirm(question, err=True):
            raise CommandError("nothing was deleted")
    _ask_each(state_dir, wanted, lambda client, name: client.delete(name), output, _deleted)


def _deleted(job: DeletedJobView) -> str:
    left = f"; left is {', '.join(map(clean, job.left))}" if job.left else ""
    return f"The job was deleted{left}."


def prepared(spec: JobSpec, file: Path | None, after: Sequence[str]) -> JobSpec:
    """Return a job as it is submitted: with absolute paths, and the dependencies of options."""
    ready = located if chosen_server() is None else _absolute
    return _with_dependencies(ready(spec, file), after)


def located(spec: JobSpec, file: Path | None) -> JobSpec:
    """Return a job with absolute paths, except in an image; `SpecError`: the script is missing."""
    from pipollux_sched.spec.script import with_script_found

    if spec.image is not None:
        return spec
    found = with_script_found(spec, file)
    folder = expanded(spec.working_dir or ".").absolute()
    return found.model_copy(update={"working_dir": str(folder)})


def _absolute(spec: JobSpec, _file: Path | None) -> JobSpec:
    """Check a job for a scheduler on another machine: raise `SpecError` for a relative path."""
    from pipollux_sched.spec.job import SpecError

    if spec.image is not None:
        return spec
    paths = {
        "script": spec.script,
        "working_dir": spec.working_dir,
        "python": spec.python,
    }
    for name, path in paths.items():
        if path is not None and not Path(path).is_absolute():
            raise SpecError(
                f"job '{spec.name}': {name}: {path} is relative, and --server may be another "
                "machine; give the absolute path that it has there"
            )
    if spec.script is None and spec.working_dir is None:
        raise SpecError(
            f"job '{spec.name}': working_dir: is missing, and --server may be another machine; "
            "give the absolute path of the folder that the job runs in there"
        )
    folder = spec.working_dir or (spec.script and str(Path(spec.script).parent))
    return spec.model_copy(update={"working_dir": folder})


def _with_dependencies(spec: JobSpec, after: Sequence[str]) -> JobSpec:
    """Return a job that waits for the jobs in options, too; the options win over the job file."""
    from pipollux_sched.spec.dependencies import parse_dependency

    given = {entry.job: entry for entry in (*spec.after, *map(parse_dependency, after))}
    return spec.model_copy(update={"after": tuple(given.values())})


def _message(job: JobView) -> str:
    return clean(job.message)


def _print_answers(jobs: Sequence[T], output: OutputFormat, sentence: Callable[[T], str]) -> None:
    if output is not OutputFormat.table:
        print_data([job.to_dict() for job in jobs], output)
        return
    for job in jobs:
        typer.echo(f"{job.name}: {sentence(job)}")


def _ask_each(
    state_dir: Path | None,
    names: Sequence[str],
    ask: Callable[[Client, str], T],
    output: OutputFormat,
    sentence: Callable[[T], str],
) -> None:
    """Send the same request for each job; a refusal does not stop the others."""
    from pipollux_sched.client.connection import UnreachableError

    answers: list[T] = []
    refused: list[str] = []
    with asking(state_dir) as client:
        for name in dict.fromkeys(names):
            try:
                answers.append(ask(client, name))
            except SchedulerError as error:
                refused.append(str(error))
                if isinstance(error, UnreachableError):
                    break
    _print_answers(answers, output, sentence)
    if refused:
        raise PipolluxError(*refused)
