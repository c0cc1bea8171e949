"""Decides which replicas continue after a loss, in a place that survivors reach without groups."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pipollux_hybrid.job.membership import Membership

__all__ = ["Arbiter", "FolderArbiter"]

ENTERED, GIVEN_UP = "entered", "given up"
HALF_WRITTEN = 5.0
"""Seconds for which a file may exist without its content."""


class Arbiter(Protocol):
    """Communication of surviving replicas while they have no groups.

    There may be several attempts to continue from one membership, as more replicas may die. Methods
    that write raise an OSError if they cannot.
    """

    @property
    def survivors_decide(self) -> bool:
        """Whether the first surviving replica decides; else somebody else does."""

    def report(self, lost: Membership, attempt: int, replica: str, newest: int) -> None:
        """Report that a replica is alive and has lost others, in an attempt counted from 0;
        ``newest`` is the highest membership number that it knows.
        """

    def reports(self, lost: Membership, attempt: int) -> Mapping[str, int]:
        """Return the replicas that have reported, with the highest number of each."""

    def decide(self, lost: Membership, attempt: int, successor: Membership) -> None:
        """Decide on the membership of the surviving replicas, unless it is decided already."""

    def decision(self, lost: Membership, attempt: int) -> Membership | None:
        """Return the decision; None: there is none yet."""

    def conclude(self, successor: Membership, *, enters: bool) -> bool:
        """Record whether this replica has met all others of a membership; return the first record,
        which holds for all, so that none enters a membership that another one has given up.
        """

    def clear(self, current: Membership) -> None:
        """Remove records of losses before the one that led to the current membership."""


class FolderArbiter:
    """An arbiter in a folder that all hosts share.

    Its files::

        lost-N-A-ID        replica ID is alive, and has lost others of membership N; attempt A
        follows-N-A        the membership that follows, written once
        outcome-N          whether membership N was entered, written once
    """

    survivors_decide = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def report(self, lost: Membership, attempt: int, replica: str, newest: int) -> None:
        """Report that a replica is alive, and has lost others."""
        name = f"lost-{lost.number}-{attempt}-{replica}"
        aside = self._folder / f".{name}"
        aside.write_text(str(newest))
        aside.replace(self._folder / name)

    def reports(self, lost: Membership, attempt: int) -> Mapping[str, int]:
        """Return the replicas that have reported, with the highest number of each."""
        found = {}
        for replica in lost.replicas:
            with suppress(OSError, ValueError):
                path = self._folder / f"lost-{lost.number}-{attempt}-{replica}"
                found[replica] = int(path.read_text())
        return found

    def decide(self, lost: Membership, attempt: int, successor: Membership) -> None:
        """Decide on the membership of the surviving replicas, unless it is decided already."""
        self._write_once(f"follows-{lost.number}-{attempt}", json.dumps(successor.to_json_object()))

    def decision(self, lost: Membership, attempt: int) -> Membership | None:
        """Return the decision; None: there is none yet."""
        path = self._folder / f"follows-{lost.number}-{attempt}"
        try:
            return Membership.from_json_object(json.loads(path.read_text()))
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def conclude(self, successor: Membership, *, enters: bool) -> bool:
        """Record the outcome of an attempt on this replica; the first record holds for all."""
        name = f"outcome-{successor.number}"
        self._write_once(name, ENTERED if enters else GIVEN_UP)
        until = time.monotonic() + HALF_WRITTEN
        while not (word := (self._folder / name).read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        return word == ENTERED

    def clear(self, current: Membership) -> None:
        """Remove records of losses before the last one."""
        numbers = {int(x.name.split("-")[1]) for x in self._folder.glob("follows-*")}
        before = [number for number in numbers if number < max(numbers)]
        for pattern in ("lost-{}-*", "follows-{}-*"):
            for path in (x for n in before for x in self._folder.glob(pattern.format(n))):
                path.unlink(missing_ok=True)
        for path in self._folder.glob("outcome-*"):
            if path.name != f"outcome-{current.number}":
                path.unlink(missing_ok=True)

    def _write_once(self, name: str, content: str) -> None:
        aside = self._folder / f".{name}-{secrets.token_hex(4)}"
        aside.write_text(content)
        try:
            os.link(aside, self._folder / name)
        except FileExistsError:
            return
        except OSError:  # no hard links here: the file may be half written for a moment
            with suppress(FileExistsError), (self._folder / name).open("x") as output:
                output.write(content)
        finally:
            aside.unlink(missing_ok=True)
