"""`pipollux nodes` and `drain`: list nodes, and drain them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipollux_sched.store import NodeCondition
from pipollux_utils.text import DASH, clean, count, spell_age
from pipollux_utils.units import parse_duration

from .console import USAGE, CommandError, OutputFormat, print_data, print_result
from .options import NodeName, StateDirectory, TableOutput
from .reader import POLL_INTERVAL, asking, reading, tell_unserved

if TYPE_CHECKING:
    from rich.table import Table

    from pipollux_sched.client.client import Client
    from pipollux_sched.views.models import NodeDetails, NodeView

CONDITION_STYLES = {NodeCondition.DRAINING: "yellow", NodeCondition.DEAD: "red"}
"""Colour of each condition other than ready."""


def nodes(output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None) -> None:
    """List nodes: network domains, slots, the jobs that hold them, condition.

    Without a running scheduler, nodes shows the last recorded state.
    """
    with reading(state_dir) as reader:
        found = reader.nodes()
        if output is not OutputFormat.table:
            print_data([node.to_dict() for node in found], output)
            return
        _print_table(found)
        tell_unserved(reader)


def drain(
    node: NodeName,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, shown to users.")] = "",
    dead: Annotated[
        bool, typer.Option("--dead", help="Treat the node as lost: restart its jobs elsewhere.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Return the node to service.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the node is empty.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Time limit of --wait, such as 10m.", show_default="never"
        ),
    ] = None,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Drain a node: no new replicas are placed on it, and its jobs move away.

    Jobs that are not preemptible stay until they end. The condition survives
    restarts of the scheduler.

        pipollux drain node-b --reason "new fans" --wait
        pipollux drain node-b --undo

    Exit code: 0 done; 1 refused (with --wait: the node was not empty in time); 2 an
    option is invalid.
    """
    if dead and undo:
        raise CommandError("--dead and --undo contradict each other; give one of them", USAGE)
    if wait and undo:
        raise CommandError("--undo has nothing to --wait for; leave one of them out", USAGE)
    seconds = _seconds(timeout, wait)
    condition = NodeCondition.DEAD if dead else NodeCondition.DRAINING
    with asking(state_dir) as client:
        found = client.set_node(node, NodeCondition.READY if undo else condition, reason)
        if wait:
            found = _wait_until_empty(client, node, seconds)
    if output is OutputFormat.table:
        typer.echo(_sentence(found))
    else:
        print_data(found.to_dict(), output)


def _seconds(timeout: str | None, wait: bool) -> float | None:
    if timeout is not None and not wait:
        raise CommandError("--timeout is for --wait; give both, or neither", USAGE)
    try:
        return parse_duration(timeout)
    except ValueError as error:
        raise CommandError(f"--timeout: {error}", USAGE) from None


def _wait_until_empty(client: Client, node: str, seconds: float | None) -> NodeDetails:
    """Wait until no job holds a slot of a node; print the remaining jobs on each change."""
    from pipollux_sched.client.connection import UnreachableError

    deadline = None if seconds is None else time.monotonic() + seconds
    told: list[str] = []
    while True:
        try:
            (found,) = (one for one in client.nodes() if one.name == node)
        except UnreachableError as error:
            raise CommandError(
                "the scheduler has ended, so nothing leaves; start it again"
            ) from error
        holders = list(found.jobs)
        if not holders:
            return found
        if holders != told:
            typer.echo(f"{node}: waiting for {', '.join(holders)} to leave", err=True)
            told = holders
        if deadline is not None and time.monotonic() > deadline:
            hold = "holds" if len(holders) == 1 else "hold"
            raise CommandError(
                f"{node} is not empty after {spell_age(seconds or 0)}: "
                f"{', '.join(holders)} still {hold} slots; draining continues"
            )
        time.sleep(POLL_INTERVAL)


def _sentence(found: NodeView) -> str:
    says = {
        NodeCondition.READY: "ready",
        NodeCondition.DRAINING: "draining",
        NodeCondition.DEAD: "dead: its jobs are started elsewhere",
    }[found.condition]
    left = ", ".join(found.jobs)
    holds = f"; {left} still there" if left else "; nothing runs there"
    return f"{found.name}: {says}{'' if found.condition is NodeCondition.READY else holds}"


def _print_table(found: Sequence[NodeView]) -> None:
    if not found:
        typer.echo("No nodes yet; a scheduler brings them: pipollux serve")
        return
    print_result(node_table(found))
    used = sum(one.used for one in found)
    slots = sum(one.slots for one in found)
    typer.echo(f"{count(len(found), 'node')}, {used} of {count(slots, 'slot')} used.")


def node_table(found: Sequence[NodeView]) -> Table:
    """Return nodes as a table: slots, the jobs that hold them, condition."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    levels = node_levels(found)
    headers = ("Node", "Kind", *levels, "Slots", "Free", "Used by", "Condition", "Since", "Reason")
    for header in headers:
        number = header in {"Slots", "Free"}
        table.add_column(
            header,
            justify="right" if number else "left",
            no_wrap=header not in {"Used by", "Reason"},
        )
    now = time.time()
    for node in found:
        table.add_row(
            node.name,
            node.kind,
            *(Text(topology_of(node).get(level) or DASH) for level in levels),
            str(node.slots),
            str(node.free),
            Text(_spell_users(node.jobs)),
            Text(node.condition.value, style=CONDITION_STYLES.get(node.condition, "")),
            f"{spell_age(now - node.since)} ago",
            Text(clean(node.full_reason) or DASH),
        )
    return table


def node_levels(found: Sequence[NodeView]) -> list[str]:
    """Return the levels of the network at which any node has a domain, the widest first."""
    named = [level for node in found for level, domain in topology_of(node).items() if domain]
    order = [level for node in found for level in topology_of(node)]
    return [level for level in dict.fromkeys(order) if level in named]


def topology_of(node: NodeView) -> Mapping[str, str]:
    """Return the domains of a node by level; empty if it is not known."""
    spec: Mapping[str, Any] = getattr(node, "spec", {})
    topology: Mapping[str, str] = spec.get("topology") or {}
    return topology


def _spell_users(jobs: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({slots})" for name, slots in jobs.items()) or DASH
