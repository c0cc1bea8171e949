"""What a shell offers when TAB is pressed: the names of jobs, nodes and policies.

A shell must never show a traceback, so whatever goes wrong here means that nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pipollux_sched.store import Store


def complete_jobs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the jobs whose names begin so, with their phases; those named already are left out."""
    return _offered(
        context, incomplete, lambda store: ((job.name, job.phase.value) for job in store.jobs())
    )


def complete_nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the nodes whose names begin so, with their conditions."""
    return _offered(
        context,
        incomplete,
        lambda store: ((node.name, node.condition.value) for node in store.nodes().values()),
    )


def complete_policies(incomplete: str) -> list[str]:
    """Return the policies whose names begin so."""
    names = ("exact", "pollux", "sia", "optimus", "tiresias", "fifo")
    return [name for name in names if name.startswith(incomplete)]


def complete_event_types(incomplete: str) -> list[str]:
    """Return the types of events whose names begin so."""
    from pipollux_sched.report.event_text import EVENT_TYPES

    return [name for name in EVENT_TYPES if name.startswith(incomplete)]


def _offered(
    context: typer.Context,
    incomplete: str,
    names: Callable[[Store], Iterable[tuple[str, str]]],
) -> list[tuple[str, str]]:
    try:
        from pipollux_sched.store import StateDir, Store

        given = context.params.get("names") or ()
        directory = StateDir.choose(context.params.get("state_dir"))
        with Store(directory.store) as store:
            return [
                (name, about)
                for name, about in names(store)
                if name.startswith(incomplete) and name not in given
            ]
    except Exception:  # a shell that completes shows whatever is said here amidst the command line
        return []
