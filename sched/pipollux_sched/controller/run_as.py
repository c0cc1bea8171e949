"""Validation of tokens with a user of the machine as whom their jobs run."""

from __future__ import annotations

import os

from pipollux_sched.backend.run_as import own_name, why_no_python, why_not_as
from pipollux_sched.spec.job import SpecError
from pipollux_sched.spec.tokens import NewToken, Role

__all__ = ["check_run_as"]

_ON_MACHINES = ("local", "slurm")
"""Backends whose replicas are processes of a machine; others run containers."""


def check_run_as(token: NewToken, backend: str) -> str:
    """Return a warning about a token holder's rights; `SpecError`: no job can run as `run_as`."""
    if token.run_as is not None:
        if backend not in _ON_MACHINES:
            raise SpecError(
                f"run_as: '{token.run_as}' is of no use with the {backend} backend, whose pods run "
                "as their image says; leave it out"
            )
        reason = why_not_as(token.run_as) or why_no_python(token.run_as)
        if reason is not None:
            raise SpecError(f"run_as: {reason}")
    if token.role is not Role.USER or backend not in _ON_MACHINES:
        return ""
    if token.run_as not in (None, own_name()):
        return ""
    remedy = (
        "to run them as another user of the machine, pass --run-as"
        if os.geteuid() == 0
        else "only a scheduler that runs as root can run them as another user (--run-as)"
    )
    return (
        f"jobs of '{token.name}' run as '{own_name()}', as the scheduler does, and can read and "
        f"change all that it can, its tokens too: '{token.name}' must be trusted as an admin is; "
        f"{remedy}"
    )
