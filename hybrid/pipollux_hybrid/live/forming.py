"""Forming the groups of a membership in the background, while the replicas train in the old ones.

Make before break: nobody stops before all replicas of the new membership have met, so one that dies
or is slow on its way costs the others nothing.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from pipollux_hybrid.job.groups import ReplicaGroup, form_group
from pipollux_hybrid.job.membership import Membership

from .meeting_place import MeetingPlace
from .skeleton import Spare

__all__ = ["Forming"]

_LOG = logging.getLogger(__name__)
PATIENCE = 20.0
"""Seconds for all replicas of a membership to meet."""
LOOK_INTERVAL = 0.05


class Forming:
    """A membership whose groups are being formed, as one replica sees it.

    Args:
        membership: Who is to take part.
        replica: The id of this replica; one that does not take part leaves.
        rendezvous: Where the replicas find each other.
        timeout: Seconds that later collectives wait.
        outline: Returns what replica 0 tells those that join of the states to come, so that they
            can make room; None: nothing.
        prepare: What one that joins does with it.
        prepares: Called with the number of replicas, they get what takes time, and return what is
            to be called when the membership has come about.
    """

    def __init__(
        self,
        membership: Membership,
        replica: str,
        rendezvous: MeetingPlace,
        timeout: float,
        outline: Callable[[], bytes] | None = None,
        prepare: Callable[[bytes], Spare] | None = None,
        prepares: Sequence[Callable[[int], Callable[[], None]]] = (),
    ) -> None:
        self.membership = membership
        self.rank = membership.rank(replica)
        """This replica's rank in it; None: it leaves."""
        self.store: Store | None = None
        self.control: ReplicaGroup | None = None
        """For control messages; None for one replica."""
        self.gradients: ReplicaGroup | None = None
        """For gradients; None for one replica."""
        self.failure: Exception | None = None
        self.formed = self.rank is None
        """Whether this replica has met all others."""
        self.spare: Spare = {}
        """Memory that one that joins has made ready."""
        self.began_at = time.monotonic()
        self.ready: list[Callable[[], None]] = []
        """To be called when it has come about."""
        self._outline, self._prepare, self._prepares = outline, prepare, prepares
        self._rendezvous = rendezvous
        self._timeout = timeout
        if self.rank is not None:
            name = f"pipollux-forming-{membership.number}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def name(self) -> str:
        """What its groups are called."""
        return f"membership-{self.membership.number}"

    @property
    def failed(self) -> str:
        """Why it does not come about, in a sentence; empty: it may."""
        if self.failure is not None:
            return f"{type(self.failure).__name__}: {self.failure}"
        if not self.formed and time.monotonic() - self.began_at > PATIENCE:
            return f"its replicas did not meet within {PATIENCE:g} s"
        return ""

    def drop(self) -> None:
        """Let go of the groups: it does not come about."""
        for group in (self.control, self.gradients):
            if group is not None:
                group.process_group.abort()
        self.control = self.gradients = self.store = None
        self.spare, self.ready = {}, []

    def _run(self) -> None:
        try:
            self._form()
        except Exception as error:  # nobody waits for it
            self.failure = error
            _LOG.warning(
                "the groups of %s replicas were not formed, and training goes on without: %s: %s",
                *(len(self.membership.replicas), type(error).__name__, error),
            )
        else:
            self.formed = True

    def _form(self) -> None:
        number, size = self.membership.number, len(self.membership.replicas)
        assert self.rank is not None  # noqa: S101  # else there is no thread
        deadline = time.monotonic() + PATIENCE
        self.store = self._meet(number, deadline)
        if size == 1:
            return
        self._make_room(self.store)
        self.store.set(f"here-{self.rank}", "1")
        left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
        self.store.wait([f"here-{rank}" for rank in range(size)], left)
        options = {"patience": PATIENCE, "timeout": self._timeout}
        self.control = form_group(self.store, f"{self.name}-control", self.rank, size, **options)
        self.gradients = form_group(
            self.store, f"{self.name}-gradients", self.rank, size, **options
        )

    def _make_room(self, store: Store) -> None:
        """Have memory made ready before anybody waits for it."""
        if self.rank == 0:
            told = self._outline() if self._outline is not None else b""
            store.set("outline", told)  # type: ignore[arg-type]  # torch takes bytes, too
        elif self._prepare is not None and (told := store.get("outline")):
            self.spare = self._prepare(told)
        self.ready = [prepare(len(self.membership.replicas)) for prepare in self._prepares]

    def _meet(self, number: int, deadline: float) -> Store:
        patience = timedelta(seconds=PATIENCE)
        if self.rank == 0:
            host, alone = self._rendezvous.host()
            # torch's own store listens on every interface of the machine.
            listener = _listen(host) if alone else None
            store = TCPStore(
                host,
                listener.getsockname()[1] if listener else 0,
                None,
                True,
                patience,
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener else None,
            )
            self._rendezvous.announce_store(number, host, store.port)
            return store
        while (found := self._rendezvous.find_store(number)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"replica {self.membership.replicas[0]} did not answer")
            time.sleep(LOOK_INTERVAL)
        return TCPStore(*found, None, False, patience, wait_for_workers=False)


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)
