"""Checkpoints: pieces of state, saved together, whole or not at all.

A checkpoint is a directory ``checkpoint-00000042`` with one file per :class:`State` and a manifest
of their checksums. It is written under another name, flushed to the disk and then renamed, so that
a process killed at any instruction leaves either the new checkpoint or the old one. Loading takes
the newest whose checksums hold. Rank 0 writes; every rank reads.

The interface of :class:`State` is AdaptDL's (``save``, ``load``, ``sync``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO

import torch

from .context import JobContext, context
from .errors import CheckpointError

__all__ = ["State", "load_state", "save_all_states"]

LOG = logging.getLogger(__name__)
PREFIX = "checkpoint-"
MANIFEST = "manifest.json"
STOP_MARKER = "stopped.json"
KEPT = 2
"""Checkpoints kept; the one before the newest is the way back from a bad disk."""


class State:
    """A piece of state that outlives restarts.

    Subclasses say how to write and read it; :func:`load_state` restores it after a restart.
    Bytes are read back on machines that must not run them, so never unpickle in ``load`` (use
    ``torch.load(..., weights_only=True)`` or JSON).

    Args:
        name: Unique in the job, and a plain file name.

    Raises:
        ValueError: Another state has this name, or it is no file name.
    """

    def __init__(self, name: str) -> None:
        states = context().states
        if Path(name).name != name or name.startswith(".") or name in ("", MANIFEST):
            raise ValueError(f"state name {name!r} must be a plain file name")
        if name in states:
            raise ValueError(f"a state named {name!r} exists already; names must be unique")
        self.name = name
        states[name] = self

    def save(self, fileobj: BinaryIO) -> None:
        """Write the state; called on rank 0."""
        raise NotImplementedError

    def load(self, fileobj: BinaryIO) -> None:
        """Read what :meth:`save` wrote; called on every rank."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state the same on all replicas; called on every rank before a save."""


def save_all_states() -> Path | None:
    """Save every state as one new checkpoint.

    All replicas call it at the same step boundary.

    Returns:
        The directory of the checkpoint; None where ``PIPOLLUX_CHECKPOINT_DIR`` is not set.

    Raises:
        CheckpointError: The disk does not take it; the checkpoints before are untouched.
    """
    ctx = context()
    for state in ctx.states.values():
        state.sync()
    root = ctx.env.checkpoint_dir
    path = None
    if root is not None and ctx.env.rank == 0:
        path = _write(ctx, root)
        _prune(root, keep_also=ctx.restored_from)
    return path


def load_state(state: State) -> bool:
    """Restore a state from the newest good checkpoint.

    Returns:
        Whether there was something to restore.

    Raises:
        CheckpointError: The checkpoint holds the state, but it cannot be read.
    """
    ctx = context()
    if ctx.env.checkpoint_dir is None:
        return False
    directory = _directory_to_load(ctx, ctx.env.checkpoint_dir)
    if directory is None or not (directory / state.name).is_file():
        return False
    with (directory / state.name).open("rb") as fileobj:
        try:
            state.load(fileobj)
        except (ValueError, KeyError, RuntimeError, UnpicklingError) as error:
            raise CheckpointError(f"{directory / state.name}: {error}") from error
    return True


def write_stop_marker(step: int) -> None:
    """Tell the scheduler that this generation stopped at ``step`` because it was asked to."""
    ctx = context()
    root = ctx.env.checkpoint_dir
    if root is None or ctx.env.rank != 0:
        return
    marker = {"generation": ctx.env.generation, "step": step, "reason": "signal"}
    aside = root / f".{STOP_MARKER}"
    _write_file(aside, json.dumps(marker).encode())
    aside.rename(root / STOP_MARKER)
    _flush_directory(root)


def _directory_to_load(ctx: JobContext, root: Path) -> Path | None:
    """The checkpoint all replicas restore from: the newest good one that rank 0 sees."""
    if not ctx.looked_for_checkpoint:
        ctx.looked_for_checkpoint = True
        newest = _newest_good(root) if ctx.env.rank == 0 else None
        version = int(newest.name.removeprefix(PREFIX)) if newest else -1
        version = int(ctx.control.gather(torch.tensor([version]))[0].item())
        if version < 0:
            return None
        directory = root / f"{PREFIX}{version:08d}"
        if not directory.is_dir():
            raise CheckpointError(
                f"replica {ctx.env.rank} does not see {directory}, which replica 0 restores from: "
                "PIPOLLUX_CHECKPOINT_DIR must be storage that all nodes share"
            )
        ctx.restored_from = directory
    return ctx.restored_from


def _versions(root: Path) -> list[Path]:
    """Directories of checkpoints, newest first."""
    if not root.is_dir():
        return []
    named = [p for p in root.iterdir() if p.name.removeprefix(PREFIX).isdecimal() and p.is_dir()]
    return sorted(named, key=lambda p: int(p.name.removeprefix(PREFIX)), reverse=True)


def _newest_good(root: Path) -> Path | None:
    for directory in _versions(root):
        fault = _fault(directory)
        if fault is None:
            return directory
        LOG.warning("checkpoint %s is passed over: %s", directory, fault)
    return None


def _fault(directory: Path) -> str | None:
    """Why a checkpoint cannot be trusted, None if it can."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        for name, checksum in manifest["sha256"].items():
            if _checksum(directory / name) != checksum:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _write(ctx: JobContext, root: Path) -> Path:
    versions = _versions(root)
    version = int(versions[0].name.removeprefix(PREFIX)) + 1 if versions else 1
    final = root / f"{PREFIX}{version:08d}"
    aside = root / f".{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        checksums = {}
        for name, state in ctx.states.items():
            with (aside / name).open("wb") as fileobj:
                state.save(fileobj)
                fileobj.flush()
                os.fsync(fileobj.fileno())
            checksums[name] = _checksum(aside / name)
        manifest = {"version": 1, "generation": ctx.env.generation, "sha256": checksums}
        _write_file(aside / MANIFEST, json.dumps(manifest, indent=1).encode())
        _flush_directory(aside)
        aside.rename(final)
        _flush_directory(root)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}. Free some space or point "
            "PIPOLLUX_CHECKPOINT_DIR elsewhere; earlier checkpoints are untouched"
        ) from error
    return final


def _prune(root: Path, keep_also: Path | None) -> None:
    for directory in _versions(root)[KEPT:]:
        # States that are made later in this run still restore from where it began.
        if directory != keep_also:
            shutil.rmtree(directory, ignore_errors=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as fileobj:
        return hashlib.file_digest(fileobj, "sha256").hexdigest()


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as fileobj:
        fileobj.write(content)
        fileobj.flush()
        os.fsync(fileobj.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
