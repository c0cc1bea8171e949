"""Whether a job supports elastic resizes."""

from __future__ import annotations

from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.job.context import JobContext


def why_not_elastic(ctx: JobContext, *, joins: bool = True) -> str | None:
    """Return why replicas cannot join (or only leave) without a restart; None: they can."""
    for name, state in ctx.component(States).items():
        if not state.elastic and (joins or not state.shrinks):
            action = "join" if joins else "leave"
            allowed = " (replicas may leave)" if state.shrinks else ""
            return (
                f"replicas cannot {action} while others train, as {type(state).__name__} sets "
                f"elastic = False for the state {name}{allowed}: stop the job, and start it again "
                "with another number of replicas"
            )
    return None
