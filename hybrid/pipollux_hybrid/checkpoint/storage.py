"""Checkpoints on disk: atomic directories with checksums, of which old ones are pruned.

A checkpoint is ``checkpoint-00000042``: one file per state and a manifest of their checksums, which
are computed while writing. It is written as ``.checkpoint-00000042.…``, flushed to the disk and
renamed; it is renamed again before it is removed. So a process killed at any instruction leaves
intact checkpoints, and perhaps a hidden directory, which is never read and which the next start
removes.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias, cast

from pipollux_hybrid.errors import CheckpointError
from pipollux_perfmodel.errors import PipolluxError

from .checked_file import CheckedFile, checksum_of, close_quietly

__all__ = [
    "MANIFEST",
    "Found",
    "StateError",
    "Written",
    "commit",
    "directory_of",
    "fault_of",
    "find",
    "flush_directory",
    "new_checkpoint",
    "part_name",
    "parts_of",
    "prepare",
    "prune",
    "remove_leftovers",
    "remove_probe",
    "version_of",
    "write",
    "write_file",
    "write_states",
]

Written: TypeAlias = tuple[str, int]
"""A file's checksum and its size in bytes."""
LOG = logging.getLogger(__name__)
PREFIX = "checkpoint-"
MANIFEST = "manifest.json"
FORMAT = 1
"""Version of this format; a reader refuses newer ones."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Disk errors that may resolve themselves."""
KEPT = 2
"""Number of checkpoints kept; the second newest is the fallback if the newest is damaged."""


DISK_ERRORS = (*NO_SPACE, errno.EFBIG, errno.EIO, errno.EROFS)
"""Disk errors that are independent of the content."""


class Found(NamedTuple):
    """The result of :func:`find`."""

    directory: Path | None
    """The newest intact checkpoint; None if there is nothing to restore."""
    refusal: str | None
    """Why the job must not start, one sentence; None if it may."""


class StateError(PipolluxError):
    """An error of a state's own ``save`` or ``snapshot``, prefixed with the state's name."""

    @classmethod
    def of(cls, name: str, error: Exception) -> StateError:
        """Convert an exception."""
        if isinstance(error, CheckpointError):
            return cls(str(error))
        return cls(f"saving the state {name!r} failed with {type(error).__name__}: {error}")


def write(root: Path, writers: Mapping[str, Callable[[BinaryIO], None]], attempt: int) -> Path:
    """Write a new checkpoint, with one file per writer; the attempt is recorded in its manifest.
    Raises a CheckpointError if it cannot be written; earlier checkpoints are untouched.
    """
    with new_checkpoint(root) as aside:
        return commit(aside, write_states(aside, writers), attempt)


@contextmanager
def new_checkpoint(root: Path) -> Iterator[Path]:
    """Create the folder of a new checkpoint, to be committed in the body by :func:`commit`. If the
    body fails, a CheckpointError is raised and nothing of the new checkpoint is left.
    """
    final = directory_of(root, _next_version(root))
    # A unique name: a process of a lost replica may still be writing to another folder.
    aside = root / f".{final.name}.{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}. Free some space or choose another "
            "directory (PIPOLLUX_CHECKPOINT_DIR, or checkpoint_dir of a scheduler's job); earlier "
            "checkpoints are untouched"
        ) from error
    except StateError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}; earlier checkpoints are untouched"
        ) from error.__cause__
    except Exception:  # remove the partial checkpoint after any error
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_states(
    folder: Path, writers: Mapping[str, Callable[[BinaryIO], None]]
) -> dict[str, Written]:
    """Write states into the folder of a new checkpoint; return their manifest entries."""
    return {name: _write_state(folder / name, writer) for name, writer in writers.items()}


def commit(aside: Path, written: Mapping[str, Written], attempt: int) -> Path:
    """Turn the folder of :func:`new_checkpoint` into a checkpoint, and return it. ``written`` has
    the results of :func:`write_states` of all processes.
    """
    manifest = {
        "version": FORMAT,
        "attempt": attempt,
        "sha256": {name: checksum for name, (checksum, _) in written.items()},
        "size": {name: size for name, (_, size) in written.items()},
    }
    write_file(aside / MANIFEST, json.dumps(manifest, indent=1).encode())
    flush_directory(aside)
    final = aside.with_name(aside.stem.removeprefix("."))
    aside.rename(final)
    flush_directory(aside.parent)
    return final


def part_name(name: str, stage: int) -> str:
    """Return the file name of a stage's part of a state; stage 0 uses the state's name."""
    return f"{name}.stage{stage}" if stage else name


def parts_of(directory: Path, name: str) -> list[Path]:
    """Return the files of a state in a checkpoint, in the order of stages."""
    found = [directory / name]
    while (directory / part_name(name, len(found))).is_file():
        found.append(directory / part_name(name, len(found)))
    return found


def prepare(root: Path, probe: str) -> str | None:
    """Create a directory of checkpoints, and test that it is writable by a file ``probe``, which
    stays for other replicas to check; see :func:`remove_probe`.

    Returns:
        Why nothing can be saved there, one sentence; None if it can. A full disk is only logged, as
        there may be space at the first save.
    """
    try:
        if root.exists() and not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, and a folder is needed")
        root.mkdir(parents=True, exist_ok=True)
        write_file(root / probe, probe.encode())
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_SPACE:
            LOG.warning("PIPOLLUX_CHECKPOINT_DIR=%s: %s; nothing can be saved there", root, reason)
            return None
        remove_probe(root, probe)
        return (
            f"PIPOLLUX_CHECKPOINT_DIR={root} cannot be written to ({reason}): point it at a folder "
            "where this job may write, or unset it to train without checkpoints"
        )
    return None


def remove_probe(root: Path, probe: str) -> None:
    """Remove the test file of :func:`prepare`."""
    with suppress(OSError):
        (root / probe).unlink()


def find(root: Path) -> Found:
    """Return the checkpoint to restore from: the newest intact one."""
    directories, faults = _versions(root), []
    for directory in directories:
        newer = _newer_format(directory)
        if newer is not None:
            return Found(None, newer)
        fault = fault_of(directory)
        if fault is None:
            return Found(directory, None)
        faults.append(fault)
        LOG.warning("checkpoint %s is skipped: %s", directory, fault)
    if not directories:
        return Found(None, None)
    return Found(
        None,
        f"none of the checkpoints in {root} is whole (the newest: {faults[0]}): bring one back "
        "from a copy, or move them away to train from the beginning",
    )


def fault_of(directory: Path, *, sizes_only: bool = False) -> str | None:
    """Return why a checkpoint is damaged, None if it is intact; ``sizes_only`` reads no content."""
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        # Sizes first: they detect a truncated file without reading it.
        for name, size in manifest.get("size", {}).items():
            found = (directory / name).stat().st_size
            if found != size:
                return f"{name} is damaged: it has {found} bytes of {size}"
        for name, checksum in manifest["sha256"].items():
            if not sizes_only and checksum_of(directory / name) != checksum:
                return f"{name} is damaged: its checksum differs"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def prune(root: Path, keep_also: Path | None) -> None:
    """Remove all but the newest checkpoints and ``keep_also``, from which this attempt restores."""
    for directory in _versions(root)[KEPT:]:
        if directory != keep_also:
            _remove(directory)


def remove_leftovers(root: Path) -> None:
    """Remove partial directories of killed saves and removals; only while nobody saves."""
    if root.is_dir():
        for path in root.glob(f".{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as fileobj:
        fileobj.write(content)
        fileobj.flush()
        os.fsync(fileobj.fileno())


def flush_directory(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_state(path: Path, writer: Callable[[BinaryIO], None]) -> tuple[str, int]:
    fileobj = CheckedFile(path)
    try:
        try:
            writer(cast("BinaryIO", fileobj))
        except Exception as error:  # a state's save is the script's own code
            # torch raises its own errors for a full disk.
            if fileobj.disk_error is not None:
                raise fileobj.disk_error from None
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            raise StateError.of(path.name, error) from error
        return fileobj.finish()
    finally:
        close_quietly(fileobj)


def directory_of(root: Path, version: int) -> Path:
    """Return the directory of a checkpoint by its number."""
    return root / f"{PREFIX}{version:08d}"


def version_of(directory: Path | None) -> int | None:
    """Return the number of our checkpoint; None for other names, such as ``checkpoint-500``."""
    if directory is None:
        return None
    digits = directory.name.removeprefix(PREFIX)
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return int(digits) if directory.name == f"{PREFIX}{int(digits):08d}" else None


def _versions(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    numbered = [(version_of(path), path) for path in root.iterdir() if path.is_dir()]
    known = [(version, path) for version, path in numbered if version is not None]
    return [path for _, path in sorted(known, reverse=True)]


def _next_version(root: Path) -> int:
    versions = _versions(root)
    return (version_of(versions[0]) or 0) + 1 if versions else 1


def _newer_format(directory: Path) -> str | None:
    """Return why a checkpoint of a later release is refused, None for others."""
    try:
        version = json.loads((directory / MANIFEST).read_bytes())["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(version, int) and version > FORMAT:
        return (
            f"checkpoint {directory} has format version {version}, and this release of Pipollux "
            f"reads versions up to {FORMAT}: install the release that wrote it, or a later one"
        )
    return None


def _remove(directory: Path) -> None:
    aside = directory.with_name(f".{directory.name}.removed")
    try:
        directory.rename(aside)
    except OSError as error:
        LOG.warning("the old checkpoint %s cannot be removed: %s", directory, error)
        return
    shutil.rmtree(aside, ignore_errors=True)
