"""`pipollux apply`: carry out a plan, of files on this machine or of the running scheduler."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pipollux_policies import DEFAULT_POLICY, make_policy
from pipollux_sched.backend.local.engine import check_local
from pipollux_sched.lifecycle import Phase
from pipollux_sched.planning.plan import Plan
from pipollux_sched.planning.plan import plan as make_plan
from pipollux_sched.report.event_text import event_line
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.cluster import ClusterSpec, load_cluster
from pipollux_sched.spec.job import JobSpec, load_jobs
from pipollux_sched.store import JobRecord, StateDir, Store
from pipollux_sched.utils.signals import Interruption

from .console import USAGE, CommandError, OutputFormat, print_data
from .options import (
    PassEnvironment,
    PolicyName,
    SomeClusterFile,
    SomeJobsFile,
    StateDirectory,
    TableOutput,
)
from .plan import print_live_plan, print_table
from .reader import asking
from .server_choice import refuse_server
from .submit import located

TICK = 0.2


def apply(
    cluster: SomeClusterFile = None,
    jobs: SomeJobsFile = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    state_dir: StateDirectory = None,
    policy: PolicyName = None,
    pass_environment: PassEnvironment = None,
    output: TableOutput = OutputFormat.table,
) -> None:
    """Carry out a plan: run the jobs of a file, or let the running scheduler decide.

    With --cluster and --jobs, apply runs each job on this machine at the allocation
    that `pipollux plan` shows, until all jobs are complete. If it is interrupted,
    run it again: jobs resume from their last checkpoint, and complete jobs are
    skipped.

    Without files, apply shows the plan of `pipollux plan --diff` and asks the
    running scheduler to decide immediately. The scheduler decides on its state at
    that moment.

    With --output json or yaml, which needs --yes, the result is the jobs in their
    final state (without files: the plan); messages go to standard error.

    Exit code: 0 all jobs are complete (without files: the scheduler decides, or
    nothing changes); 1 a job is not complete; 2 a file or an option is invalid.
    """
    told = output is OutputFormat.table
    if not (told or yes):
        raise CommandError(
            f"--output {output.value} needs --yes: it cannot ask for confirmation", USAGE
        )
    if cluster is None and jobs is None:
        _apply_live(state_dir, policy, yes, output)
        return
    if cluster is None or jobs is None:
        missing = "--cluster" if cluster is None else "--jobs"
        raise CommandError(f"{missing} is missing; give both files, or neither", USAGE)
    refuse_server("apply with files")
    nodes = load_cluster(cluster)
    specs = [located(spec, jobs) for spec in load_jobs(jobs)]
    for spec in specs:
        _check_no_sweep(spec, jobs)
        check_local(spec)
    directory = StateDir.choose(state_dir)
    done = _complete(directory)
    left = [spec for spec in specs if spec.name not in done]
    for spec in specs:
        if spec.name in done:
            typer.echo(f"{spec.name} is already complete; skipped.", err=not told)
    if not left:
        _print_jobs(directory, specs, output)
        return
    plan = make_plan(nodes, left, policy=make_policy(policy or DEFAULT_POLICY))
    if told:
        print_table(plan)
    if not yes and not _confirmed():
        raise CommandError("nothing was started")
    found, interrupted = _carry_out(
        directory, nodes, left, plan, pass_on=pass_environment or (), to_stderr=not told
    )
    _print_jobs(directory, specs, output)
    _judge(left, found, interrupted=interrupted)


def _confirmed() -> bool:
    """Ask whether to carry the plan out; `CommandError` if there is nobody to ask."""
    try:
        return typer.confirm("Carry this out?")
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        typer.echo()  # ends the line of the question
        raise CommandError("cannot ask for confirmation: give --yes to apply", USAGE) from None


def _check_no_sweep(spec: JobSpec, file: Path) -> None:
    if spec.sweep is not None:
        raise CommandError(
            f"job '{spec.name}' is a sweep, whose trials start one after another, and apply gives "
            "each job of a file one allocation; run it under a scheduler, with: pipollux serve, "
            f"and then: pipollux submit {file}",
            USAGE,
        )


def _print_jobs(directory: StateDir, specs: list[JobSpec], output: OutputFormat) -> None:
    """Print the final state of the jobs, except as a table: the events have shown it."""
    if output is not OutputFormat.table and directory.has_store():
        names = {spec.name for spec in specs}
        with Store(directory.store) as store:
            print_data([j.to_json_object() for j in store.jobs() if j.name in names], output)


def _apply_live(
    state_dir: Path | None, policy: str | None, yes: bool, output: OutputFormat
) -> None:
    if policy is not None:
        raise CommandError(
            "--policy: the running scheduler decides by its own; leave it out, or try others "
            "with: pipollux plan --policy NAME",
            USAGE,
        )
    with asking(state_dir) as client:
        if not print_live_plan(client, None, 0, diff=True, output=output):
            return
        if not yes and not _confirmed():
            raise CommandError("nothing was changed")
        client.decide()
    told = output is OutputFormat.table
    sentence = "The scheduler decides now; follow it with: pipollux events --follow"
    typer.echo(sentence, err=not told)


def _complete(directory: StateDir) -> set[str]:
    if not directory.has_store():
        return set()
    with Store(directory.store) as store:
        return {job.name for job in store.jobs() if job.phase is Phase.COMPLETE}


def _carry_out(
    directory: StateDir,
    nodes: ClusterSpec,
    specs: list[JobSpec],
    plan: Plan,
    *,
    pass_on: Collection[str],
    to_stderr: bool,
) -> tuple[Mapping[str, JobRecord], bool]:
    """Run jobs to their end as planned; return them, and whether a signal interrupted the run."""
    allocations = {job.job: job.allocation for job in plan.assignments if job.nodes}
    on_event = partial(_print_event, to_stderr=to_stderr)
    scheduler = Scheduler(
        directory, nodes, allocations=allocations, on_event=on_event, pass_environment=pass_on
    )
    with Interruption() as interruption:
        scheduler.start()
        try:
            _submit(scheduler, [spec for spec in specs if spec.name in allocations])
            over = False
            while not over and not interruption.count:
                over = scheduler.wait(lambda jobs: _over(jobs, allocations), TICK)
            found = scheduler.jobs()
        finally:
            if interruption.count:
                typer.echo(
                    "Stopping: jobs save, and resume when apply is run again.", err=to_stderr
                )
            scheduler.stop(hurry=lambda: interruption.count > 1)
    return found, interruption.count > 0


def _submit(scheduler: Scheduler, specs: Sequence[JobSpec]) -> None:
    known = scheduler.jobs()
    new = [s for s in specs if s.name not in known or known[s.name].phase is Phase.FAILED]
    if new:
        scheduler.control.submit_all(new)  # together, as they may wait for each other


def _over(jobs: Mapping[str, JobRecord], allocations: Mapping[str, object]) -> bool:
    wanted = [jobs[name].phase for name in allocations]
    return all(phase.ended for phase in wanted) or Phase.FAILED in wanted


def _judge(specs: list[JobSpec], jobs: Mapping[str, JobRecord], *, interrupted: bool) -> None:
    open_ = [
        spec.name
        for spec in specs
        if spec.name not in jobs or jobs[spec.name].phase is not Phase.COMPLETE
    ]
    if not open_:
        return
    failed = [name for name in open_ if name in jobs and jobs[name].phase is Phase.FAILED]
    if failed:
        reasons = "\n".join(f"{name}: {jobs[name].state.message}" for name in failed)
        raise CommandError(f"{', '.join(failed)} failed; all jobs were stopped\n{reasons}")
    why = "interrupted" if interrupted else "the plan has no room for them"
    raise CommandError(f"not complete: {', '.join(open_)} ({why})")


def _print_event(event: Mapping[str, Any], *, to_stderr: bool) -> None:
    line = event_line(event)
    if line:
        typer.echo(line, err=to_stderr)
