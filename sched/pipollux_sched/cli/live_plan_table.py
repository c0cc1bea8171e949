"""The plan of a scheduler's own jobs, as `pipollux plan` prints it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from pipollux_sched.store import StateDir, Store

from .clean_output import libraries_on_stderr
from .console import CommandError, OutputFormat, print_data, print_result
from .failure import one_sentence
from .wording import DASH, count, one_line, spell_nodes

if TYPE_CHECKING:
    from pipollux_sched.planning.dry_run import PlannedChange


def print_live_plan(
    directory: StateDir, policy: str | None, seed: int, *, diff: bool, output: OutputFormat
) -> bool:
    """Print what the scheduler of a state directory would change now; say whether it would.

    Args:
        directory: whose jobs and nodes.
        policy: allocation policy; None: the one that the scheduler was started with.
        seed: of the policy, if it draws.
        diff: print only what would change.
        output: how.

    Raises:
        CommandError: there is no store, or the policy failed.
    """
    from pipollux_sched.allocator.snapshot import Snapshot
    from pipollux_sched.allocator.strategy import PolicyStrategy
    from pipollux_sched.planning.dry_run import changed, plan_live, policy_named, serving_policy
    from pipollux_sched.policy import DEFAULT_POLICY, make_policy

    with one_sentence(), Store(directory.store) as store:
        served_by = serving_policy(store.latest_events(1, types=["cluster"]))
        state = Snapshot.read(store)
    name = policy or (policy_named(served_by, make_policy) if served_by else None)
    strategy = PolicyStrategy(make_policy(name or DEFAULT_POLICY, seed=seed))
    try:
        with libraries_on_stderr():
            found = plan_live(state, strategy)
    except Exception as error:  # policies are other people's code
        logging.getLogger(__name__).debug("the policy failed", exc_info=True)
        raise CommandError(f"the policy {name or DEFAULT_POLICY} failed: {error}") from error
    shown = changed(found) if diff else found
    if output is OutputFormat.table:
        _print(shown, num_jobs=len(found), policy=name or DEFAULT_POLICY)
    else:
        print_data([change.to_dict() for change in shown], output)
    if not directory.is_served():
        typer.echo(
            f"No scheduler serves {directory.path}: this is how the last one left it.", err=True
        )
    return any(change.changes for change in found)


def _print(changes: Sequence[PlannedChange], *, num_jobs: int, policy: str) -> None:
    from rich.table import Table
    from rich.text import Text

    if changes:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for header in ("", "Job", "From", "To", "Speedup", "Batch size", "Why"):
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
                Text(one_line(change.why)),
                style="" if change.changes else "dim",
            )
        print_result(table)
    how_many = sum(change.changes for change in changes)
    typer.echo(
        f"{count(how_many, 'change')} to {count(num_jobs, 'job')} by the policy {policy}, "
        "if it decided now."
    )


def _where(nodes: Sequence[str], num_stages: int | None) -> str:
    return f"{len(nodes)}×{num_stages} on {spell_nodes(nodes)}" if nodes else DASH


def _speedups(change: PlannedChange) -> str:
    before, after = (
        DASH if value is None else f"{value:.2f}"
        for value in (change.previous_speedup, change.speedup)
    )
    return f"{before} → {after}" if change.changes and before != after else after
