"""A file writer with a checksum."""

from __future__ import annotations

import hashlib
import io
import logging
import os
from pathlib import Path
from typing import Any

__all__ = ["CheckedFile", "checksum_of", "close_quietly"]

LOG = logging.getLogger(__name__)


class CheckedFile(io.BufferedWriter):
    """A file writer that computes the checksum of its content.

    Some writers bypass :meth:`write` or seek back; then the file is read again. A disk error is
    recorded, because ``torch.save`` replaces it by its own.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), buffer_size=1 << 20)
        self._path = path
        self._hash = hashlib.sha256()
        self._count = 0
        self._straight = True
        self.disk_error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write bytes, adding them to the checksum."""
        try:
            written = super().write(data)
        except OSError as error:
            self.disk_error = error
            raise
        self._hash.update(data)
        self._count += written
        return written

    def seek(self, target: int, whence: int = 0, /) -> int:
        """Seek in the file, as formats do that fill in a header at the end."""
        self._straight = False
        return super().seek(target, whence)

    def finish(self) -> tuple[str, int]:
        """Flush to the disk; return the file's sha256 and its size in bytes."""
        try:
            self.flush()
            os.fsync(self.fileno())
        except OSError as error:
            self.disk_error = error
            raise
        size = os.fstat(self.fileno()).st_size
        if self._straight and size == self._count:
            return self._hash.hexdigest(), size
        return checksum_of(self._path), size


def close_quietly(fileobj: CheckedFile) -> None:
    """Close a file; after an error it would try to flush its buffer again."""
    try:
        fileobj.close()
    except OSError as error:
        LOG.debug("closing %s: %s", fileobj.name, error)


def checksum_of(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as fileobj:
        return hashlib.file_digest(fileobj, "sha256").hexdigest()
