"""Checkpoints: pieces of state, saved together, whole or not at all.

Rank 0 writes, at a step boundary that all replicas agreed on, one file per :class:`State`; every
rank reads, from the newest checkpoint that is whole (:mod:`pipollux_hybrid.checkpoint_files`). With
``background=True`` the boundary only copies, and a thread writes.

The interface of :class:`State` is AdaptDL's (``save``, ``load``, ``sync``).
"""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO

import torch

from . import checkpoint_files as files
from .context import JobContext, context
from .errors import CheckpointError

__all__ = ["State", "load_state", "save_all_states"]

STOP_MARKER = "stopped.json"
NOTHING, REFUSED = -1, -2
"""What rank 0 tells the others instead of a version."""


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
        if Path(name).name != name or name.startswith(".") or name in ("", files.MANIFEST):
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

    def snapshot(self) -> Callable[[BinaryIO], None]:
        """Copy the state as it is now, for a thread to write while training goes on.

        Called on rank 0 instead of :meth:`save` when a checkpoint is written in the background.
        By default :meth:`save` writes into memory; large states may copy faster than that.

        Returns:
            What writes the copy to a file.
        """
        copy = io.BytesIO()
        self.save(copy)
        return lambda fileobj: _write_all(fileobj, copy)


def save_all_states(*, background: bool = False) -> Path | None:
    """Save every state as one new checkpoint.

    All replicas call it at the same step boundary.

    Args:
        background: Whether to return as soon as the states are copied, and write them in a thread.
            One checkpoint is under way at a time: the call waits for the one before. What goes
            wrong in the thread is printed at a later step boundary.

    Returns:
        The directory of the checkpoint; None where ``PIPOLLUX_CHECKPOINT_DIR`` is not set, on
        ranks above 0, and in the background.

    Raises:
        CheckpointError: The disk does not take it; the checkpoints before are untouched.
    """
    ctx = context()
    for state in ctx.states.values():
        state.sync()
    root = ctx.env.checkpoint_dir
    if root is None or ctx.env.rank != 0:
        return None
    ctx.background_save.wait()
    if not background:
        writers = {name: state.save for name, state in ctx.states.items()}
        return _write(root, writers, ctx.env.generation, ctx.restored_from)
    copies = {name: state.snapshot() for name, state in ctx.states.items()}
    ctx.background_save.start(partial(_write, root, copies, ctx.env.generation, ctx.restored_from))
    return None


def load_state(state: State) -> bool:
    """Restore a state from the newest good checkpoint.

    Returns:
        Whether there was something to restore.

    Raises:
        CheckpointError: The checkpoint holds the state, but it cannot be read; or there are
            checkpoints, and none that this job can go on from.
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
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
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
    files.write_file(aside, json.dumps(marker).encode())
    aside.rename(root / STOP_MARKER)
    files.flush_directory(root)


def _write(
    root: Path,
    writers: Mapping[str, Callable[[BinaryIO], None]],
    generation: int,
    restored_from: Path | None,
) -> Path:
    path = files.write(root, writers, generation)
    files.prune(root, keep_also=restored_from)
    return path


def _write_all(fileobj: BinaryIO, copy: io.BytesIO) -> None:
    fileobj.write(copy.getbuffer())


def _directory_to_load(ctx: JobContext, root: Path) -> Path | None:
    """The checkpoint all replicas restore from: the newest good one that rank 0 sees."""
    if not ctx.looked_for_checkpoint:
        ctx.looked_for_checkpoint = True
        _check_shared(ctx, root)
        found = files.Found(None, None)
        if ctx.env.rank == 0:
            files.remove_leftovers(root)
            found = files.find(root)
        version = REFUSED if found.refusal else files.version_of(found.directory) or NOTHING
        version = int(ctx.control.gather(torch.tensor([version]))[0].item())
        if version == REFUSED:
            raise CheckpointError(
                found.refusal or "replica 0 cannot go on from the checkpoints; its log says why"
            )
        if version != NOTHING:
            ctx.restored_from = _see(ctx, files.directory_of(root, version))
    return ctx.restored_from


def _see(ctx: JobContext, directory: Path) -> Path:
    """Check that this replica sees the checkpoint that replica 0 chose."""
    fault = files.fault_of(directory, sizes_only=True)
    if fault is not None:
        raise CheckpointError(
            f"replica {ctx.env.rank} does not see {directory} as replica 0 does, which restores "
            f"from it ({fault}): PIPOLLUX_CHECKPOINT_DIR must be storage that all nodes share"
        )
    return directory


def _check_shared(ctx: JobContext, root: Path) -> None:
    """Refuse a directory that is another one on another node.

    Nothing would go wrong in this run, but the next one might have its replica 0 on a node without
    checkpoints and begin anew without a word.
    """
    if ctx.env.num_replicas == 1:
        return
    number = secrets.randbelow(1 << 62)
    probe = root / f".probe-{number:016x}"
    if ctx.env.rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            probe.touch()
        except OSError as error:
            number = 0  # whoever cannot write here says so at the first save
            files.LOG.warning("PIPOLLUX_CHECKPOINT_DIR=%s: %s", root, error)
    number = int(ctx.control.gather(torch.tensor([number]))[0].item())
    probe = root / f".probe-{number:016x}"
    seen = number == 0 or probe.exists()
    everyone = [bool(x.item()) for x in ctx.control.gather(torch.tensor([int(seen)]))]
    if ctx.env.rank == 0:
        probe.unlink(missing_ok=True)
    if not all(everyone):
        raise CheckpointError(
            f"PIPOLLUX_CHECKPOINT_DIR={root} on replica {everyone.index(False)} is not the "
            "directory that replica 0 sees: point it at storage that all nodes share"
        )
