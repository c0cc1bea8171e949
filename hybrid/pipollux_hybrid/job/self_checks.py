"""State that all processes must have in common at every step, compared without another collective.

With P processes, rank 0 contributes P - 1 times its 32-bit digest to a sum over all of them, and
each other process its digest times -1: the sum is zero if all are equal, and otherwise nonzero
except in one case of 2**32. Then all processes detect it, and gather the contents.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

__all__ = ["SelfCheck", "share_of"]


class SelfCheck(Protocol):
    """State that is equal in all processes as long as the script treats them alike."""

    def digest(self) -> int:
        """Return its digest, below 2**32."""

    def content(self) -> bytes:
        """Return the state, to be sent to all."""

    def compare(self, contents: Sequence[bytes], word: str) -> None:
        """Compare the contents of all processes (each a ``word``: "replica" or "rank"), in the
        order of ranks; a SynchronizationError names the difference.
        """


def share_of(checks: Sequence[SelfCheck], rank: int, size: int) -> float:
    """Return a process's contribution to the sum over ``size`` processes, a whole number."""
    digests = ",".join(str(check.digest()) for check in checks)
    digest = zlib.crc32(digests.encode())
    return float(digest * (size - 1) if rank == 0 else -digest)
