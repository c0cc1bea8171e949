"""`pipollux nodes` and `drain`: what there is to run on, and taking some of it out of use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipollux_sched.store import NodeCondition, StateDir, Store
from pipollux_sched.store.slot_usage import NodeOccupancy, occupancy
from pipollux_sched.utils.units import parse_duration

from .console import USAGE, CommandError, OutputFormat, print_data, print_result
from .failure import one_sentence
from .jobs import POLL_INTERVAL
from .options import NodeName, StateDirectory, TableOutput
from .wording import DASH, count, one_line, spell_age

if TYPE_CHECKING:
    from rich.table import Table

CONDITION_STYLES = {NodeCondition.DRAINING: "yellow", NodeCondition.DEAD: "red"}
"""In which colour a condition is shown that is not the usual one."""


def nodes(output: TableOutput = OutputFormat.table, state_dir: StateDirectory = None) -> None:
    """List nodes: slots, which jobs hold them, condition.

    Works without a running scheduler too: then it shows how the last one left
    them.
    """
    directory = StateDir.choose(state_dir)
    with one_sentence(), Store(directory.store) as store:
        found = occupancy(store.nodes(), store.jobs())
    if output is not OutputFormat.table:
        print_data([plain_node(node) for node in found.values()], output)
        return
    _print_table(found)
    if not directory.is_served():
        typer.echo(
            f"No scheduler serves {directory.path}: this is how the last one left it.", err=True
        )


def drain(
    node: NodeName,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for those who ask.")] = "",
    dead: Annotated[
        bool, typer.Option("--dead", help="It is gone: start its jobs elsewhere at once.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Use it again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until nothing runs there.")] = False,
    timeout: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Give up --wait after so long, as in 10m.",
            show_default="never",
        ),
    ] = None,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """Let a node drain: nothing new is put there, and its jobs leave.

    Jobs that are not preemptible end where they are. The condition lasts over
    restarts of the scheduler.

        pipollux drain node-b --reason "new fans" --wait
        pipollux drain node-b --undo

    Exit code: 0 done; 1 refused (with --wait: it was not empty in time); 2 an
    option is wrong.
    """
    from pipollux_sched.client import Client  # slow, and neither --help nor a shell needs it

    if dead and undo:
        raise CommandError("--dead and --undo contradict each other; give one of them", USAGE)
    if wait and undo:
        raise CommandError("--undo has nothing to --wait for; leave one of them out", USAGE)
    seconds = _seconds(timeout, wait)
    condition = NodeCondition.DEAD if dead else NodeCondition.DRAINING
    directory = StateDir.choose(state_dir)
    with one_sentence():
        with Client(directory) as client:
            client.set_node(node, NodeCondition.READY if undo else condition, reason)
        if wait:
            _wait_until_empty(directory, node, seconds)
        with Store(directory.store) as store:
            found = occupancy(store.nodes(), store.jobs())[node]
    if output is OutputFormat.table:
        typer.echo(_sentence(found))
    else:
        print_data(plain_node(found), output)


def _seconds(timeout: str | None, wait: bool) -> float | None:
    if timeout is not None and not wait:
        raise CommandError("--timeout is for --wait; give both, or neither", USAGE)
    try:
        return parse_duration(timeout)
    except ValueError as error:
        raise CommandError(f"--timeout: {error}", USAGE) from None


def _wait_until_empty(directory: StateDir, node: str, seconds: float | None) -> None:
    """Wait until no job holds a slot of a node; say whom it waits for, whenever that changes."""
    deadline = None if seconds is None else time.monotonic() + seconds
    told: list[str] = []
    with Store(directory.store) as store:
        while True:
            served = directory.is_served()
            holders = list(occupancy(store.nodes(), store.jobs())[node].jobs)
            if not holders:
                return
            if holders != told:
                typer.echo(f"{node}: waiting for {', '.join(holders)} to leave", err=True)
                told = holders
            if not served:
                raise CommandError("the scheduler has ended, so nothing leaves; start it again")
            if deadline is not None and time.monotonic() > deadline:
                raise CommandError(
                    f"{node} is not empty after {spell_age(seconds or 0)}: "
                    f"{', '.join(holders)} still hold slots of it; it goes on draining"
                )
            time.sleep(POLL_INTERVAL)


def _sentence(found: NodeOccupancy) -> str:
    says = {
        NodeCondition.READY: "ready",
        NodeCondition.DRAINING: "draining",
        NodeCondition.DEAD: "dead: its jobs are started elsewhere",
    }[found.node.condition]
    left = ", ".join(found.jobs)
    holds = f"; {left} still there" if left else "; nothing runs there"
    return f"{found.node.name}: {says}{'' if found.node.condition == 'ready' else holds}"


def plain_node(found: NodeOccupancy) -> dict[str, Any]:
    """Return a node as plain data."""
    node = found.node
    return {
        "name": node.name,
        "kind": node.kind,
        "slots": node.slots,
        "used": found.used,
        "free": found.free,
        "jobs": found.jobs,
        "condition": node.condition.value,
        "since": node.since,
        "reason": node.reason,
        "spec": dict(node.spec),
    }


def _print_table(found: Mapping[str, NodeOccupancy]) -> None:
    if not found:
        typer.echo("No nodes yet; a scheduler brings them: pipollux serve")
        return
    print_result(node_table(found))
    used = sum(one.used for one in found.values())
    slots = sum(one.node.slots for one in found.values())
    typer.echo(f"{count(len(found), 'node')}, {used} of {count(slots, 'slot')} used.")


def node_table(found: Mapping[str, NodeOccupancy]) -> Table:
    """Return nodes as a table: slots, who holds them, condition."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("Node", "Kind", "Slots", "Free", "Used by", "Condition", "Since", "Reason"):
        number = header in {"Slots", "Free"}
        table.add_column(
            header,
            justify="right" if number else "left",
            no_wrap=header not in {"Used by", "Reason"},
        )
    now = time.time()
    for one in found.values():
        node = one.node
        table.add_row(
            node.name,
            node.kind,
            str(node.slots),
            str(one.free),
            Text(_spell_users(one.jobs)),
            Text(node.condition.value, style=CONDITION_STYLES.get(node.condition, "")),
            f"{spell_age(now - node.since)} ago",
            Text(one_line(node.reason) or DASH),
        )
    return table


def _spell_users(jobs: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({slots})" for name, slots in jobs.items()) or DASH
