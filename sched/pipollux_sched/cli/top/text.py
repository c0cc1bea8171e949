"""The text that `pipollux top` prints when standard output is not a terminal."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from pipollux_sched.cli.console import output_console, print_result
from pipollux_sched.cli.jobs import job_table
from pipollux_sched.cli.nodes import node_table
from pipollux_sched.cli.teams import spell_use, team_table
from pipollux_sched.store import JobQuery
from pipollux_sched.views.models import ClusterView
from pipollux_utils.text import clean, count, number

from .view import Look, look

if TYPE_CHECKING:
    from pipollux_sched.cli.reader import Reader

MOST_JOBS = 200
"""Largest number of printed jobs; `pipollux jobs` prints all."""
NUM_EVENTS = 10


def print_once(reader: Reader) -> None:
    """Print the cluster as it is now: jobs, teams, nodes, last events."""
    view = look(reader, JobQuery(limit=MOST_JOBS))
    cluster = view.cluster
    records = {job.name: job for job in reader.jobs()}
    shown = [records[job.name] for job in cluster.jobs if job.name in records]
    typer.echo(headline(view))
    typer.echo(f"\nJobs: {spell_phases(cluster) or 'none yet; pipollux submit FILE'}")
    if shown:
        print_result(job_table(shown, output_console()))
    if cluster.num_found > len(shown):
        typer.echo(f"and {count(cluster.num_found - len(shown), 'more job')}: pipollux jobs")
    if view.teams is not None:
        typer.echo(f"\nTeams: {spell_use(view.teams)}")
        print_result(team_table(view.teams))
    typer.echo(f"\nNodes: {spell_slots(cluster)}")
    if cluster.nodes:
        print_result(node_table(list(cluster.nodes.values())))
    typer.echo("\nLast events")
    for event in cluster.events[-NUM_EVENTS:]:
        print_result(Text(clean(event.line)), fold=False)


def headline(view: Look, now: float | None = None) -> str:
    """Return the policy, the total goodput, and whether a scheduler runs."""
    cluster = view.cluster
    parts = ["Pipollux"]
    if cluster.policy:
        parts.append(f"policy {cluster.policy}")
    if cluster.goodput is not None:
        parts.append(f"goodput {number(cluster.goodput)} samples/s")
    moment = cluster.time if now is None else now
    clock = datetime.fromtimestamp(moment).strftime("%H:%M:%S")
    parts.append(f"● {clock}" if view.served else f"○ no scheduler runs {clock}")
    return "  ".join(parts)


def spell_phases(cluster: ClusterView) -> str:
    """Spell the number of jobs in each phase that has any."""
    return ", ".join(f"{many} {phase.value.lower()}" for phase, many in cluster.phases.items())


def spell_slots(cluster: ClusterView) -> str:
    """Spell the number of used slots, and of unavailable nodes."""
    nodes = cluster.nodes.values()
    used, slots = sum(node.used for node in nodes), sum(node.slots for node in nodes)
    away = sum(node.condition != "ready" for node in nodes)
    not_ready = f", {count(away, 'node')} not ready" if away else ""
    return f"{used} of {count(slots, 'slot')} used{not_ready}"
