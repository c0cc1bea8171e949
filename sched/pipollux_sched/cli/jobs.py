"""`pipollux submit`, `jobs`, `cancel`, `logs`: jobs of a scheduler.

`submit` and `cancel` ask the running scheduler. `jobs` and `logs` read what it keeps in its state
directory, so they answer as well when it has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipollux_sched.errors import SchedulerError
from pipollux_sched.event_line import event_line
from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import JobRecord, Point, StateDir, Store

from .console import CommandError, OutputFormat, print_data
from .failure import one_sentence
from .job_table import print_jobs
from .log_reader import LogReader
from .options import StateDirectory

if TYPE_CHECKING:
    # What they import in turn takes longer than printing a list of jobs.
    from pipollux_sched.client import Client
    from pipollux_sched.spec import JobSpec

POLL_INTERVAL = 0.3
"""Seconds between two looks at what is being waited for."""

JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")]


class ListFormat(StrEnum):
    """How a list is printed."""

    table = "table"
    json = "json"


def submit(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML: the jobs.", show_default=False)
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until they have ended; exit 1 if one failed.")
    ] = False,
    state_dir: StateDirectory = None,
) -> None:
    """Submit the jobs of a file to the running scheduler.

    A job that has failed or was cancelled can be submitted again under its
    name: it goes on from its last checkpoint.

        pipollux submit examples/jobs.yaml --wait

    Exit code: 0 submitted (with --wait: all are complete); 1 a job was refused
    (with --wait: or has failed); 2 the file or an option is wrong.
    """
    from pipollux_sched.client import Client
    from pipollux_sched.spec import load_jobs

    specs = [located(spec, file) for spec in load_jobs(file)]
    directory = StateDir.choose(state_dir)
    with one_sentence():
        last = _last_event(directory) if wait else 0
        with Client(directory) as client:
            refused = _submit(client, specs)
        if refused:
            raise CommandError("\n".join(refused))
        if wait:
            _wait_for(directory, {spec.name for spec in specs}, last)


def jobs(
    output: Annotated[
        ListFormat, typer.Option("--output", "-o", help="How to print them.")
    ] = ListFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """List jobs: phase, allocation, progress.

    Works without a running scheduler too: then it shows how the last one left
    them. A job is launched again after each change of its allocation, and
    after a failure; Restarts counts both.
    """
    directory = StateDir.choose(state_dir)
    with one_sentence(), Store(directory.store) as store:
        found, points, launches = store.jobs(), store.last_points(), store.num_launches()
    if output is ListFormat.json:
        print_data([_plain(job, points.get(job.name)) for job in found], OutputFormat.json)
        return
    print_jobs(found, points, launches)
    if any(not job.phase.ended for job in found) and not directory.is_served():
        typer.echo(
            f"No scheduler serves {directory.path}: this is how the last one left it.", err=True
        )


def cancel(name: JobName, state_dir: StateDirectory = None) -> None:
    """Cancel a job: its processes save and end, and it is not started again."""
    from pipollux_sched.client import Client

    with one_sentence(), Client(StateDir.choose(state_dir)) as client:
        job = client.cancel(name)
    typer.echo(f"{name}: {job['message']}")


def logs(
    name: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    generation: Annotated[
        int | None, typer.Option(min=1, help="Which launch.", show_default="the last one")
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="Which pipeline replica.", show_default="all")
    ] = None,
    state_dir: StateDirectory = None,
) -> None:
    r"""Print what the replicas of a job have written.

    Each launch of a job is a generation, and each pipeline replica has a log of
    its own; where there is more than one, lines begin with
    \[generation.replica].
    """
    directory = StateDir.choose(state_dir)
    with one_sentence(), Store(directory.store) as store:
        job = store.job(name)
        reader = LogReader(directory, name, generation, replica)
        for line in _lines(reader, store, name, follow):
            typer.echo(line)
    if not reader.found:
        which = "" if generation is None else f" of generation {generation}"
        whose = "" if replica is None else f" of replica {replica}"
        raise CommandError(
            f"there is no log{whose}{which} of job '{name}', which is {job.phase.value}: "
            + job.state.message.partition("\n")[0]
        )


def located(spec: JobSpec, file: Path) -> JobSpec:
    """Return a job that can be started from any folder: its script found, its folder this one.

    Raises:
        SpecError: there is no such script.
    """
    from pipollux_sched.script import resolve_script

    script = resolve_script(spec, file, must_exist=True).path
    folder = Path(spec.working_dir or ".").expanduser().absolute()
    return spec.model_copy(update={"script": str(script), "working_dir": str(folder)})


def _submit(client: Client, specs: Sequence[JobSpec]) -> list[str]:
    """Submit what is taken; return why the rest is not, a sentence each."""
    refused = []
    for spec in specs:
        try:
            job = client.submit(spec)
        except SchedulerError as error:
            if str(error) not in refused:
                refused.append(str(error))
        else:
            typer.echo(f"{job['name']}: {job['message']}")
    return refused


def _plain(job: JobRecord, point: Point | None) -> dict[str, Any]:
    progress = None if point is None else dict(vars(point))
    return {**job.to_json_object(), "progress": progress}


def _last_event(directory: StateDir) -> int:
    if not directory.has_store():
        return 0
    with Store(directory.store) as store:
        return store.last_event()


def _wait_for(directory: StateDir, names: set[str], last: int) -> None:
    """Tell what happens to jobs until all have ended."""
    with Store(directory.store) as store:
        while True:
            served = directory.is_served()  # asked first, so that the last events are not missed
            for event in store.events(last):
                last = event["id"]
                line = event_line(event)
                if event["job"] in names and line:
                    typer.echo(line)
            ended = {job.name: job for job in store.jobs() if job.name in names and job.phase.ended}
            if len(ended) == len(names):
                _exit_for(ended)
                return
            if not served:
                raise CommandError(
                    "the scheduler has ended before the jobs have; they go on when it is back"
                )
            time.sleep(POLL_INTERVAL)


def _exit_for(ended: Mapping[str, JobRecord]) -> None:
    failed = [name for name, job in ended.items() if job.phase is Phase.FAILED]
    if failed:
        raise CommandError(f"{', '.join(failed)} failed; see: pipollux logs {failed[0]}")


def _lines(reader: LogReader, store: Store, name: str, follow: bool) -> Iterator[str]:
    while True:
        ended = store.job(name).phase.ended  # asked first, so that the last lines are not missed
        yield from reader.read()
        if ended or not follow:
            yield from reader.rest()
            return
        time.sleep(POLL_INTERVAL)
