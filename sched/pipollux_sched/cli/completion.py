"""Shell completion: the names of jobs, nodes and policies; none after errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from .reader import Reader


TIMEOUT = 2.0


def complete_jobs(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the jobs with this prefix and their phases, except those already named."""
    return _offered(
        context, incomplete, lambda reader: ((job.name, job.phase.value) for job in reader.jobs())
    )


def complete_sweeps(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the sweeps with this prefix and their phases."""
    return _offered(
        context,
        incomplete,
        lambda reader: ((sweep.name, sweep.phase.value) for sweep in reader.sweeps()),
    )


def complete_nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the nodes with this prefix and their conditions."""
    return _offered(
        context,
        incomplete,
        lambda reader: ((node.name, node.condition.value) for node in reader.nodes()),
    )


def complete_policies(incomplete: str) -> list[str]:
    """Return the policies with this prefix."""
    from pipollux_policies import POLICIES

    return [name for name in POLICIES if name.startswith(incomplete)]


def complete_event_types(incomplete: str) -> list[str]:
    """Return the event types with this prefix."""
    from pipollux_sched.report.event_text import EVENT_TYPES

    return [name for name in EVENT_TYPES if name.startswith(incomplete)]


def _offered(
    context: typer.Context, incomplete: str, names: Callable[[Reader], Iterable[tuple[str, str]]]
) -> list[tuple[str, str]]:
    try:
        from .reader import reading
        from .server_choice import choose_server

        choose_server(context, timeout=TIMEOUT)
        given = context.params.get("names") or ()
        with reading(context.params.get("state_dir")) as reader:
            return [
                (name, about)
                for name, about in names(reader)
                if name.startswith(incomplete) and name not in given
            ]
    except Exception:  # output during completion would appear in the middle of the command line
        return []
