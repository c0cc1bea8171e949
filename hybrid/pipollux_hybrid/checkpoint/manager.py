"""Checkpoints: states of a job, saved together and atomically.

Rank 0 writes one file per state, at a step boundary that all replicas agreed on; every rank reads
from the newest intact checkpoint (:mod:`pipollux_hybrid.checkpoint.storage`). With
``background=True`` the boundary only copies, and a thread writes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from pipollux_hybrid.errors import CheckpointError, ConfigurationError, PeerLostError
from pipollux_hybrid.job.context import JobContext, context
from pipollux_hybrid.job.exit_status import fail_at_exit, forget_failure

from . import storage as files
from .async_save import AsyncSaver
from .background_parts import start_saving_in_parts
from .owner import Owner
from .parts import save_in_parts
from .state import State, States, snapshot_of

_ended: set[Path] = set()
"""The directories of trainings that this process has ended."""


class CheckpointManager:
    """The job's checkpoints."""

    def __init__(self, ctx: JobContext) -> None:
        self.saver = AsyncSaver()
        self.looked = False
        """Whether the replicas have agreed on the checkpoint to restore from."""
        self.restored_from: Path | None = None
        """The checkpoint that this attempt restores from; None for a fresh start."""
        self.saved_step: int | None = None
        """The step of the last checkpoint, written or restored."""
        self.owner: Owner | None = None
        """This process's lock on the directory; None if nothing is saved."""
        ctx.closers.append(self.saver.wait)


def save_all_states(*, background: bool = False) -> Path | None:
    """Save every state as one new checkpoint.

    All replicas call it at the same step boundary.

    Args:
        background: Whether to return as soon as the states are copied, and write them in a thread.
            One save runs at a time: the call waits for the previous one. Errors in the thread are
            printed at a later step boundary.

    Returns:
        The directory of the checkpoint; None without ``PIPOLLUX_CHECKPOINT_DIR``, on ranks above 0,
        and in the background.

    Raises:
        CheckpointError: It cannot be written; earlier checkpoints are untouched.
    """
    ctx = context()
    manager, states = ctx.component(CheckpointManager), ctx.component(States)
    if ctx.mesh is not None:
        ctx.mesh.calls.meet("save_all_states()")
    ctx.control.check()
    for state in states.values():
        state.sync()
    root = ctx.env.checkpoint_dir
    if root is not None and ctx.mesh is not None:  # all take part
        if background:
            start_saving_in_parts(ctx, root, states, manager.saver, manager.restored_from)
            return None
        path = save_in_parts(ctx, root, states, manager.saver)
        if path is not None:
            files.prune(root, keep_also=manager.restored_from)
            manager.saved_step = ctx.step
            forget_failure()
        return path
    if root is None or not ctx.env.leads:
        return None
    manager.saver.wait()
    if not background:
        writers = {name: state.save for name, state in states.items()}
        path = _write(root, writers, ctx.env.attempt, manager.restored_from)
        manager.saved_step = ctx.step
        forget_failure()
        return path
    copies = {name: snapshot_of(state) for name, state in states.items()}
    manager.saver.start(partial(_write, root, copies, ctx.env.attempt, manager.restored_from))
    return None


def save_last_states() -> None:
    """Save every state at the end of the training. A failure does not raise: it is logged and
    determines the exit status, so that the script can save the model at its own end.
    """
    failure: CheckpointError | None = None
    try:
        save_all_states()
    except CheckpointError as error:
        failure = error
    # A lost replica has its own exit status, and the others have nothing left to do.
    with suppress(PeerLostError):
        failure = shared_failure(context(), failure)
    if failure is not None:
        fail_at_exit(str(failure))
    else:
        forget_failure()


def shared_failure(ctx: JobContext, failure: CheckpointError | None) -> CheckpointError | None:
    """Return why rank 0 has not written a checkpoint, on all replicas; None: it has."""
    failures = ctx.control.gather_bytes(("" if failure is None else str(failure)).encode())
    reasons = [reason.decode() for reason in failures if reason]
    return CheckpointError(reasons[0]) if reasons else None


def load_state(state: State) -> bool:
    """Restore a state from the newest intact checkpoint; return whether the checkpoint holds it.

    Raises:
        CheckpointError: The checkpoint holds the state, but it cannot be read; or there are
            checkpoints, but this job can restore none of them.
    """
    ctx = context()
    directory = checkpoint_to_restore(ctx)
    if directory is None or not (directory / state.name).is_file():
        return False
    with ExitStack() as stack:
        found = (
            files.parts_of(directory, state.name) if state.in_parts else [directory / state.name]
        )
        parts = [stack.enter_context(path.open("rb")) for path in found]
        try:
            if len(parts) > 1:
                state.load_parts(parts)
            else:
                state.load(parts[0])
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        except (ValueError, KeyError, RuntimeError, UnpicklingError) as error:
            raise CheckpointError(f"{directory / state.name}: {error}") from error
    return True


def write_stop_marker(step: int) -> None:
    """Record that this attempt stopped at ``step`` as requested, or raise a CheckpointError."""
    ctx = context()
    root = ctx.env.checkpoint_dir
    if root is None or not ctx.env.leads:
        return
    from pipollux_protocol.files import STOP_MARKER, StopMarker  # imports pydantic

    marker = StopMarker(attempt=ctx.env.attempt, step=step)
    aside = root / f".{STOP_MARKER}"
    try:
        files.write_file(aside, marker.model_dump_json().encode())
        aside.rename(root / STOP_MARKER)
        files.flush_directory(root)
    except OSError as error:
        raise CheckpointError(f"cannot write {root / STOP_MARKER}: {error}") from error


def _write(
    root: Path,
    writers: Mapping[str, Callable[[BinaryIO], None]],
    attempt: int,
    restored_from: Path | None,
) -> Path:
    path = files.write(root, writers, attempt)
    files.prune(root, keep_also=restored_from)
    return path


def checkpoint_to_restore(ctx: JobContext) -> Path | None:
    """Return the checkpoint that all replicas restore from: the newest intact one on rank 0.

    The first call searches for it, on all replicas at the same point of the script, and tests
    whether the directory is writable.

    Raises:
        CheckpointError: The directory is not writable or not shared, or this job can restore none
            of its checkpoints; raised on every replica.
    """
    root, manager = ctx.env.checkpoint_dir, ctx.component(CheckpointManager)
    if root is not None and not manager.looked:
        plan = _plan(ctx, root)
        if plan["refusal"] is not None:
            raise CheckpointError(plan["refusal"])
        if plan["version"] is not None and root in _ended:
            raise ConfigurationError(
                f"PIPOLLUX_CHECKPOINT_DIR={root} has the checkpoints of a training that this "
                "process has ended, and the next model would start from them: give each training "
                "(fold, trial) a folder of its own, by os.environ['PIPOLLUX_CHECKPOINT_DIR'] "
                "before init_process_group(), or a process of its own"
            )
        if plan["version"] is not None:
            holder = root if plan["holder"] is None else root.parent / plan["holder"]
            manager.restored_from = _see(ctx, files.directory_of(holder, plan["version"]))
        manager.looked = True
    return manager.restored_from


def note_end(ctx: JobContext) -> None:
    """Record that a training has ended, which no other model of this process continues."""
    if ctx.env.checkpoint_dir is not None:
        _ended.add(ctx.env.checkpoint_dir)


def _plan(ctx: JobContext, root: Path) -> dict[str, Any]:
    """Return rank 0's findings in the directory, on all replicas."""
    probe = f".probe-{secrets.token_hex(8)}"
    owner = Owner(root, ctx.env)
    plan: dict[str, Any] = {"refusal": None, "version": None, "probe": None, "holder": None}
    if ctx.env.leads:
        plan["refusal"] = files.prepare(root, probe) or owner.claim()
        if plan["refusal"] is None:
            files.remove_leftovers(root)
            found = files.find(root)
            plan["refusal"], plan["version"] = found.refusal, files.version_of(found.directory)
            if ctx.env.servers is not None:
                plan |= _newest_of_replicas(root, found.directory)
            # On a full disk there is no probe, and nobody checks for it.
            plan["probe"] = probe if (root / probe).exists() else None
    try:
        plan = json.loads(ctx.control.gather_bytes(json.dumps(plan).encode())[0])
        _check_shared(ctx, root, plan["probe"])
    finally:
        if ctx.env.leads:
            files.remove_probe(root, probe)
    if plan["refusal"] is None:
        _hold(ctx, owner)
    else:
        owner.close()
    return plan


def _newest_of_replicas(root: Path, own: Path | None) -> dict[str, Any]:
    """Return the newest checkpoint of replicas that push and pull, each in its own folder beside
    ``root``: one that was away or is new continues with what is not on the servers, such as the
    learning-rate schedule, where the others are.
    """
    newest, plan = own, {}
    for folder in sorted(root.parent.glob("replica-*")):
        found = files.find(folder).directory if folder != root and folder.is_dir() else None
        if found is not None and (newest is None or found.stat().st_mtime > newest.stat().st_mtime):
            newest = found
            plan = {"refusal": None, "version": files.version_of(found), "holder": folder.name}
    return plan


def _hold(ctx: JobContext, owner: Owner) -> None:
    """Lock the directory until this process ends; the leader of the job records itself as owner."""
    owner.share()
    ctx.component(CheckpointManager).owner = owner
    ctx.closers.append(owner.close)
    ctx.rejoined.append(lambda: owner.record() if ctx.env.leads else None)


def _see(ctx: JobContext, directory: Path) -> Path:
    fault = files.fault_of(directory, sizes_only=True)
    if fault is not None:
        raise CheckpointError(
            f"replica {ctx.env.rank} does not see {directory} as replica 0 does, which restores "
            f"from it ({fault}): PIPOLLUX_CHECKPOINT_DIR must be storage that all nodes share"
        )
    return directory


def _check_shared(ctx: JobContext, root: Path, probe: str | None) -> None:
    """Refuse a directory that is a different one on another node: the next attempt might have its
    replica 0 on a node without checkpoints and silently start from scratch.
    """
    seen = probe is None or (root / probe).exists()
    everyone = [bool(x.item()) for x in ctx.control.gather(torch.tensor([int(seen)]))]
    if not all(everyone):
        raise CheckpointError(
            f"PIPOLLUX_CHECKPOINT_DIR={root} on replica {everyone.index(False)} is not the "
            "directory that replica 0 sees: point it at storage that all nodes share"
        )
