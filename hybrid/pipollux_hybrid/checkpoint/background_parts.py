"""A checkpoint that several processes write during training, each the layers of its stage.

At the step boundary all processes copy their states, and agree on a folder, so all parts are of one
step. Then a thread of each process of replica 0 writes its part. Collectives belong to the
training, so each process reports to the first one over a separate connection, which closes if the
process dies. The first one commits the checkpoint when all have written.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job.context import JobContext

from . import storage as files
from .async_save import SAVE_TIMEOUT, AsyncSaver
from .parts import check_answers, tell
from .state import State, snapshot_of

__all__ = ["start_saving_in_parts"]

Writers: TypeAlias = Mapping[str, Callable[[BinaryIO], None]]
CONNECTS_WITHIN = 60.0
"""Seconds that a process waits for the first one, which connects before it writes."""


def start_saving_in_parts(
    ctx: JobContext,
    root: Path,
    states: Mapping[str, State],
    saver: AsyncSaver,
    keep_also: Path | None,
) -> None:
    """Copy the states, and begin to write a new checkpoint; all processes of the job call it.

    ``saver`` writes this process's part; the leader's commits the checkpoint, and raises a
    CheckpointError if it cannot be begun. For ``keep_also`` see
    :func:`pipollux_hybrid.checkpoint.storage.prune`.
    """
    if ctx.env.leads:
        _lead(ctx, root, states, saver, keep_also)
    elif ctx.env.rank == 0:
        _follow(ctx, states, saver)
    else:
        tell(ctx, {})


def _lead(
    ctx: JobContext,
    root: Path,
    states: Mapping[str, State],
    saver: AsyncSaver,
    keep_also: Path | None,
) -> None:
    message: dict[str, Any] = {"folder": None}
    with ExitStack() as ending:
        try:
            saver.wait()
            copies = {name: snapshot_of(state) for name, state in states.items()}
            aside = ending.enter_context(files.new_checkpoint(root))
            message = {"folder": str(aside)}
        finally:  # the others wait for it, also after an error
            answers = tell(ctx, message)[1 : ctx.env.processes_per_replica]
        check_answers(root, answers)
        stages = [ending.enter_context(_connected(x["address"])) for x in answers]
        write = partial(_finish, ending.pop_all(), aside, copies, stages, ctx.env.attempt)
    saver.start(partial(_write_and_prune, write, root, keep_also))


def _follow(ctx: JobContext, states: Mapping[str, State], saver: AsyncSaver) -> None:
    message: dict[str, Any] = {"error": "it failed before writing"}
    with ExitStack() as ending:
        try:
            saver.wait()
            copies = {
                files.part_name(name, ctx.env.stage): snapshot_of(state)
                for name, state in states.items()
                if state.in_parts
            }
            listener, address = ending.enter_context(_listening())
            message = {"address": address}
        except (CheckpointError, OSError) as error:
            message = {"error": str(error)}
        finally:
            answers = tell(ctx, message)[: ctx.env.processes_per_replica]
        folder = answers[0]["folder"]
        if folder is None or any("error" in answer for answer in answers):
            return
        write = partial(_write_part, ending.pop_all(), listener, Path(folder), copies)
    saver.start(write)


def _finish(
    ending: ExitStack,
    aside: Path,
    copies: Writers,
    stages: Sequence[socket.socket],
    attempt: int,
) -> Path:
    with ending:
        try:
            written = files.write_states(aside, copies)
        finally:  # others may still write into the folder
            answers = [_answer(stage) for stage in stages]
        return files.commit(aside, written | check_answers(aside.parent, answers), attempt)


def _write_and_prune(write: Callable[[], Path], root: Path, keep_also: Path | None) -> Path:
    path = write()
    files.prune(root, keep_also)
    return path


def _write_part(ending: ExitStack, listener: socket.socket, folder: Path, copies: Writers) -> Path:
    """Write another process's part, and report to the first one."""
    with ending:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            raise CheckpointError(
                f"a part of {folder} was not written, as the first process of the replica did not "
                f"connect within {CONNECTS_WITHIN:.0f} s: {error}"
            ) from error
    message: dict[str, Any] = {"error": "it was interrupted"}
    try:
        message = {"written": files.write_states(folder, copies)}
    except (OSError, files.StateError) as error:
        message = {"error": str(error)}
    finally:
        with connection, suppress(OSError):  # without the first one there is no checkpoint
            connection.sendall(json.dumps(message).encode())
            connection.shutdown(socket.SHUT_RDWR)  # forked workers of loaders hold it open
    return folder


def _answer(stage: socket.socket) -> dict[str, Any]:
    """Return another process's report; it may take long, or the process may die."""
    try:
        with stage.makefile("rb") as stream:
            answer: dict[str, Any] = json.loads(stream.read())
    except TimeoutError:
        return {"error": f"it has not written its part within {SAVE_TIMEOUT:.0f} s"}
    except (OSError, ValueError):
        return {"error": "its process has ended"}
    return answer


@contextmanager
def _listening() -> Iterator[tuple[socket.socket, str]]:
    """Listen in a folder of this user; the processes of a replica are on one host."""
    with (
        tempfile.TemporaryDirectory(prefix="pipollux-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = f"{folder}/part"
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(CONNECTS_WITHIN)
        yield listener, address


@contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.settimeout(CONNECTS_WITHIN)
            connection.connect(address)
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint is written: a process of this replica does not answer ({error}); "
                "earlier checkpoints are untouched"
            ) from error
        connection.settimeout(SAVE_TIMEOUT)
        yield connection
