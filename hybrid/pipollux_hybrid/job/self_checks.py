"""What all processes must have alike in every step, compared at no extra collective.

Each check has a digest of 32 bits. With P processes, rank 0 contributes P - 1 times its own to a
sum over all of them, and each other process its own times -1: the sum is zero if all are the same,
and otherwise, but for one case in 2**32, it is not. Then all processes know, and gather what
differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

__all__ = ["SelfCheck", "share_of"]


class SelfCheck(Protocol):
    """Something that is the same in all processes as long as the script treats them alike."""

    def digest(self) -> int:
        """Return a number below 2**32 that depends on it."""

    def content(self) -> bytes:
        """Return it, to be sent to all."""

    def compare(self, contents: Sequence[bytes], word: str) -> None:
        """Compare what all processes have, in the order of ranks.

        Args:
            contents: Of all processes.
            word: What a process is called, ``"replica"`` or ``"rank"``.

        Raises:
            SynchronizationError: They differ; the message says in what.
        """


def share_of(checks: Sequence[SelfCheck], rank: int, size: int) -> float:
    """Return what a process contributes to the sum, a whole number.

    Args:
        checks: Of this process.
        rank: This process's.
        size: Number P of processes.
    """
    digests = ",".join(str(check.digest()) for check in checks)
    digest = zlib.crc32(digests.encode())
    return float(digest * (size - 1) if rank == 0 else -digest)
