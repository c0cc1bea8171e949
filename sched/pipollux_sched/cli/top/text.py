"""What `pipollux top` prints where it is not watched on a terminal."""

from __future__ import annotations

from datetime import datetime

import typer
from rich.text import Text

from pipollux_sched.cli.console import output_console, print_result
from pipollux_sched.cli.job_table import job_table
from pipollux_sched.cli.nodes import node_table
from pipollux_sched.cli.wording import count, number, one_line
from pipollux_sched.report.event_text import event_line
from pipollux_sched.store import JobQuery, StateDir, Store
from pipollux_sched.store.slot_usage import occupancy

from .command import MOST_JOBS
from .view import ClusterView, look

NUM_EVENTS = 10


def print_once(store: Store, directory: StateDir) -> None:
    """Print the cluster as it is now: jobs, nodes, last events."""
    view = look(store, directory, JobQuery(limit=MOST_JOBS))
    records = {record.name: record for record in store.jobs()}
    shown = [records[job.name] for job in view.jobs.jobs if job.name in records]
    points = {job.name: job.point for job in view.jobs.jobs if job.point is not None}
    generations = {job.name: job.generation for job in view.jobs.jobs}
    typer.echo(headline(view))
    typer.echo(f"\nJobs: {spell_phases(view) or 'none yet; pipollux submit FILE'}")
    if shown:
        print_result(job_table(shown, points, generations, output_console()))
    if view.jobs.num_found > len(shown):
        typer.echo(f"and {count(view.jobs.num_found - len(shown), 'more job')}: pipollux jobs")
    typer.echo(f"\nNodes: {spell_slots(view)}")
    found = occupancy(store.nodes(), records.values())
    if found:
        print_result(node_table(found))
    typer.echo("\nLast events")
    for event in view.events[-NUM_EVENTS:]:
        print_result(Text(one_line(event_line(event) or "")), fold=False)


def headline(view: ClusterView) -> str:
    """Return the policy, the total goodput, and whether a scheduler runs."""
    parts = ["Pipollux"]
    if view.policy:
        parts.append(f"policy {view.policy}")
    if view.goodput is not None:
        parts.append(f"goodput {number(view.goodput)} samples/s")
    clock = datetime.fromtimestamp(view.time).strftime("%H:%M:%S")
    parts.append(f"● {clock}" if view.served else f"○ no scheduler runs {clock}")
    return "  ".join(parts)


def spell_phases(view: ClusterView) -> str:
    """Spell how many jobs are in each phase that has any."""
    return ", ".join(f"{many} {phase.value.lower()}" for phase, many in view.phases.items())


def spell_slots(view: ClusterView) -> str:
    """Spell how many slots are held, and how many nodes are away."""
    used = sum(node.used for node in view.nodes)
    slots = sum(node.record.slots for node in view.nodes)
    away = sum(node.record.condition != "ready" for node in view.nodes)
    not_ready = f", {count(away, 'node')} not ready" if away else ""
    return f"{used} of {count(slots, 'slot')} used{not_ready}"
