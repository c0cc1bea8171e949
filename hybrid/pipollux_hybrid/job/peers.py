"""Finds out which replicas are gone, also those whose host can no longer tell.

A process that ends resets its connections, and its peers learn of it at once. A host that loses its
power or its network sends nothing more. Whoever waits for it waits for the group's timeout, which
has to be long, as a living replica may evaluate or compile for minutes.

So a group of its own connects all replicas, over which nothing is sent once they have met. While a
connection is idle the kernels at its ends probe it (TCP keepalive). They answer for a process that
is busy, stopped or hangs: only a host that does not answer is lost. A thread then shuts down what
connects this process with other replicas, and whatever waits for one of them ends with an error.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from pipollux_hybrid.errors import BrokenPipelineError, PeerLostError, ReplicaBrokenError

from .connections import Ends, ends_of, open_connections, opposite
from .env import JobEnvironment
from .groups import abort_nccl

__all__ = [
    "PeerWatch",
    "Standstill",
    "broken_replica",
    "check_peers",
    "lost_peers",
    "needing_all",
    "passing_on",
]

STANDSTILL = 5.0
"""Seconds without a tick of its thread after which a process has stood still."""
PROBES = 3
"""Probes without an answer after which the kernel gives a connection up."""
TICK = 1.0
"""Seconds between two ticks."""
REMEMBERED = 30.0
"""Seconds after a standstill in which the end of others is put down to it."""
TELLS_SOON = 1.0
"""Seconds between the end of one connection with a replica and that of another, at most."""
_LAST_DATA, _LAST_ACK = 52, 56
"""Where Linux's `struct tcp_info` has the milliseconds since data and an acknowledgement came."""

BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_watch: PeerWatch | None = None


class PeerWatch:
    """The thread that watches the connections with the other replicas.

    Args:
        env: who this replica is, and after how many seconds a host that does not answer is lost.
        timeout: seconds that replicas wait for each other, for messages.
        spared: names of connections that are kept when others are lost: those within this replica.
    """

    def __init__(self, env: JobEnvironment, timeout: float, spared: Set[str] = frozenset()) -> None:
        self.timeout = timeout
        self._env, self._spared = env, spared
        self.word = "replica" if env.processes_per_replica == 1 else "rank"
        """What a process is in messages."""
        self._lost: dict[int, float] = {}
        """Replicas whose hosts are lost, and the seconds since they were last heard of."""
        self._ended: set[int] = set()
        self._needs_all = False
        """Whether this process waits for none any more once one is gone."""
        self._frozen: dict[int, float] = {}
        """Replicas whose processes are frozen, and the seconds since their last sign of life."""
        self._pause = max(1, round(env.host_timeout / (PROBES + 1)))
        """Whole seconds between two probes."""
        before = open_connections()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        after = open_connections()
        opened = [after[name] for name in after.keys() - before.keys()]
        everyone: list[tuple[str, list[Ends], list[Ends]]] = [("", [], [])] * env.world_size
        mine = {ends: connection for connection in opened for ends in _ends(connection)}
        names = {ends: name for name, connection in before.items() for ends in _ends(connection)}
        dist.all_gather_object(everyone, (socket.gethostname(), [*mine], [*names]), group=group)
        self._hosts = [name for name, _, _ in everyone]
        theirs = {opposite(ends) for _, _, others in everyone for ends in others}
        self._shared = {name for ends, name in names.items() if ends in theirs} - spared
        """Names of the connections that collectives of all replicas have."""
        self._connections = {
            rank: mine[opposite(ends)]
            for rank, (_, found, _) in enumerate(everyone)
            for ends in found
            if opposite(ends) in mine
        }
        peers = self._connections.values()
        self._addresses = {there[0] for x in peers for _, there in _ends(x)}
        for connection in {*before.values(), *after.values()} - {*self._connections.values()}:
            connection.close()  # not of this group
        for connection in self._connections.values():
            self._probe(connection)
        self._standstill = Standstill()
        self._news = threading.Event()
        self._end, self._ended_here = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="pipollux-peers", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls, env: JobEnvironment, timeout: float, spared: Set[str] = frozenset()
    ) -> PeerWatch | None:
        """Start it where there are peers to watch; all replicas call it at the same place.

        Elsewhere than on Linux a lost host is like a slow one.
        """
        global _watch
        if env.world_size > 1 and env.host_timeout > 0 and sys.platform == "linux":
            _watch = cls(env, timeout, spared)
        return _watch

    def close(self) -> None:
        """End the thread."""
        global _watch
        _watch = None
        self._end.shutdown(socket.SHUT_RDWR)  # forked workers of loaders hold it, too
        self._end.close()
        self._thread.join()
        self._ended_here.close()
        for connection in self._connections.values():
            connection.close()

    def gone(self) -> set[int]:
        """Return the ranks of the replicas that have ended, or are lost."""
        return {*self._ended, *self.lost()}

    def lost(self) -> set[int]:
        """Return the ranks of the replicas that are frozen, or on hosts that do not answer.

        They may live on.
        """
        return {*self._lost, *self._frozen}

    def note_frozen(self, found: Mapping[int, float]) -> None:
        """Note replicas whose processes are frozen, and have nobody wait for them any more.

        Args:
            found: The seconds since their last signs of life, by rank.
        """
        new = {rank: age for rank, age in found.items() if rank not in self.gone()}
        if new:
            self._frozen |= new
            processes = self._env.processes_per_replica
            mine = any(rank // processes == self._env.rank for rank in new)
            self._cut(self._shared | self._spared if mine else self._shared)
            self._news.set()

    def need_all(self, needed: bool) -> None:
        """Note whether all processes are needed from now on, so that none waits without one.

        Where some are gone already it waits no more.

        Args:
            needed: Whether they are.
        """
        self._needs_all = needed
        if needed and self.gone():
            self._abort(self.gone())

    def hang_up(self) -> None:
        """End the connections that collectives have, so that whoever waits for this replica knows.

        A replica that has ended is known at once to those alone who talk with it in a ring. Those
        with other processes of this replica stay, if collectives of all do not use them.
        """
        self._cut(self._shared)

    def leave(self) -> None:
        """End all connections with other processes that are left when the groups are destroyed.

        A group whose object something still holds, such as a model, keeps its connections, and
        other processes would wait for this one until it ends.
        """
        self._cut(self._shared | self._spared)

    def _cut(self, names: Set[str]) -> None:
        for name, connection in open_connections().items():
            with connection, suppress(OSError):  # it was closed meanwhile
                if name in names:
                    connection.shutdown(socket.SHUT_RDWR)

    def explain(self) -> str:
        """Return what is known of the replicas that somebody waits for in vain."""
        self._news.wait(TELLS_SOON)
        for rank, connection in self._connections.items():
            # The others' threads may have seen it a probe earlier, and ended their processes.
            age = _silence(connection)
            if rank not in self._ended and self._is_silent(age):
                self._lost.setdefault(rank, age)
        if self._lost:
            names = self._names(self._lost)
            verb, its = ("has", "its host") if len(self._lost) == 1 else ("have", "their hosts")
            return (
                f"{names} {verb} not been heard of for {max(self._lost.values()):.0f} s: {its}, or "
                f"the network there, must be down. {self._advice()}"
            )
        if self._frozen:
            gave = "has given" if len(self._frozen) == 1 else "have given"
            return (
                f"{self._names(self._frozen)} {gave} no sign of life for "
                f"{max(self._frozen.values()):.0f} s: stopped, or on a machine that gets nowhere"
            )
        if self._ended and (seconds := self._standstill.seconds()):
            return (
                f"this process stood still for {seconds:.0f} s (it was stopped, its machine was "
                "suspended, or a library held Python's lock), so the others have given it up or "
                "ended meanwhile: their logs say which"
            )
        if self._ended:
            verb = (
                "has ended: its log says" if len(self._ended) == 1 else "have ended: their logs say"
            )
            return f"{self._names(self._ended)} {verb} why"
        return (
            "all hosts answer and no replica has ended, so one hangs, or does something alone for "
            f"longer than the {self.timeout:.0f} s of PIPOLLUX_TIMEOUT; its log says why"
        )

    def _advice(self) -> str:
        again = "Start the job again on the hosts that are left: it"
        if self._env.checkpoint_dir is None:
            return f"{again} begins anew, as PIPOLLUX_CHECKPOINT_DIR is not set"
        return f"{again} resumes from the newest checkpoint in {self._env.checkpoint_dir}"

    def _names(self, ranks: Iterable[int]) -> str:
        hosts: dict[str, list[str]] = {}
        for rank in sorted(ranks):
            hosts.setdefault(self._hosts[rank], []).append(str(rank))
        return " and ".join(
            f"{self.word}{'s' if len(found) > 1 else ''} {', '.join(found)} on {host}"
            for host, found in hosts.items()
        )

    def _probe(self, connection: socket.socket) -> None:
        """Have the kernel probe a connection, and give it up when its peer has been silent."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._pause)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._pause)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._ended_here, select.POLLIN)
        ranks = {connection.fileno(): rank for rank, connection in self._connections.items()}
        for number in ranks:
            poll.register(number, select.POLLRDHUP)
        while True:
            self._standstill.tick()
            for number, _ in poll.poll(1000 * TICK):
                if number not in ranks:
                    return  # the job ends here
                poll.unregister(number)
                self._note(ranks[number])

    def _note(self, rank: int) -> None:
        """Note that a connection is at its end: it was closed, or given up."""
        age = _silence(self._connections[rank])
        if self._is_silent(age):
            self._lost[rank] = age
            self._shut_down()
        else:
            self._ended.add(rank)
            self._abort({rank})  # who waits for it over gloo learns it from its connection
        self._news.set()

    def _is_silent(self, age: float) -> bool:
        """Whether a probe at least has had no answer, given when the last one came."""
        return age >= 2 * self._pause

    def _shut_down(self) -> None:
        """End this process's connections with other replicas, whatever waits for them."""
        watched = {os.fstat(x.fileno()).st_ino for x in self._connections.values()}
        for name, connection in open_connections().items():
            with connection, suppress(OSError):  # it was closed meanwhile
                if name in self._spared or os.fstat(connection.fileno()).st_ino in watched:
                    continue  # nobody waits for these, and their end means the process's
                if ends_of(connection)[1][0] in self._addresses:
                    connection.shutdown(socket.SHUT_RDWR)
        self._abort(self.lost())

    def _abort(self, gone: Set[int]) -> None:
        abort_nccl({*range(self._env.world_size)} if self._needs_all else gone)


class Standstill:
    """Whether this process has just stood still, found by a thread that ticks.

    Args:
        clock: One that goes on while the machine is suspended.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(BOOT_TIME)) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds, self._until = 0.0, -math.inf

    def tick(self) -> None:
        """Note that the process runs."""
        now = self._clock()
        if now - self._last > STANDSTILL:
            self._seconds, self._until = now - self._last, now
        self._last = now

    def seconds(self) -> float:
        """Return for how long it stood still just before now; 0: it did not."""
        self.tick()
        return self._seconds if self._last - self._until < REMEMBERED else 0.0


@contextmanager
def needing_all() -> Iterator[None]:
    """Wait for no process on a GPU within once any of all is gone, as in a training step.

    Else one would wait for another that lives, until that has given up and ended. But to end a
    communicator is to wait for the kernels of all, in locks that it takes to end the others.
    """
    watch = _watch
    if watch is not None:
        watch.need_all(True)
    try:
        yield
    finally:
        if watch is not None:
            watch.need_all(False)


@contextmanager
def passing_on() -> Iterator[None]:
    """Say who is gone where micro-batches do not reach the next stage.

    Raises:
        ReplicaBrokenError: A stage of this replica is gone.
    """
    try:
        yield
    except BrokenPipelineError as error:
        raise broken_replica("while passing micro-batches between stages", error) from error


def check_peers() -> None:
    """Refuse what was received on a GPU if a process is gone: nothing else would tell.

    Raises:
        RuntimeError: One is.
    """
    if _watch is not None and _watch.gone():
        raise RuntimeError("NCCL was told to wait no longer")


def lost_peers(when: str, error: BaseException) -> PeerLostError:
    """Return the error of a replica that waited in vain for others.

    Args:
        when: at what, as in "while averaging gradients".
        error: what the library says that carries messages; it becomes the cause.
    """
    known = dist.is_initialized()
    word = "replica" if _watch is None else _watch.word
    here = f"{word} {dist.get_rank()} of {dist.get_world_size()}" if known else f"this {word}"
    why = "another replica has ended or hangs; its log says why"
    if _watch is not None:
        why = _watch.explain()
    found = PeerLostError(f"{here} lost its peers {when}: {why}.")
    found.__cause__ = error
    return found


def broken_replica(when: str, error: BaseException) -> ReplicaBrokenError:
    """Return the error of a process that waited in vain for another one of its replica.

    Args:
        when: at what, as in "while passing micro-batches between stages".
        error: what the library says that carries messages.
    """
    return ReplicaBrokenError(
        f"{lost_peers(when, error)} A replica ends with any of its processes."
    )


def _silence(connection: socket.socket) -> float:
    """Return the seconds since the other end was last heard of."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    ages = (struct.unpack_from("I", info, offset)[0] for offset in (_LAST_DATA, _LAST_ACK))
    return float(min(ages)) / 1000


def _ends(connection: socket.socket) -> list[Ends]:
    """Return a connection's ends, of one that lives."""
    try:
        return [ends_of(connection)]
    except OSError:  # its other end has closed it meanwhile
        return []
