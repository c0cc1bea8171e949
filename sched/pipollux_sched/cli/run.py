"""`pipollux run`: submit one script without a job file, and follow its log until it ends."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipollux_sched.lifecycle import Phase
from pipollux_sched.store import JobOrder, JobQuery, ListedPhase
from pipollux_utils.text import clean, first_line

from .console import USAGE, CommandError
from .logs import LogLine, LogReader
from .options import After, StateDirectory
from .reader import POLL_INTERVAL, asking, reading
from .submit import prepared
from .waiting import Outage, detached

if TYPE_CHECKING:
    from pipollux_sched.client.client import Client
    from pipollux_sched.spec.job import JobSpec
    from pipollux_sched.views.models import JobView

NUMBERS_TRIED = 20
"""Numbers that are tried for a name while other jobs take them."""
_MOST_OF_STEM = 50
_PYTHON = re.compile(r"(pypy|python)[0-9.]*")


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="[python] SCRIPT [ARGS]...",
            help="The script, after '--'. The scheduler starts Python, once per replica.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the job.", show_default="the script's, numbered"
        ),
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages of a replica.")] = 1,
    min_replicas: Annotated[int, typer.Option(min=1, help="Smallest number of replicas.")] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of replicas.", show_default="as in a job file"),
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="NAME[=VALUE]",
            help="Environment variable, by default with its value here; may be repeated.",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Container image that has the script.", show_default="none"
        ),
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Required GPU type.", show_default="any")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="KIND", help="gpu or cpu slots.", show_default="any")
    ] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts after failures.")] = 0,
    team: Annotated[
        str | None, typer.Option(metavar="NAME", help="Team of the job.", show_default="your first")
    ] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="CLASS", help="Priority class.", show_default="none")
    ] = None,
    after: After = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the name of the job and return.")
    ] = False,
    state_dir: StateDirectory = None,
) -> None:
    """Run one script as a job, without a job file, and print its log until it ends.

    The working directory of the job is the current folder. Ctrl-C detaches: the job
    goes on. The command survives a restart of the scheduler.

        pipollux run --max-replicas 4 -- python train.py --lr 0.1

    Exit code: 0 the job is complete; 1 it failed, was cancelled or refused; 2 the
    command line is invalid; 130 detached by Ctrl-C.
    """
    program, args = _split(command)
    if image is None:
        _check_is_python(program.get("script", ""))
    given = {
        "name": name or "run",
        **program,
        "args": args,
        "num_stages": stages,
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "environment": dict(map(_variable, environment or ())),
        "image": image,
        "gpu_type": gpu_type,
        "device": device,
        "max_restarts": max_restarts,
        "team": team,
        "priority": priority,
    }
    from pipollux_sched.spec.job import parse_job

    known = {field: value for field, value in given.items() if value is not None}
    spec = prepared(parse_job(known, "run"), None, after or ())
    with asking(state_dir) as client:
        job = client.submit(spec) if name else _submit_numbered(client, spec)
    if detach:
        typer.echo(job.name)
        return
    typer.echo(f"{job.name}: {clean(job.message)}", err=True)
    try:
        ended = _follow(state_dir, job)
    except KeyboardInterrupt:
        raise detached([job]) from None
    if ended.phase is Phase.FAILED:
        how = "was cancelled" if ended.listed_phase is ListedPhase.CANCELLED else "failed"
        raise CommandError(f"{ended.name} {how}: {clean(first_line(ended.message))}")
    typer.echo(f"{ended.name}: {clean(first_line(ended.message))}", err=True)


def _split(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the script or module of a command line, and the arguments; or `CommandError`."""
    program, *rest = command
    if Path(program).name == "torchrun":
        raise CommandError(
            "the scheduler starts the replicas itself; give 'python SCRIPT ARGS' in place of "
            "torchrun",
            USAGE,
        )
    if not _PYTHON.fullmatch(Path(program).name):
        return {"script": program}, rest
    if not rest:
        raise CommandError(f"'{program}' has no script; give: {program} SCRIPT [ARGS]...", USAGE)
    if rest[0] == "-m" and len(rest) > 1:
        return {"module": rest[1]}, rest[2:]
    if rest[0].startswith("-"):
        raise CommandError(
            f"'{program} {rest[0]}': options of Python but -m are not possible; give a script, as "
            f"in {program} SCRIPT [ARGS]...",
            USAGE,
        )
    return {"script": rest[0]}, rest[1:]


def _check_is_python(script: str) -> None:
    if Path(script).name == script and not Path(script).exists() and shutil.which(script):
        raise CommandError(
            f"'{script}' is no Python script; give one, or run other programs with 'command' in a "
            "job file",
            USAGE,
        )


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals and name not in os.environ:
        raise CommandError(f"--env: '{name}' is not set here; give {name}=VALUE", USAGE)
    return name, value if equals else os.environ[name]


def _submit_numbered(client: Client, spec: JobSpec) -> JobView:
    """Submit a job under the name of its script and the next free number."""
    from pipollux_sched.client.connection import RefusedConflictError

    stem = _stem(spec.script or (spec.module or "run").replace(".", "-"))
    query = JobQuery(name=f"{stem}-", order=JobOrder.SUBMITTED, descending=True, limit=1000)
    taken = [
        re.fullmatch(rf"{stem}-([0-9]{{1,9}})", job.name) for job in client.cluster(query).jobs
    ]
    number = max((int(found[1]) for found in taken if found), default=0)
    last = number + NUMBERS_TRIED
    while True:
        number += 1
        try:
            return client.submit(spec.model_copy(update={"name": f"{stem}-{number}"}))
        except RefusedConflictError:  # another one has taken the name meanwhile
            if number == last:
                raise


def _stem(script: str) -> str:
    """Return the name of a script as the beginning of a job's name.

    Example:
        >>> _stem("/home/ana/2_Train.v2.py")
        'job-2-train-v2'
    """
    words = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    named = words if words[:1].isalpha() else f"job-{words}"
    return named[:_MOST_OF_STEM].strip("-")


def _follow(state_dir: Path | None, job: JobView) -> JobView:
    """Print the log of a job until it has ended, and return it as it ended."""
    from pipollux_sched.client.connection import UnreachableError

    outage, said = Outage(), job.message
    with reading(state_dir) as reader:
        log = LogReader(reader, job.name, None, None)
        while True:
            try:
                now: JobView = reader.job(job.name)
                _print(log, ended=now.phase.ended)
            except UnreachableError:
                outage.begin()
                continue
            outage.end()
            if now.phase.ended:
                return now
            if now.message != said:
                typer.echo(f"{now.name}: {clean(first_line(now.message))}", err=True)
                said = now.message
            time.sleep(POLL_INTERVAL)


def _print(log: LogReader, *, ended: bool) -> None:
    def show(line: LogLine) -> None:
        text = line.harmless if sys.stdout.isatty() else line.raw
        typer.echo(text, nl=False, color=True)

    for line in log.read():
        show(line)
    for line in log.rest() if ended else ():
        show(line)
