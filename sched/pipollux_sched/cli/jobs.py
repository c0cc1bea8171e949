"""`pipollux submit`, `jobs`, `logs`: jobs of a scheduler.

`submit` asks the running scheduler. `jobs` and `logs` read what it keeps in its state
directory, so they answer as well when it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pipollux_sched.lifecycle import Phase
from pipollux_sched.report.event_text import event_line
from pipollux_sched.store import JobRecord, ListedPhase, Point, StateDir, Store

from .console import (
    USAGE,
    CommandError,
    LineFormat,
    OutputFormat,
    output_console,
    print_data,
    print_json_line,
    print_result,
)
from .failure import one_sentence
from .job_table import job_table, listed_phase
from .log_reader import LogLine, LogReader
from .options import JobName, LineOutput, StateDirectory, TableOutput
from .wording import one_line

if TYPE_CHECKING:
    # What they import in turn takes longer than printing a list of jobs.
    from pipollux_sched.spec.job import JobSpec

POLL_INTERVAL = 0.3
"""Seconds between two looks at what is being waited for."""
WATCH_INTERVAL = 1.0
"""Seconds between two looks at a list that is shown as it changes."""


def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML: the jobs.", show_default=False)
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until they have ended; exit 1 if one failed.")
    ] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Submit the jobs of a file to the running scheduler: all of them, or none.

    Where one is refused, the others are not submitted either. A job that has
    failed or was cancelled can be submitted again under its name: it goes on
    from its last checkpoint.

        pipollux submit examples/jobs.yaml --wait

    Exit code: 0 submitted (with --wait: all are complete); 1 a job was refused
    (with --wait: or has failed); 2 the file or an option is wrong. With --wait,
    --output json prints the jobs as they have ended.
    """
    from pipollux_sched.client import Client
    from pipollux_sched.spec.job import load_jobs

    specs = [located(spec, file) for spec in load_jobs(file)]
    directory = StateDir.choose(state_dir)
    with one_sentence():
        last = _last_event(directory) if wait else 0
        with Client(directory) as client:
            taken = client.submit_all(specs)
        if output is OutputFormat.table or not wait:
            print_answers(taken, output)
        if wait:
            names = {spec.name for spec in specs}
            ended = _wait_for(directory, names, last, to_stderr=output is not OutputFormat.table)
            if output is not OutputFormat.table:
                print_data([job.to_json_object() for job in ended.values()], output)
            _exit_for(ended)


def jobs(
    phase: Annotated[
        list[ListedPhase] | None,
        typer.Option(
            case_sensitive=False,
            help="Only jobs in this phase; may be repeated. Running is without Stopping, "
            "Failed without Cancelled.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the list as it changes, until Ctrl-C.")
    ] = False,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """List jobs: phase, allocation, progress.

    Works without a running scheduler too: then it shows how the last one left
    them. A job is started again after each change of its allocation, and
    after a failure; Restarts counts both.

        pipollux jobs --phase Running --phase Queued --watch
    """
    directory = StateDir.choose(state_dir)
    with one_sentence(), Store(directory.store) as store:
        if watch:
            _watch(store, phase, output)
            return
        found, points, generations = _look(store, phase)
        is_any = bool(found) or bool(store.jobs())
    if output is not OutputFormat.table:
        plain = [
            plain_job(job, points.get(job.name), generations.get(job.name, 0)) for job in found
        ]
        print_data(plain, output)
        return
    if not found:
        typer.echo(
            "No job is in that phase."
            if is_any
            else "No jobs yet; submit some with: pipollux submit FILE"
        )
        return
    console = output_console()
    print_result(job_table(found, points, generations, console))
    if any(not job.phase.ended for job in found) and not directory.is_served():
        typer.echo(
            f"No scheduler serves {directory.path}: this is how the last one left it.", err=True
        )


def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    generation: Annotated[
        int | None, typer.Option(min=1, help="Which generation.", show_default="the last one")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="Which pipeline replica.", show_default="all")
    ] = None,
    output: LineOutput = LineFormat.text,
    state_dir: StateDirectory = None,
) -> None:
    r"""Print what the replicas of a job have written.

    Each start of a job is a generation, and each pipeline replica has a log of
    its own; where there is more than one, lines begin with
    \[generation.replica].
    """
    directory = StateDir.choose(state_dir)
    with one_sentence(), Store(directory.store) as store:
        job = store.job(name)
        reader = LogReader(directory, name, generation, replica)
        for line in _lines(reader, store, name, follow):
            if output is LineFormat.json:
                print_json_line(line.to_dict())
            else:
                typer.echo(line.prefixed)
    if not reader.found:
        which = "" if generation is None else f" of generation {generation}"
        whose = "" if replica is None else f" of replica {replica}"
        raise CommandError(
            f"there is no log{whose}{which} of job '{name}', which is {job.phase.value}: "
            + job.state.message.partition("\n")[0]
        )


def located(spec: JobSpec, file: Path) -> JobSpec:
    """Return a job that can be started from any folder: its script found, its folder this one.

    One with an image stays as it is: what it names lies inside that.

    Raises:
        SpecError: there is no such script.
    """
    from pipollux_sched.spec.script import with_script_found

    if spec.image is not None:
        return spec
    found = with_script_found(spec, file)
    folder = Path(spec.working_dir or ".").expanduser().absolute()
    return found.model_copy(update={"working_dir": str(folder)})


def print_answers(jobs: Sequence[Mapping[str, Any]], output: OutputFormat) -> None:
    """Print what the scheduler answered about jobs: a line for each, or all that it said."""
    if output is not OutputFormat.table:
        print_data(list(jobs), output)
        return
    for job in jobs:
        typer.echo(f"{job['name']}: {one_line(job['message'])}")


_Look: TypeAlias = tuple[list[JobRecord], dict[str, Point], dict[str, int]]


def _look(store: Store, phases: Sequence[ListedPhase] | None) -> _Look:
    found = [job for job in store.jobs() if not phases or listed_phase(job) in phases]
    return found, store.last_points(), store.num_generations()


def _watch(store: Store, phases: Sequence[ListedPhase] | None, output: OutputFormat) -> None:
    """Show the list anew every second, until Ctrl-C."""
    from rich.live import Live

    console = output_console()
    if output is not OutputFormat.table or not console.is_terminal:
        raise CommandError(
            "--watch shows a table on a terminal; for programs there is: "
            "pipollux events --follow --output json",
            USAGE,
        )
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(job_table(*_look(store, phases), console), refresh=True)
            time.sleep(WATCH_INTERVAL)


def plain_job(job: JobRecord, point: Point | None, generations: int) -> dict[str, Any]:
    """Return a job as plain data, with its last report and how often it was started."""
    progress = None if point is None else dict(vars(point))
    return {**job.to_json_object(), "num_generations": generations, "progress": progress}


def _last_event(directory: StateDir) -> int:
    if not directory.has_store():
        return 0
    with Store(directory.store) as store:
        return store.last_event()


def _wait_for(
    directory: StateDir, names: set[str], last: int, *, to_stderr: bool
) -> dict[str, JobRecord]:
    """Tell what happens to jobs until all have ended; return them then."""
    with Store(directory.store) as store:
        while True:
            served = directory.is_served()  # asked first, so that the last events are not missed
            for event in store.events(last):
                last = event["id"]
                line = event_line(event)
                if event["job"] in names and line:
                    typer.echo(line, err=to_stderr)
            found = {job.name: job for job in store.jobs() if job.name in names}
            if len(found) < len(names):
                raise CommandError(f"{min(names - found.keys())} was deleted meanwhile")
            if all(job.phase.ended for job in found.values()):
                return found
            if not served:
                raise CommandError(
                    "the scheduler has ended before the jobs have; they go on when it is back"
                )
            time.sleep(POLL_INTERVAL)


def _exit_for(ended: Mapping[str, JobRecord]) -> None:
    failed = [name for name, job in ended.items() if job.phase is Phase.FAILED]
    if failed:
        raise CommandError(f"{', '.join(failed)} failed; see: pipollux logs {failed[0]}")


def _lines(reader: LogReader, store: Store, name: str, follow: bool) -> Iterator[LogLine]:
    while True:
        ended = store.job(name).phase.ended  # asked first, so that the last lines are not missed
        yield from reader.read()
        if ended or not follow:
            yield from reader.rest()
            return
        time.sleep(POLL_INTERVAL)
