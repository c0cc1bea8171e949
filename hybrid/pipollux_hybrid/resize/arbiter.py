"""Who goes on when replicas were lost: the place where those that are left find out."""

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
"""Seconds that a file may be there without its content."""


class Arbiter(Protocol):
    """What those that are left tell each other while they have no groups.

    There may be several attempts to go on from one membership, as more replicas may die meanwhile.
    """

    @property
    def survivors_decide(self) -> bool:
        """Whether the first of those that are left decides; else somebody else does."""

    def report(self, lost: Membership, attempt: int, replica: str, newest: int) -> None:
        """Say that a replica lives, and has lost others.

        Args:
            lost: The membership that some of them were lost of.
            attempt: Counted from 0.
            replica: The one that lives.
            newest: The highest number of a membership that it has heard of.

        Raises:
            OSError: It cannot be told.
        """

    def reports(self, lost: Membership, attempt: int) -> Mapping[str, int]:
        """Return the replicas that have said so, with the highest number of each."""

    def decide(self, lost: Membership, attempt: int, successor: Membership) -> None:
        """Decide on a membership of those that are left, unless somebody has already.

        Raises:
            OSError: It cannot be told.
        """

    def decision(self, lost: Membership, attempt: int) -> Membership | None:
        """Return what was decided; None: nothing yet."""

    def conclude(self, successor: Membership, *, enters: bool) -> bool:
        """Say how an attempt has ended for this replica; the first one's word holds for all.

        So no replica goes on with a membership that another one has given up.

        Args:
            successor: What was decided.
            enters: Whether this replica has met all others of it.

        Returns:
            Whether it is entered.

        Raises:
            OSError: It cannot be told.
        """

    def clear(self, current: Membership) -> None:
        """Forget what was before the last time that replicas were lost.

        Args:
            current: The membership that was entered.
        """


class FolderArbiter:
    """An arbiter that is a folder, which all hosts share.

        lost-N-A-ID        replica ID lives, and has lost others of membership N; attempt A
        follows-N-A        the membership that follows, written once
        outcome-N          whether membership N was entered, written once

    Args:
        folder: The folder.
    """

    survivors_decide = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def report(self, lost: Membership, attempt: int, replica: str, newest: int) -> None:
        """Say that a replica lives, and has lost others."""
        name = f"lost-{lost.number}-{attempt}-{replica}"
        aside = self._folder / f".{name}"
        aside.write_text(str(newest))
        aside.replace(self._folder / name)

    def reports(self, lost: Membership, attempt: int) -> Mapping[str, int]:
        """Return the replicas that have said so, with the highest number of each."""
        found = {}
        for replica in lost.replicas:
            with suppress(OSError, ValueError):
                path = self._folder / f"lost-{lost.number}-{attempt}-{replica}"
                found[replica] = int(path.read_text())
        return found

    def decide(self, lost: Membership, attempt: int, successor: Membership) -> None:
        """Decide on a membership of those that are left, unless somebody has already."""
        self._write_once(f"follows-{lost.number}-{attempt}", json.dumps(successor.to_json_object()))

    def decision(self, lost: Membership, attempt: int) -> Membership | None:
        """Return what was decided; None: nothing yet."""
        path = self._folder / f"follows-{lost.number}-{attempt}"
        try:
            return Membership.from_json_object(json.loads(path.read_text()))
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def conclude(self, successor: Membership, *, enters: bool) -> bool:
        """Say how an attempt has ended for this replica; the first one's word holds for all."""
        name = f"outcome-{successor.number}"
        self._write_once(name, ENTERED if enters else GIVEN_UP)
        until = time.monotonic() + HALF_WRITTEN
        while not (word := (self._folder / name).read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        return word == ENTERED

    def clear(self, current: Membership) -> None:
        """Forget what was before the last time that replicas were lost."""
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
        except OSError:  # storage that knows no links: it may be half written for a moment
            with suppress(FileExistsError), (self._folder / name).open("x") as output:
                output.write(content)
        finally:
            aside.unlink(missing_ok=True)
