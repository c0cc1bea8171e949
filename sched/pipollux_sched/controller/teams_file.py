"""The file of teams, read again whenever it changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from pipollux_sched.spec.job import SpecError
from pipollux_sched.spec.teams import load_teams
from pipollux_sched.store import Store

_LOG = logging.getLogger(__name__)


class TeamsFile:
    """Keeps the store's teams as a file says.

    What was set over REST since the file was read last stays until the file changes again, or the
    scheduler starts with it. A file that has changed is read once it has stayed as it is for two
    looks, so that one which is still being written is not taken for a shorter one.

    Args:
        path: the file.
        store: the scheduler's store.
        reconsider: called when the teams have changed.

    Raises:
        SpecError: the file cannot be read, or says something that is not allowed.
    """

    def __init__(self, path: Path, store: Store, reconsider: Callable[[], None]) -> None:
        self._path, self._store, self._reconsider = path, store, reconsider
        self._read = self._seen = self._sign()
        store.teams.set_spec(load_teams(path).model_dump(mode="json"))

    def look(self) -> None:
        """Read the file if it has changed; one that is wrong is logged, and changes nothing."""
        signature, before = self._sign(), self._seen
        self._seen = signature
        if signature is None or signature == self._read or signature != before:
            return
        try:
            spec = load_teams(self._path)
        except SpecError as error:
            _LOG.warning("the teams stay as they are: %s", error)
        else:
            # Where the store fails, the next look does it.
            self._store.teams.set_spec(spec.model_dump(mode="json"))
            self._reconsider()
        self._read = signature

    def _sign(self) -> tuple[int, int, int] | None:
        """Return what differs when the file has been written again; None if it is not there."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
