"""Which members are silent, by their heartbeats and connections."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

CUT_OFF = 2.0
"""Seconds without a heartbeat after which a replica is lost whose connection is broken, as that of
a process that was killed: one that still runs connects again."""


class Liveness:
    """When members were heard of.

    Args:
        lost_after: Seconds of silence after which a member is lost.
    """

    def __init__(self, lost_after: float) -> None:
        self._lost_after = lost_after
        self._seen: dict[int, float] = {}
        self._via: dict[int, str] = {}
        """The connection of each member's last heartbeat."""
        self._cut_off: dict[int, float] = {}
        """Since when that is broken."""

    def hear(self, member: int, via: str | None = None) -> None:
        """Note a request of a member; ``via``: a heartbeat over this connection."""
        self._seen[member] = time.monotonic()
        if via is not None:
            self._via[member] = via
            self._cut_off.pop(member, None)

    def broken(self, via: str) -> None:
        """Note that a connection is broken."""
        members = [member for member, known in self._via.items() if known == via]
        self._cut_off |= dict.fromkeys(members, time.monotonic())

    def forget(self, member: int) -> None:
        """Forget a member that is lost."""
        for known in (self._seen, self._via, self._cut_off):
            known.pop(member, None)

    def forgive(self, seconds: float) -> None:
        """Count no silence for a time in which this process was stopped or busy: heartbeats of it
        are still to be read.
        """
        now = time.monotonic()
        for moments in (self._seen, self._cut_off):
            for member, moment in moments.items():
                moments[member] = min(moment + seconds, now)

    def silent(self, members: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield members that are lost, and why; those never heard of count from now on."""
        now = time.monotonic()
        for member in members:
            silent = now - self._seen.setdefault(member, now)
            cut_off = now - self._cut_off.get(member, now)
            if cut_off >= CUT_OFF:
                yield member, f"no connection for {max(silent, cut_off):.0f} s"
            elif silent >= self._lost_after:
                yield member, f"no heartbeat for {silent:.0f} s"
