"""Forms the groups of a membership in the background, while training uses the current ones.

A replica that dies or is slow before all have met costs the others nothing.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from pipollux_hybrid.job.device_groups import connect
from pipollux_hybrid.job.groups import ReplicaGroup, form_group
from pipollux_hybrid.job.membership import Membership
from pipollux_hybrid.job.mesh import MeshGroups, ProcessMesh

from .rendezvous import Rendezvous
from .skeleton import Spare

_LOG = logging.getLogger(__name__)
PATIENCE = 60.0
"""Seconds for all to meet: a scheduler with thousands of resizes answers each every 15 s."""
LOOK_INTERVAL = 0.05
COMMON = "common"
"""Key of the settings that all replicas must have in common."""


class PendingMembership:
    """A membership whose groups are being formed, as one replica sees it.

    Args:
        membership: The pending membership.
        replica: The id of this replica; if it is not a member, it leaves.
        rendezvous: The rendezvous of the job.
        timeout: Timeout of later collectives in seconds.
        mesh: The current groups of a multi-process pipeline.
        outline: Returns replica 0's outline of the states, if any, for joining replicas.
        common: Returns the settings that all replicas must have in common, for error messages.
        prepare: Allocates memory for an outline, on a joining replica.
        prepares: Slow preparations, called with the number of replicas; return functions to call
            when the membership is entered.
    """

    def __init__(
        self,
        membership: Membership,
        replica: str,
        rendezvous: Rendezvous,
        timeout: float,
        mesh: ProcessMesh | None = None,
        outline: Callable[[], bytes] | None = None,
        common: Callable[[], Mapping[str, str | None]] | None = None,
        prepare: Callable[[bytes], Spare] | None = None,
        prepares: Sequence[Callable[[int], Callable[[], None]]] = (),
    ) -> None:
        self.membership = membership
        self.rank = membership.rank(replica)
        """This replica's rank in it; None: it leaves."""
        stage, processes = (mesh.stage, mesh.num_stages) if mesh is not None else (0, 1)
        self.process = None if self.rank is None else self.rank * processes + stage
        self.num_processes = len(membership.replicas) * processes
        self.store: Store | None = None
        self.control: ReplicaGroup | None = None
        """Group of all processes for control messages; None for one process."""
        self.gradients: ReplicaGroup | None = None
        """Group of all processes for gradients, torch's next default group; None for one."""
        self.mesh_groups: MeshGroups | None = None
        self.failure: Exception | None = None
        self.formed = self.rank is None
        """Whether this replica has met all others."""
        self.spare: Spare = {}
        self.began_at = time.monotonic()
        self.ready: list[Callable[[], None]] = []
        self._mesh = mesh
        self._outline, self._prepare, self._prepares = outline, prepare, prepares
        self._common = common
        self._rendezvous = rendezvous
        self._timeout = timeout
        if self.rank is not None:
            name = f"pipollux-forming-{membership.number}"
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def name(self) -> str:
        """Name of its groups."""
        return f"membership-{self.membership.number}"

    @property
    def peers(self) -> ReplicaGroup | None:
        """Group of the processes with the same states, in the order of replicas; None for one."""
        return self.control if self.mesh_groups is None else self.mesh_groups.column

    @property
    def failed(self) -> str:
        """Why it cannot be entered, in a sentence; empty: it may be."""
        if self.failure is not None:
            return f"{type(self.failure).__name__}: {self.failure}"
        if not self.formed and time.monotonic() - self.began_at > PATIENCE:
            return f"its replicas did not meet within {PATIENCE:g} s"
        return ""

    def common(self) -> dict[str, str | None]:
        """Return replica 0's settings that all must have in common; empty: unknown."""
        if self.store is None or not self.store.check([COMMON]):
            return {}
        found: dict[str, str | None] = json.loads(self.store.get(COMMON))
        return found

    def connect(self, seconds: float, gone: Callable[[], bool] = lambda: False) -> None:
        """Make the connections on the device, where the gradients are sent from it; all processes
        of this membership call it while none trains. Raises a RuntimeError if that takes longer, or
        once a process is ``gone``; then the membership cannot be entered.
        """
        connect((group.known for group in self._groups if group is not self.control), seconds, gone)

    @property
    def _groups(self) -> list[ReplicaGroup]:
        of_mesh = () if self.mesh_groups is None else self.mesh_groups.all
        return [x for x in (self.control, self.gradients, *of_mesh) if x is not None]

    def drop(self) -> None:
        """Release the groups of a membership that is not entered."""
        for group in self._groups:
            group.abort()
        self.control = self.gradients = self.mesh_groups = self.store = None
        self.spare, self.ready = {}, []

    def _run(self) -> None:
        try:
            self._form()
        except Exception as error:  # in a thread that nobody joins
            self.failure = error
            _LOG.warning(
                "the groups of %s replicas were not formed, training continues without them: "
                "%s: %s",
                *(len(self.membership.replicas), type(error).__name__, error),
            )
        else:
            self.formed = True

    def _form(self) -> None:
        size, replicas = self.num_processes, len(self.membership.replicas)
        assert self.rank is not None and self.process is not None  # noqa: S101, PT018  # there is a thread
        deadline = time.monotonic() + PATIENCE
        store = self.store = self._meet(self.membership.number, deadline)
        if size == 1:
            return
        if replicas > 1:
            self._make_room(store)
        self._wait_for_all(store, "here", deadline)

        def form(
            name: str, rank: int, size: int, patience: float = PATIENCE, *, with_device: bool = True
        ) -> ReplicaGroup:
            return form_group(
                *(store, f"{self.name}-{name}", rank, size),
                patience=patience,
                timeout=self._timeout,
                with_device=with_device,
            )

        def form_within(name: str, rank: int, size: int) -> ReplicaGroup:
            # For point-to-point messages gloo keeps the timeout of the group's creation.
            return form(name, rank, size, self._timeout)

        self.control = form("control", self.process, size, with_device=False)
        self.gradients = form("gradients", self.process, size)
        if self._mesh is not None:
            self.mesh_groups = self._mesh.form(form, form_within, self.rank, replicas)
            # A process may have formed all of its groups, and another one not.
            self._wait_for_all(store, "formed", time.monotonic() + PATIENCE)

    def _wait_for_all(self, store: Store, key: str, deadline: float) -> None:
        store.set(f"{key}-{self.process}", "1")
        left = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
        store.wait([f"{key}-{rank}" for rank in range(self.num_processes)], left)

    def _make_room(self, store: Store) -> None:
        name = f"outline-{0 if self._mesh is None else self._mesh.stage}"
        if self.process == 0 and self._common is not None:
            store.set(COMMON, json.dumps(self._common()))
        if self.rank == 0:
            outline = self._outline() if self._outline is not None else b""
            store.set(name, outline)  # type: ignore[arg-type]  # torch also accepts bytes
        elif self._prepare is not None and (outline := store.get(name)):
            self.spare = self._prepare(outline)
        self.ready = [prepare(len(self.membership.replicas)) for prepare in self._prepares]

    def _meet(self, number: int, deadline: float) -> Store:
        patience = timedelta(seconds=PATIENCE)
        if self.process == 0:
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
