"""Users of the machine as which a root scheduler starts the processes of jobs."""

from __future__ import annotations

import os
import pwd
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pipollux_agent
from pipollux_sched.spec.job import JobSpec, SpecError

from .base import ReplicaProgram

_AS_USER = Path(pipollux_agent.__file__).with_name("as_user.py")
_LOOKS = (
    'test -x "$1" && test -r "$2" || exit 11; cd -- "$3" 2>/dev/null || exit 12; '
    'test -r "$4" || exit 13'
)
"""A shell script, run as the user, that checks access to Python, this package, folder and script.
"""
_NO_PYTHON, _NO_FOLDER, _NO_SCRIPT = 11, 12, 13
_PATIENCE = 60.0
"""Its timeout in seconds: a folder may be on a network."""


def own_name() -> str:
    """Return the name of the user of this process."""
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
    """Reject a job with `SpecError` if its user of the machine cannot be used."""
    reason = None if spec.run_as is None else why_not_as(spec.run_as)
    if reason is not None:
        raise SpecError(f"job '{spec.name}': run_as: {reason}")


def refuse_user(spec: JobSpec, backend: str, whose: str) -> None:
    """Reject a job with `SpecError` if it has a user, for a backend that starts all as one."""
    if spec.run_as is not None:
        raise SpecError(
            f"job '{spec.name}': run_as: '{spec.run_as}' is of no use with the {backend} backend, "
            f"{whose}; leave it out"
        )


def why_no_python(user: str) -> str | None:
    """Return why a user cannot run this Python and this package; None: the user can."""
    if _look(user, Path("/"), Path("/")) != _NO_PYTHON:
        return None
    return (
        f"user '{user}' cannot run {sys.executable} or cannot read {_AS_USER.parent}, with which "
        "jobs are started; install Python and Pipollux in folders that all users may read"
    )


def check_access(spec: JobSpec) -> None:
    """Reject a resolved job with `SpecError` if its user has no access to its folder or script."""
    if spec.run_as is None or spec.working_dir is None:
        return
    if why_not_as(spec.run_as) is not None:
        return  # the backend refuses that user
    # `check_program` looks for a module as that user, and a command is the shell's.
    script = Path(spec.script or "/")
    found = _look(spec.run_as, Path(spec.working_dir), script)
    if found == _NO_PYTHON:
        raise SpecError(f"job '{spec.name}': run_as: {why_no_python(spec.run_as)}")
    if found == _NO_FOLDER:
        raise SpecError(
            f"job '{spec.name}': working_dir: user '{spec.run_as}', as whom the job runs, cannot "
            f"enter {spec.working_dir}; give a folder that this user can enter"
        )
    if found == _NO_SCRIPT:
        raise SpecError(
            f"job '{spec.name}': script: user '{spec.run_as}', as whom the job runs, cannot read "
            f"{spec.script}; give a script that this user can read"
        )


def _look(user: str, folder: Path, script: Path) -> int:
    """Return which access that a job needs its user lacks; 0: none."""
    account = pwd.getpwnam(user)
    paths = (sys.executable, str(_AS_USER.with_name("agent.py")), str(folder), str(script))
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", _LOOKS, "sh", *paths],
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=os.getgrouplist(user, account.pw_gid),
            cwd="/",
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0  # unknown: the job itself will report
    return done.returncode


def with_home_checkpoints(spec: JobSpec, before: str | None) -> JobSpec:
    """Return a job with a checkpoint folder that its user can write to, or raise `SpecError`.

    It is `before` if the failed job that it replaces ran as the same user.
    """
    if spec.run_as is None or spec.checkpoint_dir is not None or spec.image is not None:
        return spec
    home = Path(pwd.getpwnam(spec.run_as).pw_dir)
    if before is None and not home.is_dir():
        raise SpecError(
            f"job '{spec.name}': checkpoint_dir: the job runs as '{spec.run_as}', whose home "
            f"directory {home} does not exist; give a folder that this user can write to"
        )
    # A unique folder, as a deleted job may have had the same name.
    own = home / ".local/state/pipollux" / f"{spec.name}-{secrets.token_hex(4)}"
    return spec.model_copy(update={"checkpoint_dir": before or str(own)})


def as_user_command(program: ReplicaProgram, command: Sequence[str]) -> list[str]:
    """Return a replica's command that runs as the user of its job."""
    if program.run_as is None:
        return list(command)
    folder = str(program.directory or Path.cwd())
    return [sys.executable, "-I", "-S", str(_AS_USER), program.run_as, folder, *command]
