"""Requests and replies between replicas and servers, over ZeroMQ.

A message is a header in JSON and the bytes of its tensors. These are sent in frames of 1 MiB, so
that ZeroMQ's heartbeats pass between them on slow links. Connections are encrypted and
authenticated by CurveZMQ, with keys derived from the job's token: a peer without it cannot connect.

A request that was under way when its connection broke is sent again, so operations are idempotent.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError, PeerLostError

if TYPE_CHECKING:
    import zmq
    import zmq.asyncio

FRAME = 1 << 20
"""Largest frame in bytes."""
BEAT, SILENCE = 5.0, 30.0
"""Seconds between two heartbeats of a connection, and after which one without any is broken."""
REFUSALS = 5
"""Failed handshakes in a row after which the tokens must differ."""
RETRY = 0.1, 2.0
"""First and largest number of seconds between two attempts to connect."""
DOMAIN = "pipollux"
ENDING = 2.0
"""Seconds that the end of a context may take."""
HEADER_BYTES = 1 << 26
"""Largest header."""


class Message(NamedTuple):
    """A request or a reply."""

    header: dict[str, Any]
    """A JSON object."""
    tensors: Sequence[Tensor] = ()


class ServerError(PeerLostError):
    """A server has refused a request."""


def require_zmq() -> None:
    """Raise a ConfigurationError if pyzmq is missing."""
    try:
        import zmq  # noqa: F401  # only whether it is there
    except ImportError:
        raise ConfigurationError(
            "push and pull need the package pyzmq: pip install 'pipollux[push-pull]'"
        ) from None


def frames_of(message: Message) -> list[Any]:
    """Return a message's frames, without copies of contiguous CPU tensors."""
    views = [bytes_of(tensor) for tensor in message.tensors]
    kinds = [
        [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in message.tensors
    ]
    header = json.dumps({**message.header, "tensors": kinds}).encode()
    frames: list[Any] = [header]
    for view in views:
        frames.extend(view[start : start + FRAME] for start in range(0, len(view), FRAME))
    return frames


def message_of(frames: Sequence[Any]) -> Message:
    """Return the message of frames; a ValueError if they are not one."""
    if not frames or len(frames[0]) > HEADER_BYTES:
        raise ValueError("a message without a header")
    header = json.loads(bytes(frames[0]))
    tensors, rest = [], iter(frames[1:])
    for kind, shape in header.pop("tensors"):
        dtype = getattr(torch, kind)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape):
            raise ValueError(f"a message with a tensor of {kind} {shape}")
        count, offset = math.prod(shape), 0
        flat = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
        view = memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs before 3.12
        while offset < len(view):
            frame = memoryview(next(rest, b""))
            if not 0 < len(frame) <= len(view) - offset:
                raise ValueError("a message with fewer or more bytes than its tensors")
            view[offset : offset + len(frame)] = frame
            offset += len(frame)
        tensors.append(flat.view(dtype).reshape(shape))
    return Message(header, tensors)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # as above


def keys_of(token: str, role: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key that a token gives to servers or to their clients."""
    import zmq
    from zmq.utils import z85

    secret = z85.encode(hashlib.sha256(f"pipollux {role} {token}".encode()).digest())
    return zmq.curve_public(secret), secret


def prepare(socket: zmq.asyncio.Socket) -> None:
    """Set the options that both ends have."""
    import zmq

    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE * 1000))
    socket.setsockopt(zmq.IPV6, 1)


class Connection:
    """A client's connection to a server, on one event loop.

    Args:
        context: The ZeroMQ context.
        name: What the peer is, for messages.
        address: Its host and port.
        token: The job's token.
    """

    def __init__(self, context: zmq.asyncio.Context, name: str, address: str, token: str) -> None:
        self.name, self.address, self._token = name, address, token
        self._context = context
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Message, asyncio.Future[Message]]] = {}
        self._refusals = 0
        self._task: asyncio.Task[None] | None = None
        self._sends: asyncio.Queue[int] = asyncio.Queue()

    def start(self) -> None:
        """Connect, now and after each break."""
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())

    async def call(self, message: Message, timeout: float) -> Message:
        """Send a request and return the reply.

        Raises:
            ServerError: The server has refused it; the text is its reason.
            PeerLostError: There is no reply within ``timeout`` seconds, or the token is wrong.
        """
        number = next(self._numbers)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = message, future
        self._sends.put_nowait(number)
        try:
            reply = await asyncio.wait_for(future, timeout)
        except TimeoutError:
            op = message.header.get("op")
            raise PeerLostError(
                f"{self.name} at {self.address} has not answered {op!r} for {timeout:g} s: see "
                "whether it runs and can be reached"
            ) from None
        finally:
            del self._waiting[number]
        if "error" in reply.header:
            raise ServerError(str(reply.header["error"]))
        return reply

    async def close(self) -> None:
        """Disconnect; requests under way fail with a CancelledError."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for _, future in list(self._waiting.values()):
            future.cancel()

    async def _stay_connected(self) -> None:
        pause = RETRY[0]
        while True:
            lasted = await self._one_connection()
            pause = RETRY[0] if lasted else min(pause * 2.0, RETRY[1])
            if self._refusals >= REFUSALS:
                self._fail(
                    f"{self.name} at {self.address} refuses the connection: PIPOLLUX_TOKEN has to "
                    "be the same for the servers and for all replicas"
                )
            await asyncio.sleep(pause)

    async def _one_connection(self) -> bool:
        """Connect, send all requests that wait, and return once the connection is broken: whether
        there was one.
        """
        import zmq

        socket = self._context.socket(zmq.DEALER)
        prepare(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.curve_serverkey = keys_of(self._token, "server")[0]
        socket.curve_publickey, socket.curve_secretkey = keys_of(self._token, "client")
        events = socket.get_monitor_socket()
        self._sends = asyncio.Queue()
        for number in self._waiting:
            self._sends.put_nowait(number)
        tasks = [asyncio.ensure_future(x) for x in (self._send(socket), self._receive(socket))]
        try:
            socket.connect(f"tcp://{self.address}")
            return await self._until_broken(events)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()
            events.close(0)
            socket.close(0)

    async def _until_broken(self, events: zmq.asyncio.Socket) -> bool:
        import zmq
        from zmq.utils.monitor import parse_monitor_message

        connected = False
        while True:
            event = parse_monitor_message(await events.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected, self._refusals = True, 0
            elif event & (
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            ):
                self._refusals += 1
                return False
            elif event & (zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED):
                return connected

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            number = await self._sends.get()
            if number in self._waiting:
                header, tensors = self._waiting[number][0]
                frames = frames_of(Message({**header, "id": number}, tensors))
                await socket.send_multipart(frames, copy=False)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart(copy=False)
            reply = message_of([frame.buffer for frame in frames])
            _, future = self._waiting.get(reply.header.pop("id"), (None, None))
            if future is not None and not future.done():
                future.set_result(reply)

    def _fail(self, reason: str) -> None:
        for _, future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(PeerLostError(reason))


Handler = Callable[[Message], Awaitable[Message]]


class Listener:
    """A server's end: each request is handled in a task of its own.

    Args:
        context: The ZeroMQ context.
        host: Address to listen on.
        port: Its port.
        token: The job's token.
        handle: Returns the reply to a request, whose header names its connection (``via``).
        broken: Called with the name of a connection that is broken.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        port: int,
        token: str,
        handle: Handler,
        broken: Callable[[str], None],
    ) -> None:
        import zmq

        self._handle, self._broken = handle, broken
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = context.socket(zmq.ROUTER)
        prepare(self._socket)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys_of(token, "server")
        self._socket.zap_domain = DOMAIN.encode()
        try:
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ConfigurationError(
                f"cannot listen on {host}:{port} ({error}): choose another port or host, or end "
                "the process that has it"
            ) from None

    async def run(self) -> None:
        """Receive requests until cancelled."""
        import zmq

        loop = asyncio.get_running_loop()
        events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        watch = loop.create_task(self._watch(events))
        try:
            await self._receive()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self._socket.disable_monitor()
            events.close(0)

    async def _watch(self, events: zmq.asyncio.Socket) -> None:
        from zmq.utils.monitor import parse_monitor_message

        while True:
            event = parse_monitor_message(await events.recv_multipart())
            self._broken(str(event["value"]))

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            task = loop.create_task(self._serve(frames[0].bytes, frames[1:]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: bytes, frames: Sequence[Any]) -> None:
        try:
            request = message_of([frame.buffer for frame in frames])
            number = request.header.pop("id")
            request.header["via"] = frames[0].get("__fd")  # as monitors name connections
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # only a peer of another version sends this; it waits for its timeout
        try:
            reply = await self._handle(request)
        except Exception as error:  # without an answer the peer would wait for its timeout
            traceback.print_exc()
            what = f"{request.header.get('op')!r} ({type(error).__name__}: {error})"
            reply = Message({"error": f"a server has failed at {what}: see its output"})
        header = {**reply.header, "id": number}
        await self._socket.send_multipart(
            [peer, *frames_of(Message(header, reply.tensors))], copy=False
        )

    async def close(self) -> None:
        """Stop serving."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(0)


def start_authenticator(context: zmq.asyncio.Context, token: str) -> Any:
    """Accept only clients with the token's key; return the authenticator, to be stopped."""
    from zmq.auth.asyncio import AsyncioAuthenticator

    public, _ = keys_of(token, "client")

    class Provider:
        """Accepts one key."""

        def callback(self, domain: str, key: bytes) -> bool:
            """Return whether a client's public key is accepted."""
            return domain == DOMAIN and key == public

    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN, credentials_provider=Provider())
    return authenticator


def end(context: zmq.asyncio.Context) -> None:
    """Close a context whose sockets are closed. ZeroMQ may wait for a handshake that nobody answers
    any more, in a thread that ends with the process.
    """
    thread = threading.Thread(target=context.destroy, args=(0,), name="pipollux zmq", daemon=True)
    thread.start()
    thread.join(ENDING)


def flattened(tensors: Mapping[int, Sequence[Tensor]]) -> tuple[dict[str, int], list[Tensor]]:
    """Return the numbers of tensors by key, and all of them in a row."""
    counts = {str(key): len(several) for key, several in tensors.items()}
    return counts, [tensor for several in tensors.values() for tensor in several]


def unflattened(counts: Mapping[str, int], tensors: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Return the tensors of :func:`flattened` by key."""
    row = iter(tensors)
    return {int(key): [next(row) for _ in range(count)] for key, count in counts.items()}
