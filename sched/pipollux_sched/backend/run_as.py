"""Users of the machine as which a scheduler that runs as root starts the processes of jobs."""

from __future__ import annotations

import os
import pwd
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import pipollux_agent
from pipollux_sched.spec.job import JobSpec, SpecError

from .base import ReplicaProgram

__all__ = ["as_user_command", "check_account", "own_name", "why_not_as", "with_home_checkpoints"]

_AS_USER = Path(pipollux_agent.__file__).with_name("as_user.py")


def own_name() -> str:
    """Return the name of the user as which this process runs."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def why_not_as(user: str) -> str | None:
    """Return why jobs cannot run as a user of this machine; None: they can."""
    if os.geteuid() != 0:
        return (
            f"only a scheduler that runs as root can start jobs as '{user}', and this one runs as "
            f"'{own_name()}'; leave run_as out, or run the scheduler as root"
        )
    try:
        pwd.getpwnam(user)
    except KeyError:
        return f"this machine has no user '{user}'; give the name of one, as `getent passwd` lists"
    return None


def check_account(spec: JobSpec) -> None:
    """Refuse a job that is to run as a user as which it cannot.

    Raises:
        SpecError: so.
    """
    reason = None if spec.run_as is None else why_not_as(spec.run_as)
    if reason is not None:
        raise SpecError(f"job '{spec.name}': run_as: {reason}")


def with_home_checkpoints(spec: JobSpec, before: str | None) -> JobSpec:
    """Return a job with a folder for checkpoints that the user it runs as can write to.

    Args:
        spec: the job.
        before: the folder of the failed job that it takes the place of, if that ran as the same
            user.

    Raises:
        SpecError: that user has no home directory, and the job names no folder.
    """
    if spec.run_as is None or spec.checkpoint_dir is not None or spec.image is not None:
        return spec
    home = Path(pwd.getpwnam(spec.run_as).pw_dir)
    if before is None and not home.is_dir():
        raise SpecError(
            f"job '{spec.name}': checkpoint_dir: the job runs as '{spec.run_as}', whose home "
            f"directory {home} does not exist; give a folder that this user can write to"
        )
    # Not the folder of an earlier job of this name, which was deleted.
    own = home / ".local/state/pipollux" / f"{spec.name}-{secrets.token_hex(4)}"
    return spec.model_copy(update={"checkpoint_dir": before or str(own)})


def as_user_command(program: ReplicaProgram, command: Sequence[str]) -> list[str]:
    """Return a command of a replica's that runs as the user of its job."""
    if program.run_as is None:
        return list(command)
    folder = str(program.directory or Path.cwd())
    return [sys.executable, "-I", "-S", str(_AS_USER), program.run_as, folder, *command]
