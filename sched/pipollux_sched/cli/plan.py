"""`pipollux plan`: what every job of a file would get, and why."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from pipollux_sched.store import StateDir

from .console import USAGE, CommandError, OutputFormat, output_console, print_data
from .live_plan_table import print_live_plan
from .options import PolicyName, SomeClusterFile, SomeJobsFile, StateDirectory

if TYPE_CHECKING:
    from pipollux_sched.planning.plan import Plan


def plan(
    cluster: SomeClusterFile = None,
    jobs: SomeJobsFile = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Only what would change, without files.")
    ] = False,
    state_dir: StateDirectory = None,
    policy: PolicyName = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="How to print the plan.")
    ] = OutputFormat.table,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the search; the same seed gives the same plan.")
    ] = 0,
) -> None:
    r"""Print what every job would get, of a file or as it stands; touch nothing.

    The plan is what the scheduler would decide now: for each job its pipeline
    replicas, their nodes, the batch size with the best goodput, the speedup
    that is predicted, and why.

    [bold]The cluster[/bold] is a file such as

        nodes:
          - name: node-a
            slots: 4              # GPUs; a replica takes num_stages of them
          - {name: node-b, slots: 4, cpus: 32, memory: 256GiB}

    [bold]The jobs[/bold] are a file such as

        jobs:
          - name: char-lm
            script: examples/char_lm.py
            num_stages: 2         # a replica lies on 2 slots of one node
            num_microbatches: 4
            max_replicas: 8
            allocation: \[node-a]  # where it runs now, if it does

    What is known of a job's speed goes under [bold]hints:[/bold], as the job itself
    reports it; without, a job is taken to scale perfectly but starts small.
    The files in examples/ show it all:

        pipollux plan --cluster examples/cluster.yaml --jobs examples/jobs.yaml

    [bold]Without files[/bold] the plan is that of the scheduler's own jobs and nodes, as
    its state directory has them: what it would change if it decided now, with its
    own policy, or with another that you want to know about.

        pipollux plan --diff

    Exit code: 0 planned; 1 a job could never run on this cluster; 2 a file or
    an option is wrong.
    """
    if cluster is None and jobs is None:
        print_live_plan(StateDir.choose(state_dir), policy, seed, diff=diff, output=output)
        return
    if cluster is None or jobs is None:
        missing = "--cluster" if cluster is None else "--jobs"
        raise CommandError(f"{missing} is missing; give both files, or neither", USAGE)
    if diff:
        raise CommandError("--diff is for the scheduler's own jobs; leave the files out", USAGE)
    from pipollux_sched.planning.plan import plan as make_plan
    from pipollux_sched.policy import DEFAULT_POLICY, make_policy
    from pipollux_sched.spec.job import load_cluster, load_jobs

    decides = make_policy(policy or DEFAULT_POLICY, seed=seed)
    made = make_plan(load_cluster(cluster), load_jobs(jobs), policy=decides)
    if output is OutputFormat.table:
        print_table(made)
    else:
        print_data(made.to_dict(), output)


def print_table(plan: Plan) -> None:
    """Print a plan for people, on standard output."""
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
            _spell_nodes(job.nodes),
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
    if plan.desired_nodes != len(plan.nodes):
        advice = f"These jobs would use {plan.desired_nodes} such nodes"
        console.print(Text(f"{advice}; there are {len(plan.nodes)}."))


def _spell_nodes(nodes: tuple[str, ...]) -> str:
    counts = Counter(nodes).items()
    return ", ".join(name if count == 1 else f"{name} ×{count}" for name, count in counts) or "–"
