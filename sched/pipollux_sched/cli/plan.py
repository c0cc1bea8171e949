"""`pipollux plan`: show the allocation that each job would get, and the reason."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipollux_utils.text import DASH, clean, count, spell_nodes

from .console import (
    USAGE,
    CommandError,
    OutputFormat,
    libraries_on_stderr,
    output_console,
    print_data,
    print_result,
)
from .forecast_text import short_span
from .options import PolicyName, SomeClusterFile, SomeJobsFile, StateDirectory
from .reader import reading, tell_unserved
from .server_choice import refuse_server

if TYPE_CHECKING:
    from pipollux_sched.planning.plan import Plan
    from pipollux_sched.views.models import PlannedChange

    from .reader import Reader


def plan(
    cluster: SomeClusterFile = None,
    jobs: SomeJobsFile = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show only changes; without files.")] = False,
    state_dir: StateDirectory = None,
    policy: PolicyName = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Output format.")
    ] = OutputFormat.table,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of the search; equal seeds give equal plans.")
    ] = 0,
) -> None:
    r"""Show the allocation that each job would get; change nothing.

    The plan is the scheduler's decision at this moment: for each job its pipeline
    replicas, their nodes, the batch size with the best goodput, the predicted
    speedup, and the reason.

    [bold]--cluster[/bold] is a file such as

        nodes:
          - name: node-a
            slots: 4              # GPUs; a replica takes num_stages slots
          - {name: node-b, slots: 4, cpus: 32, memory: 256GiB}

    [bold]--jobs[/bold] is a file such as

        jobs:
          - name: char-lm
            script: examples/char_lm.py
            num_stages: 2         # a replica takes 2 slots of one node
            num_microbatches: 4
            max_replicas: 8
            allocation: \[node-a]  # its current nodes, if it runs

    Measurements of a job's speed go under [bold]hints:[/bold], in the format that jobs
    report. Without hints, a job is assumed to scale perfectly but starts small.
    For complete files see examples/:

        pipollux plan --cluster examples/cluster.yaml --jobs examples/jobs.yaml

    [bold]Without files[/bold], the plan is for the jobs and nodes in the scheduler's state
    directory: what the scheduler would change now, under its own policy or another.

        pipollux plan --diff

    Exit code: 0 planned; 1 a job can never run on this cluster; 2 a file or an
    option is invalid.
    """
    if cluster is None and jobs is None:
        with reading(state_dir) as reader:
            print_live_plan(reader, policy, seed, diff=diff, output=output)
            tell_unserved(reader)
        return
    if cluster is None or jobs is None:
        missing = "--cluster" if cluster is None else "--jobs"
        raise CommandError(f"{missing} is missing; give both files, or neither", USAGE)
    if diff:
        raise CommandError("--diff is for the scheduler's own jobs; leave the files out", USAGE)
    refuse_server("a plan of files")
    from pipollux_policies import DEFAULT_POLICY, make_policy
    from pipollux_sched.planning.plan import plan as make_plan
    from pipollux_sched.spec.cluster import load_cluster
    from pipollux_sched.spec.job import load_jobs

    decides = make_policy(policy or DEFAULT_POLICY, seed=seed)
    made = make_plan(load_cluster(cluster), load_jobs(jobs), policy=decides)
    if output is OutputFormat.table:
        print_table(made)
    else:
        print_data(made.to_dict(), output)


def print_table(plan: Plan) -> None:
    """Print a plan as a table on standard output."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Plan", title_justify="left", header_style="bold")
    for header in ("Job", "Stages", "Replicas", "Nodes", "Batch size", "Speedup", "Why"):
        number = header in {"Stages", "Replicas", "Batch size", "Speedup"}
        table.add_column(header, justify="right" if number else "left", no_wrap=header == "Job")
    for job in plan.assignments:
        row = (
            job.job,
            str(job.num_stages),
            str(job.num_replicas),
            spell_nodes(sorted(job.nodes)),
            "–" if job.batch_size is None else str(job.batch_size),
            "–" if job.speedup is None else f"{job.speedup:.2f}",
            job.why,
        )
        table.add_row(*map(Text, row), style=None if job.nodes else "dim")
    console = output_console()
    console.print(table)
    used = sum(node.used for node in plan.nodes)
    slots = sum(node.slots for node in plan.nodes)
    each = ", ".join(f"{node.node} {node.used}/{node.slots}" for node in plan.nodes)
    console.print(Text(f"Slots used: {used} of {slots} ({each})."))
    for sweep in plan.sweeps:
        left = sweep.num_trials - sweep.num_planned
        follow = f"; {left} more follow as these end" if left else ""
        trials = f"{sweep.num_planned} of {count(sweep.num_trials, 'trial')} of {sweep.sweep}"
        console.print(Text(f"The plan has {trials}{follow}."))
    if plan.desired_nodes != len(plan.nodes):
        there = "is" if len(plan.nodes) == 1 else "are"
        advice = f"These jobs would use {count(plan.desired_nodes, 'such node')}"
        console.print(Text(f"{advice}; there {there} {len(plan.nodes)}."))


def print_live_plan(
    reader: Reader, policy: str | None, seed: int, *, diff: bool, output: OutputFormat
) -> bool:
    """Print what the scheduler would change now; return whether there is a change."""
    with libraries_on_stderr():
        found = reader.plan(policy, seed)
    changes = [change for change in found.jobs if change.changes]
    shown = changes if diff else found.jobs
    if output is OutputFormat.table:
        _print_changes(shown, num_jobs=len(found.jobs), policy=found.policy)
    else:
        print_data([_plain(change) for change in shown], output)
    return bool(changes)


def _plain(change: PlannedChange) -> dict[str, Any]:
    forecast = None if change.forecast is None else change.forecast.to_dict()
    return {**asdict(replace(change, forecast=None)), "forecast": forecast}


def _print_changes(changes: Sequence[PlannedChange], *, num_jobs: int, policy: str) -> None:
    from rich.table import Table
    from rich.text import Text

    if changes:
        table = Table(box=None, header_style="bold", pad_edge=False)
        now, forecast = time.time(), any(change.forecast is not None for change in changes)
        ends = ("Ends in",) if forecast else ()
        for header in ("", "Job", "From", "To", "Speedup", "Batch size", *ends, "Why"):
            right = header in {"Speedup", "Batch size"}
            table.add_column(
                header,
                justify="right" if right else "left",
                no_wrap=header in {"Job", "Speedup"},
                overflow="fold",
            )
        for change in changes:
            table.add_row(
                "~" if change.changes else "",
                Text(change.job),
                Text(_where(change.previous, change.previous_num_stages)),
                Text(_where(change.nodes, change.num_stages)),
                _speedups(change),
                DASH if change.batch_size is None else str(change.batch_size),
                *([_ends(change, now)] if forecast else []),
                Text(clean(change.why)),
                style="" if change.changes else "dim",
            )
        print_result(table)
    how_many = sum(change.changes for change in changes)
    typer.echo(
        f"{count(how_many, 'change')} to {count(num_jobs, 'job')} by the policy {policy}, "
        "if it decided now."
    )


def _ends(change: PlannedChange, now: float) -> str:
    return DASH if change.forecast is None else short_span(change.forecast.end, now)


def _where(nodes: Sequence[str], num_stages: int | None) -> str:
    return f"{len(nodes)}×{num_stages} on {spell_nodes(sorted(nodes))}" if nodes else DASH


def _speedups(change: PlannedChange) -> str:
    before, after = (
        DASH if value is None else f"{value:.2f}"
        for value in (change.previous_speedup, change.speedup)
    )
    return f"{before} → {after}" if change.changes and before != after else after
