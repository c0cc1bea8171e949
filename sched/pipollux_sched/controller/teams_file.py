"""The file of teams, reloaded whenever it changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from pipollux_sched.spec.job import SpecError
from pipollux_sched.spec.teams import TeamsSpec, load_teams
from pipollux_sched.store import Store

_LOG = logging.getLogger(__name__)


class TeamsFile:
    """Keeps the store's teams in step with a file.

    Changes over REST since the last read stay until the file changes again, or the scheduler starts
    with it. A changed file is read once it has stayed the same for two checks, so that a partly
    written file is not loaded.

    Raises:
        SpecError: the file cannot be read, or is invalid.
    """

    def __init__(
        self,
        path: Path,
        store: Store,
        reconsider: Callable[[], None],
        check: Callable[[TeamsSpec], None] = lambda _spec: None,
    ) -> None:
        self._path, self._store, self._reconsider = path, store, reconsider
        self._read = self._seen = self._sign()
        self._check = check
        store.teams.set_spec(self._load().revealed())

    def look(self) -> None:
        """Load the file if it has changed; an invalid one is logged and ignored."""
        signature, before = self._sign(), self._seen
        self._seen = signature
        if signature is None or signature == self._read or signature != before:
            return
        try:
            spec = self._load()
        except SpecError as error:
            _LOG.warning("the teams stay as they are: %s", error)
        else:
            # If the store fails, the next check retries.
            self._store.teams.set_spec(spec.revealed())
            self._reconsider()
        self._read = signature

    def _load(self) -> TeamsSpec:
        spec = load_teams(self._path)
        self._check(spec)
        return spec

    def _sign(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._path)
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size
