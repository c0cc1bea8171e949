"""Detects lost replicas, including those on unreachable hosts.

When a process ends, its connections are reset and its peers learn of it at once. A host that loses
its power or its network sends nothing more, and a peer would wait for the group's timeout, which is
long, as a living replica may evaluate or compile for minutes.

So a separate group connects all replicas, over which nothing is sent after the first exchange. The
kernels at both ends probe the idle connections (TCP keepalive). They answer for a process that is
busy, stopped or hangs: only a host that does not answer is lost. A thread then shuts down the
connections with other replicas, so that pending collectives fail.
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

import torch
import torch.distributed as dist

from pipollux_hybrid.errors import BrokenPipelineError, PeerLostError, ReplicaBrokenError

from .connections import Ends, ends_of, open_connections, opposite
from .device_groups import connect_first, in_use, reach
from .env import JobEnvironment
from .groups import abort_device_groups

STANDSTILL = 5.0
"""Seconds without a tick of its thread after which a process counts as having stood still."""
PROBES = 3
"""Unanswered probes after which the kernel closes a connection."""
TICK = 1.0
REMEMBERED = 30.0
"""Seconds after a standstill in which it explains the end of other replicas."""
TELLS_SOON = 1.0
"""Longest time in seconds between the ends of two connections with the same replica."""
_LAST_DATA, _LAST_ACK = 52, 56
"""Offsets of the milliseconds since the last data and the last ACK in Linux's `struct tcp_info`."""

BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_watch: PeerWatch | None = None


class PeerWatch:
    """The thread that watches the connections with the other replicas.

    ``spared`` has the names of connections within this replica, kept when others are lost;
    ``timeout`` is the seconds that replicas wait for each other, for messages.
    """

    def __init__(self, env: JobEnvironment, timeout: float, spared: Set[str] = frozenset()) -> None:
        self.timeout = timeout
        self._env, self._spared = env, spared
        self.word = "replica" if env.processes_per_replica == 1 else "rank"
        self._lost: dict[int, float] = {}
        """Ranks on lost hosts, with the seconds since their last packet."""
        self._ended: set[int] = set()
        self._needs_all = False
        """Whether this process stops waiting for any process once one is gone."""
        self._frozen: dict[int, float] = {}
        """Ranks of frozen processes, with the seconds since their last sign of life."""
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
        """Names of the connections used by collectives of all replicas."""
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
        """Start it if there are peers; all replicas call it at the same point. On systems other
        than Linux a lost host is treated as slow.
        """
        global _watch
        if env.world_size > 1 and env.host_timeout > 0 and sys.platform == "linux":
            _watch = cls(env, timeout, spared)
        return _watch

    def close(self) -> None:
        """End the thread."""
        global _watch
        _watch = None
        self._end.shutdown(socket.SHUT_RDWR)  # a close alone is not enough: forked workers hold it
        self._end.close()
        self._thread.join()
        self._ended_here.close()
        for connection in self._connections.values():
            connection.close()

    def gone(self) -> set[int]:
        """Return the ranks that have ended or are lost."""
        return {*self._ended, *self.lost()}

    def lost(self) -> set[int]:
        """Return the ranks that are frozen, or on hosts that do not answer; they may live on."""
        return {*self._lost, *self._frozen}

    def note_frozen(self, found: Mapping[int, float]) -> None:
        """Stop waiting for frozen processes, given the seconds since their last signs, by rank."""
        new = {rank: age for rank, age in found.items() if rank not in self.gone()}
        if new:
            self._frozen |= new
            processes = self._env.processes_per_replica
            mine = any(rank // processes == self._env.rank for rank in new)
            self._cut(self._shared | self._spared if mine else self._shared)
            self._abort({*new})
            self._news.set()

    def need_all(self, needed: bool) -> None:
        """Set whether pending operations need all processes; if some are gone, abort them now."""
        self._needs_all = needed
        if needed and self.gone():
            self._abort(self.gone())

    def hang_up(self) -> None:
        """Shut down the connections of collectives, so that peers waiting for this replica fail.

        In a ring only the neighbours of an ended replica notice its end. Connections within this
        replica stay, unless collectives of all use them.
        """
        self._cut(self._shared)

    def leave(self) -> None:
        """Shut down connections with other processes that remain when the groups are destroyed: a
        group that is still referenced, for example by a model, keeps them, and others would wait
        for this process.
        """
        self._cut(self._shared | self._spared)

    def _cut(self, names: Set[str]) -> None:
        for name, connection in open_connections().items():
            with connection, suppress(OSError):  # it was closed meanwhile
                if name in names:
                    connection.shutdown(socket.SHUT_RDWR)

    def explain(self) -> str:
        """Return an explanation of a failed wait, one sentence or more."""
        self._news.wait(TELLS_SOON)
        for rank, connection in self._connections.items():
            # Other replicas may have detected it a probe earlier, and ended their processes.
            age = _silence(connection)
            if rank not in self._ended and self._is_silent(age):
                self._lost.setdefault(rank, age)
        if self._lost:
            names = self._names(self._lost)
            verb, its = ("has", "its host") if len(self._lost) == 1 else ("have", "their hosts")
            return (
                f"{names} {verb} sent nothing for {max(self._lost.values()):.0f} s: {its} or the "
                f"network there must be down. {self._advice()}"
            )
        if self._frozen:
            gave = "has given" if len(self._frozen) == 1 else "have given"
            return (
                f"{self._names(self._frozen)} {gave} no sign of life for "
                f"{max(self._frozen.values()):.0f} s: stopped, or on a machine without progress"
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
        again = "Restart the job on the remaining hosts: it"
        if self._env.checkpoint_dir is None:
            return f"{again} starts from scratch, as PIPOLLUX_CHECKPOINT_DIR is not set"
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
        """Enable keepalive, so that the kernel closes a connection with a silent peer."""
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
        """Record the end of a connection: closed by the peer, or by the kernel."""
        age = _silence(self._connections[rank])
        if self._is_silent(age):
            self._lost[rank] = age
            self._shut_down()
        else:
            self._ended.add(rank)
            self._abort({rank}, ended=True)  # gloo notices by itself
        self._news.set()

    def _is_silent(self, age: float) -> bool:
        """Return whether at least one probe was unanswered, given the age of the last answer."""
        return age >= 2 * self._pause

    def _shut_down(self) -> None:
        watched = {os.fstat(x.fileno()).st_ino for x in self._connections.values()}
        for name, connection in open_connections().items():
            with connection, suppress(OSError):  # it was closed meanwhile
                if name in self._spared or os.fstat(connection.fileno()).st_ino in watched:
                    continue  # no collective uses these, and their end means that of the process
                if ends_of(connection)[1][0] in self._addresses:
                    connection.shutdown(socket.SHUT_RDWR)
        self._abort(self.lost())

    def _abort(self, gone: Set[int], *, ended: bool = False) -> None:
        everyone = {*range(self._env.world_size)}
        abort_device_groups(everyone if self._needs_all else gone, ended=ended)


class Standstill:
    """Detects that this process has stood still, by a clock that continues during suspension."""

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(BOOT_TIME)) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds, self._until = 0.0, -math.inf

    def tick(self) -> None:
        """Record that the process runs."""
        now = self._clock()
        if now - self._last > STANDSTILL:
            self._seconds, self._until = now - self._last, now
        self._last = now

    def seconds(self) -> float:
        """Return the duration of a recent standstill; 0: there was none."""
        self.tick()
        return self._seconds if self._last - self._until < REMEMBERED else 0.0


@contextmanager
def needing_all() -> Iterator[None]:
    """Abort waits on a GPU in the body once any process is gone, as in a training step.

    Else a process would wait for a living one until that one has ended. Outside a training step
    only groups with lost processes are aborted, as an abort waits for the kernels of all groups, in
    locks that the aborts of other groups need. An elastic job aborts the others when it recovers:
    until then micro-batches go on between the stages of a surviving replica.
    """
    watch = _watch if in_use() is None else None
    if watch is not None:
        watch.need_all(True)
    try:
        yield
    finally:
        if watch is not None:
            watch.need_all(False)


@contextmanager
def passing_on() -> Iterator[None]:
    """Convert a broken pipeline in the body into a ReplicaBrokenError."""
    try:
        yield
    except BrokenPipelineError as error:
        raise broken_replica("while passing micro-batches between stages", error) from error


def check_peers(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise a RuntimeError if results of a group on a GPU may be from a lost process: an aborted
    receive raises nothing.
    """
    if in_use() is not None:
        reach(device, group)
    elif device.type == "cuda" and _watch is not None and _watch.gone():
        raise RuntimeError("NCCL was aborted, as a process is gone")


def connect_devices() -> None:
    """Connect the devices of all processes of an elastic job, which call this at the same point.
    Raises a PeerLostError if one is gone, or does not come in time.
    """
    watch = _watch
    try:
        connect_first(lambda: watch is not None and bool(watch.gone()))
    except RuntimeError as error:
        limit = os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT", "no")
        when = f"while connecting devices (TORCH_NCCL_NONBLOCKING_TIMEOUT: {limit} s)"
        raise lost_peers(when, error) from error


def lost_peers(when: str, error: BaseException) -> PeerLostError:
    """Return the error of a failed wait ``when``, such as "while averaging gradients"."""
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
    """Return the error of a process whose wait for another one of its replica failed."""
    return ReplicaBrokenError(
        f"{lost_peers(when, error)} A replica ends with any of its processes."
    )


def _silence(connection: socket.socket) -> float:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    ages = (struct.unpack_from("I", info, offset)[0] for offset in (_LAST_DATA, _LAST_ACK))
    return float(min(ages)) / 1000


def _ends(connection: socket.socket) -> list[Ends]:
    try:
        return [ends_of(connection)]
    except OSError:  # closed by the peer meanwhile
        return []
