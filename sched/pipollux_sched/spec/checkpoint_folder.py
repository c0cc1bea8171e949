"""Checks of a job's `checkpoint_dir`: only this job may write to it.

Checkpoints are written, renamed and removed automatically. So a folder that holds other files, or
belongs to another user, is refused at submission.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from .job import JobSpec, SpecError

SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin"),
    *("/sys", "/usr", "/var/cache", "/var/log", "/var/run", "/var/spool"),
)
ALLOWED = ("/dev/shm", "/run/user", "/run/media")  # noqa: S108  # for users, and in memory
"""Exceptions within them."""
_SAVED = re.compile(r"\.?checkpoint-\d{8}|\.?stopped\.json")
"""Names of a job's files in its checkpoint folder."""
_IGNORED = re.compile(r"lost\+found|\.snapshot|\.elastic-\d+|\.owner")
"""Names that file systems create in empty folders, and that replicas leave behind."""


def check_checkpoint_folder(
    spec: JobSpec, state_dir: Path, others: Iterable[tuple[str, str]]
) -> None:
    """Raise `SpecError` if a job's `checkpoint_dir` is not allowed, or is that of another job."""
    if spec.checkpoint_dir is None:
        return
    given = Path(spec.checkpoint_dir)
    folder = given.resolve()
    known = list(others)
    reason = _climbs(given) or _is_anothers(spec.name, folder, known)
    if reason is None and spec.image is None:  # folders inside an image are not on this machine
        reason = _is_reserved(spec.name, folder, state_dir)
        if (spec.name, spec.checkpoint_dir) not in known:
            reason = reason or _is_unusable(folder)
    if reason is not None:
        shown = f"{given}" if folder == given else f"{given} ({folder})"
        raise SpecError(f"job '{spec.name}': checkpoint_dir: {shown} {reason}")


def check_empty(spec: JobSpec) -> None:
    """Raise `SpecError` if a job starts from scratch in a `checkpoint_dir` that is not empty."""
    if spec.checkpoint_dir is None or spec.image is not None:
        return  # in the state directory each run has its own folder
    folder = Path(spec.checkpoint_dir)
    if folder.is_dir() and _names(folder):
        raise SpecError(
            f"job '{spec.name}': checkpoint_dir: {folder} holds checkpoints, which the scheduler "
            "leaves as they are; to start from the beginning, move them away first"
        )


def _climbs(given: Path) -> str | None:
    return "climbs out of a folder by '..'; give the folder itself" if ".." in given.parts else None


def _is_anothers(name: str, folder: Path, others: Iterable[tuple[str, str]]) -> str | None:
    for other, where in others:
        if other == name:
            continue
        its = Path(where).resolve()
        if its == folder:
            return f"is job '{other}''s; give each job its own folder"
        if _within(folder, its) or _within(its, folder):
            return f"and job '{other}''s {its} contain each other; give each job its own folder"
    return None


def _is_reserved(name: str, folder: Path, state_dir: Path) -> str | None:
    advice = "give a folder of the job's own, as in /data/checkpoints/" + name
    own = state_dir / "jobs" / name / "checkpoints"
    if folder == own:
        return None
    allowed = any(_within(folder, Path(root)) for root in ALLOWED)
    if folder == Path("/") or (not allowed and any(_within(folder, Path(r)) for r in SYSTEM)):
        return f"belongs to the operating system; {advice}"
    if _within(state_dir, folder) or _within(folder, state_dir):
        return f"is, or holds, a part of the scheduler's state directory {state_dir}; {advice}"
    return None


def _is_unusable(folder: Path) -> str | None:
    """Return why a folder that no job has used yet is not allowed."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return f"is not a folder, or cannot become one, as {there} is a file; give another"
        if not os.access(there, os.W_OK | os.X_OK):
            return (
                f"cannot be written to, as {there} is not writable for the scheduler; give another"
            )
        if there != folder:
            return None
        names = _names(folder)
    except OSError as error:
        return f"cannot be used ({error.strerror}); give another"
    if not names or any(_SAVED.fullmatch(name) for name in names):
        return None
    return f"holds '{min(names)[:60]}' and no checkpoint; give an empty folder, or one to be made"


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not _IGNORED.fullmatch(path.name)}


def _within(folder: Path, other: Path) -> bool:
    return folder == other or other in folder.parents
