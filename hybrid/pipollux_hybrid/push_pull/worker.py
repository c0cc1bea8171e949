"""A replica's client of the servers: ps-lite's ``KVWorker``.

Requests run in a thread with an event loop, while the caller trains::

    handle = worker.push(changes, header)      returns at once
    …
    handle.wait()                              or a callback, given to push and pull
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from torch import Tensor

from pipollux_hybrid.errors import PeerLostError

from .transport import Connection, Message, ServerError, end, flattened, unflattened

T = TypeVar("T")
BEAT = 1.0
"""Seconds between two heartbeats."""
NOTICE = 30.0
"""Seconds without an answer after which the user is told."""
CLOSING = 5.0
"""Seconds that the thread may take to end."""


class Handle(Generic[T]):
    """The result of a request that is under way: ps-lite's timestamp."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        self._future = future

    def wait(self, timeout: float | None = None) -> T:
        """Return the result once it is there.

        Raises:
            TimeoutError: It is not within ``timeout`` seconds.
            ServerError: A server has refused the request.
            PeerLostError: A server cannot be reached.
        """
        return self._future.result(timeout)

    def done(self) -> bool:
        """Return whether the result is there."""
        return self._future.done()


class Pulled:
    """Parameters of layers, by key."""

    def __init__(self, replies: Iterable[Message]) -> None:
        self.values: dict[int, list[Tensor]] = {}
        self.revisions: dict[int, int] = {}
        self.rounds: dict[int, int] = {}
        """Rounds of the layers that have ended."""
        self.waited = 0.0
        """Seconds for which servers waited for other replicas."""
        self.arrived = time.monotonic()
        for reply in replies:
            self.values |= unflattened(reply.header["counts"], reply.tensors)
            self.revisions |= {int(key): x for key, x in reply.header["revisions"].items()}
            self.rounds |= {int(key): x for key, x in reply.header["rounds"].items()}
            self.waited = max(self.waited, reply.header["waited"])


def server_of(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Return the server of each key: contiguous ranges of similar size.

    Example:
        >>> server_of([4, 1, 1, 2], 2)
        [0, 1, 1, 1]
    """
    total, before, owners = max(sum(sizes), 1), 0, []
    for size in sizes:
        middle = before + size / 2.0
        owners.append(min(int(middle * num_servers / total), num_servers - 1))
        before += size
    return owners


def is_here(address: str) -> bool:
    """Return whether the host of an address is this one."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


class KVWorker:
    """Pushes and pulls layers of a model; keys are their indices.

    Args:
        addresses: Host and port of each server.
        token: The job's token.
        sizes: Bytes of each layer.
        timeout: Seconds to wait for a server that does not answer.
        copies: Whether to pull from copies on this host.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        sizes: Sequence[int],
        timeout: float,
        *,
        copies: bool,
    ) -> None:
        self._copies, self._here = copies, [is_here(address) for address in addresses]
        self._owners = server_of(sizes, len(addresses))
        self._timeout = timeout
        self._loop = asyncio.new_event_loop()
        self._waited_for: list[int] | None = None
        """The replicas that the user was told of last."""
        self._beats: concurrent.futures.Future[None] | None = None
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._addresses, self._token = list(addresses), token
        self._servers: list[Connection] = []
        self._thread = threading.Thread(target=self._run, name="pipollux push-pull", daemon=True)
        self._thread.start()
        self._ready.result(timeout)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._connect)
        self._loop.run_forever()
        self._loop.close()

    def _connect(self) -> None:
        import zmq.asyncio

        self._context = zmq.asyncio.Context()
        for index, address in enumerate(self._addresses):
            self._servers.append(Connection(self._context, f"server {index}", address, self._token))
            self._servers[-1].start()
        # Else they would wait behind a push, or their answers behind what is pulled.
        first = self._addresses[0]
        self._heartbeats = Connection(self._context, "server 0", first, self._token)
        self._heartbeats.start()
        self._ready.set_result(None)

    def push(
        self,
        changes: Mapping[int, Sequence[Tensor]],
        header: Mapping[str, Any],
        callback: Callable[[], None] | None = None,
    ) -> Handle[None]:
        """Send changes of layers, each to its server; ``callback`` is called in the thread once all
        have confirmed. Tensors must not change until then. Servers confirm at once if the header
        has ``at_once``, and else when they step.
        """
        pushes = []
        # One message for all layers of a server, which are then in the same round.
        for server, keys in self._by_server(changes).items():
            counts, tensors = flattened({key: changes[key] for key in keys})
            message = Message({**header, "op": "push", "counts": counts}, tensors)
            pushes.append(self._push(server, message))

        async def all_confirmed() -> None:
            await asyncio.gather(*pushes)

        return self._start(all_confirmed(), callback)

    async def _push(self, server: int, push: Message) -> None:
        """Push until another server has it, too: a server that is started again may not know it."""
        header = push.header
        push = await self._laid_down(server, push)
        layers = dict.fromkeys(header["counts"], header["number"])
        settle = Message({"op": "settle", "member": header["member"], "layers": layers})
        while True:
            reply = await self._call(server, push)
            if not reply.header.get("kept_back"):
                return
            if (await self._call(server, settle)).header["known"]:
                return

    def pull(
        self,
        layers: Mapping[int, int],
        header: Mapping[str, Any],
        callback: Callable[[], None] | None = None,
    ) -> Handle[Pulled]:
        """Request layers, each from its server; of each, the number of the caller's push that has
        to be included.
        """
        asked = {
            server: {**header, "op": "pull", "layers": {str(key): layers[key] for key in keys}}
            for server, keys in self._by_server(layers).items()
        }

        async def pulled() -> Pulled:
            return Pulled(await asyncio.gather(*(self._pull(*each) for each in asked.items())))

        return self._start(pulled(), callback)

    async def _laid_down(self, server: int, push: Message) -> Message:
        """Lay a push down beside its copy, if that is here; return it as it is sent on."""
        header = push.header
        at_once = bool(header["at_once"])
        if self._copies and header["is_of_two"]:
            at_once = at_once or self._here[server] or self._is_beside_copy(server)
        laid_down = self._copies and at_once and self._is_beside_copy(server)
        if laid_down:
            following = (server + 1) % len(self._servers)
            await self._call(following, Message({**header, "op": "lay_down"}, push.tensors))
        return Message({**header, "at_once": at_once, "laid_down": laid_down}, push.tensors)

    async def _pull(self, server: int, header: Mapping[str, Any]) -> Message:
        """Pull from a copy on this host, if there is one, else from the server itself."""
        if self._copies and self._is_beside_copy(server):
            following = (server + 1) % len(self._servers)
            reply = await self._call(following, Message({**header, "copy": True}))
            if "none" not in reply.header:
                return reply
        return await self._call(server, Message({**header, "copy": False}))

    def _is_beside_copy(self, server: int) -> bool:
        return self._here[(server + 1) % len(self._servers)] and not self._here[server]

    def init(
        self,
        layers: Mapping[int, Sequence[Tensor]],
        names: Mapping[int, Sequence[str]],
        *,
        again: bool = False,
    ) -> None:
        """Create layers on their servers, unless they exist; ``again``: they have to."""
        requests = []
        for server, keys in self._by_server(layers).items():
            counts, tensors = flattened({key: layers[key] for key in keys})
            named = {str(key): list(names[key]) for key in keys}
            header = {"op": "init", "counts": counts, "names": named, "again": again}
            requests.append((server, Message(header, tensors)))
        self._start(self._all(requests)).wait()

    def configure(self, options: Mapping[str, Any], *, again: bool) -> None:
        """Begin a job with these options on all servers, or have them compared; ``again``: it has
        begun.
        """
        count = len(self._servers)
        header = {"op": "configure", "options": dict(options), "again": again}
        requests = [(i, Message({**header, "place_in_list": [i, count]})) for i in range(count)]
        self._start(self._all(requests)).wait()

    def ask(self, header: Mapping[str, Any]) -> Handle[Message]:
        """Send a request to the server with the ledger."""
        return self._start(self._call(0, Message(dict(header))))

    def beat(self, member: int, lost: Callable[[], None]) -> None:
        """Send heartbeats of a member, and of no other one; ``lost`` is called in the thread
        if the servers do not know it.
        """
        if self._beats is not None:
            self._beats.cancel()
        self._beats = asyncio.run_coroutine_threadsafe(self._beat(member, lost), self._loop)

    async def _beat(self, member: int, lost: Callable[[], None]) -> None:
        while True:
            try:
                await self._heartbeats.call(
                    Message({"op": "beat", "member": member}), self._timeout
                )
            except ServerError:
                lost()
                return
            except PeerLostError:
                continue  # requests of the training report it
            await asyncio.sleep(BEAT)

    def _by_server(self, keys: Iterable[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for key in keys:
            groups.setdefault(self._owners[key], []).append(key)
        return groups

    async def _all(self, requests: Sequence[tuple[int, Message]]) -> list[Message]:
        return list(await asyncio.gather(*(self._call(index, x) for index, x in requests)))

    async def _call(self, index: int, message: Message) -> Message:
        """Return a server's reply, repeating requests whose time has come to wait for others."""
        began = time.monotonic()
        while True:
            reply = await self._noticing(index, message)
            if "waits" not in reply.header:
                return reply
            if time.monotonic() - began >= NOTICE:
                self._tell_waiting(reply.header["waits"])

    def _tell_waiting(self, replicas: list[int]) -> None:
        """Tell the user for which replicas this one waits, once until these are others."""
        if replicas == self._waited_for:
            return
        self._waited_for = replicas
        numbers = ", ".join(map(str, replicas))
        which = f"replica{'s' if len(replicas) > 1 else ''} {numbers}" if replicas else "others"
        print(
            f"pipollux: waiting for {which} for {NOTICE:.0f} s, with a connection to the servers: "
            "see whether it is slow, evaluates or hangs",
            file=sys.stderr,
            flush=True,
        )

    async def _noticing(self, index: int, message: Message) -> Message:
        request = asyncio.ensure_future(self._servers[index].call(message, self._timeout))
        try:
            for number in itertools.count():
                done, _ = await asyncio.wait([request], timeout=NOTICE)
                if done:
                    return request.result()
                if number == 0:
                    server = self._servers[index]
                    print(
                        f"pipollux: {server.name} at {server.address} has not answered for "
                        f"{NOTICE:.0f} s; waiting up to {self._timeout:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            request.cancel()
        raise AssertionError  # the loop above does not end

    def _start(
        self, request: Coroutine[Any, Any, T], callback: Callable[[], None] | None = None
    ) -> Handle[T]:
        async def run() -> T:
            result = await request
            if callback is not None:
                callback()
            return result

        return Handle(asyncio.run_coroutine_threadsafe(run(), self._loop))

    def close(self) -> None:
        """End the thread; requests under way are given up."""
        if not self._thread.is_alive():
            return

        async def close() -> None:
            if self._beats is not None:
                self._beats.cancel()
            for server in [*self._servers, self._heartbeats]:
                await server.close()
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            end(self._context)

        began = time.monotonic()
        with suppress(TimeoutError, concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(CLOSING)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(max(0.1, CLOSING - (time.monotonic() - began)))
