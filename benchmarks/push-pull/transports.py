"""Seconds and CPU seconds of a push, and a small round trip, by transport.

A client pushes bytes to a server in another process, which keeps them in one piece and confirms:
over loopback, and, as root on Linux, between two hosts of ``links.py``. All processes are started
first and then take turns. Prints a Markdown table for each place; its first row has the medians,
and the others the ratios of theirs to those.

    python benchmarks/push-pull/transports.py [--rounds 5] [--packages FOLDER]

FOLDER may have grpcio: ``pip install --target FOLDER grpcio``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from links import Hosts, hosts

ROOT = Path(__file__).parents[2]
SIZES = {"12.6 MB": 12_600_000, "100 MB": 100_000_000}
ROUND_TRIPS, FRAME, PORT, DELAY, RATE = 20, 1 << 20, 7800, 0.02, 1000.0
PATIENCE, RESTART = 180.0, 30.0
"""Seconds for an answer of a process, and for one after a restart of the server."""
TOKEN = "benchmark"  # noqa: S105  # it protects nothing
SMALL = b"?" * 100
EVERYWHERE = "0.0.0.0"  # noqa: S104  # of a host of its own, or for the seconds of a run


class Client:
    """What is measured; each transport has one."""

    def push(self, size: int) -> None:
        """Push so many bytes, and wait for the confirmation."""
        raise NotImplementedError

    def ask(self) -> None:
        """Send a small request, and wait for the reply."""
        raise NotImplementedError


class Ours(Client):
    """The connection of the project; with ``curve`` False, of sockets that ignore its keys."""

    def __init__(self, address: str, port: int, curve: bool) -> None:
        from pipollux_hybrid.push_pull.transport import Connection

        self._run = asyncio.new_event_loop().run_until_complete
        self._run(self._start(Connection, f"{address}:{port}", curve))

    async def _start(self, connection: Any, at: str, curve: bool) -> None:
        self._connection = connection(zmq_context(curve), "server", at, TOKEN)
        self._connection.start()

    def push(self, size: int) -> None:
        """Push a tensor."""
        import torch

        self._call({"op": "push"}, [torch.zeros(size // 4)])

    def ask(self) -> None:
        """Send a header."""
        self._call({"op": "ask", "text": SMALL.decode()}, [])

    def _call(self, header: dict[str, Any], tensors: Sequence[Any]) -> None:
        from pipollux_hybrid.push_pull.transport import Message

        self._run(self._connection.call(Message(header, tensors), PATIENCE))


def zmq_context(curve: bool) -> Any:
    """Return a context; without ``curve``, its sockets have no keys."""
    import zmq.asyncio

    class PlainSocket(zmq.asyncio.Socket):
        """Ignores keys."""

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith(("curve_", "zap_")):
                super().__setattr__(name, value)

    class PlainContext(zmq.asyncio.Context):
        """Makes such sockets."""

        _socket_class = PlainSocket

    return zmq.asyncio.Context() if curve else PlainContext()


async def serve_ours(port: int, curve: bool) -> None:
    """Confirm requests to the project's listener."""
    from pipollux_hybrid.push_pull import transport

    async def handle(_request: Any) -> Any:
        return transport.Message({"ok": True})

    context = zmq_context(curve)
    if curve:
        transport.start_authenticator(context, TOKEN)
    listener = transport.Listener(context, EVERYWHERE, port, TOKEN, handle, lambda _name: None)
    await listener.run()


class Streams(Client):
    """Asyncio's streams: eight bytes with the size, then the bytes."""

    def __init__(self, address: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._run = asyncio.new_event_loop().run_until_complete
        name = "benchmark" if tls else None
        opened = asyncio.open_connection(address, port, ssl=tls, server_hostname=name)
        self._reader, self._writer = self._run(opened)

    def push(self, size: int) -> None:
        """Push bytes."""
        self._run(self._send(bytes(size)))

    def ask(self) -> None:
        """Push a few."""
        self._run(self._send(SMALL))

    async def _send(self, data: bytes) -> None:
        self._writer.write(len(data).to_bytes(8, "big"))
        view = memoryview(data)
        for start in range(0, len(data), FRAME):
            self._writer.write(view[start : start + FRAME])
            await self._writer.drain()
        await self._reader.readexactly(1)


async def serve_streams(port: int, tls: ssl.SSLContext | None) -> None:
    """Keep and confirm the bytes of clients."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = int.from_bytes(await reader.readexactly(8), "big")
                kept, done = bytearray(size), 0
                while done < size:
                    part = await reader.read(min(FRAME, size - done))
                    kept[done : done + len(part)] = part
                    done += len(part)
                writer.write(b"k")

    server = await asyncio.start_server(handle, EVERYWHERE, port, limit=FRAME, ssl=tls)
    await server.serve_forever()


def joined(rank: int, address: str, port: int) -> Any:
    """Return torch.distributed with a gloo group of server and client."""
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=2
    )
    return torch.distributed


class Gloo(Client):
    """Sends of torch.distributed; the first has the size."""

    def __init__(self, address: str, port: int) -> None:
        self._group = joined(1, address, port)

    def push(self, size: int) -> None:
        """Push a tensor."""
        import torch

        self._group.send(torch.tensor([size // 4]), 0)
        self._group.send(torch.zeros(size // 4), 0)
        self._group.recv(torch.zeros(1), 0)

    def ask(self) -> None:
        """Push a small one."""
        self.push(len(SMALL))


def serve_gloo(address: str, port: int) -> None:
    """Confirm tensors."""
    import torch

    group = joined(0, address, port)
    while True:
        size = torch.zeros(1, dtype=torch.int64)
        group.recv(size, 1)
        group.recv(torch.empty(int(size)), 1)
        group.send(torch.ones(1), 1)


class Grpc(Client):
    """A call of grpcio that streams messages of 1 MiB."""

    def __init__(self, address: str, port: int, folder: Path | None) -> None:
        import grpc

        if folder is None:
            channel = grpc.insecure_channel(f"{address}:{port}")
        else:
            options = [("grpc.ssl_target_name_override", "benchmark")]
            certificate, key = (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()
            credentials = grpc.ssl_channel_credentials(certificate, key, certificate)
            channel = grpc.secure_channel(f"{address}:{port}", credentials, options)
        self._call = channel.stream_unary("/bench/push")

    def push(self, size: int) -> None:
        """Stream bytes."""
        view = memoryview(bytes(size))
        parts = (bytes(view[at : at + FRAME]) for at in range(0, size, FRAME))
        self._call(iter([size.to_bytes(8, "big"), *parts]), timeout=PATIENCE)

    def ask(self) -> None:
        """Stream a few."""
        self.push(len(SMALL))


def serve_grpc(port: int, folder: Path | None) -> None:
    """Keep and confirm streams."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    def push(parts: Iterator[bytes], _context: Any) -> bytes:
        kept, done = bytearray(int.from_bytes(next(parts), "big")), 0
        for part in parts:
            kept[done : done + len(part)] = part
            done += len(part)
        return b"k"

    server = grpc.server(ThreadPoolExecutor(2))
    method = grpc.stream_unary_rpc_method_handler(push)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("bench", {"push": method})]
    )
    if folder is None:
        server.add_insecure_port(f"{EVERYWHERE}:{port}")
    else:
        certificate, key = (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()
        server.add_secure_port(
            f"{EVERYWHERE}:{port}",
            grpc.ssl_server_credentials([(key, certificate)], certificate, True),
        )
    server.start()
    server.wait_for_termination()


KINDS = {
    "pyzmq, CURVE": "yes",
    "pyzmq": "no",
    "gloo": "no",
    "grpcio, TLS": "yes",
    "grpcio": "no",
    "asyncio, TLS": "yes",
    "asyncio": "no",
}
"""Transports, and whether peers are authenticated and bytes encrypted. With TLS both have the
certificate of the other."""


def certify(folder: Path) -> None:
    """Write a certificate and its key, which both peers have."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=benchmark", "-addext", "subjectAltName=DNS:benchmark"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)


def tls_context(folder: Path, *, server: bool) -> ssl.SSLContext:
    """Return a context that accepts only peers with the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.load_verify_locations(folder / "cert.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def serve(kind: str, address: str, port: int, folder: Path) -> None:
    """Be the server of a transport."""
    name, _, secure = kind.partition(", ")
    if name == "pyzmq":
        asyncio.run(serve_ours(port, bool(secure)))
    elif name == "asyncio":
        tls = tls_context(folder, server=True) if secure else None
        asyncio.run(serve_streams(port, tls))
    elif name == "grpcio":
        serve_grpc(port, folder if secure else None)
    else:
        serve_gloo(address, port)


def connected(kind: str, address: str, port: int, folder: Path) -> Client:
    """Return the client of a transport, once the server answers."""
    name, _, secure = kind.partition(", ")
    tls = tls_context(folder, server=False) if secure else None
    makers: dict[str, Callable[[], Client]] = {
        "pyzmq": lambda: Ours(address, port, bool(secure)),
        "asyncio": lambda: Streams(address, port, tls),
        "grpcio": lambda: Grpc(address, port, folder if secure else None),
        "gloo": lambda: Gloo(address, port),
    }
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            client = makers[name]()
            client.ask()
        except Exception:  # each transport has its own, until the server is there
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return client


def obey(client: Client) -> None:
    """Do what the lines of the standard input say, and print how long it took."""
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, number = line.strip().partition(" ")
        if what == "restart":
            limit = threading.Timer(RESTART, lambda: os._exit(1))
            limit.start()
            print("waits", flush=True)
            print(json.dumps(restarted(client)), flush=True)
            limit.cancel()
            continue
        started = time.monotonic()
        for _ in range(ROUND_TRIPS if what == "ask" else 1):
            client.ask() if what == "ask" else client.push(int(number))
        print(json.dumps(time.monotonic() - started), flush=True)


def restarted(client: Client) -> str:
    """Return which requests are answered by a server that starts again."""
    answer = "the same request"
    while True:
        try:
            client.ask()
        except Exception:  # each transport has its own
            answer = "new requests"
            time.sleep(0.5)
        else:
            return answer


class Pair:
    """A server and a client of a transport."""

    def __init__(self, kind: str, port: int, on: Hosts | None, options: argparse.Namespace) -> None:
        self._kind, self._port, self._on, self._options = kind, port, on, options
        self.server, self.client = self._start(0, "serve"), self._start(1, "client")

    def _start(self, host: int, role: str) -> subprocess.Popen[str]:
        address = "127.0.0.1" if self._on is None else self._on.address(0)
        words = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--role",
            role,
            "--kind",
            self._kind,
        ]
        words += ["--address", address, "--port", str(self._port), "--certificates"]
        words += [self._options.certificates]
        paths = [str(ROOT / name) for name in ("hybrid", "perfmodel", "sched")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, [self._options.packages]), *paths]),
            "GLOO_SOCKET_IFNAME": "lo" if self._on is None else "eth0",
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            words if self._on is None else self._on.within(host, words),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if role == "client" else None,
            text=True,
        )

    def say(self, what: str) -> None:
        """Give the client a command."""
        print(what, file=self.client.stdin, flush=True)

    def answer(self) -> str:
        """Return the client's next line; empty once it has ended."""
        return self.client.stdout.readline().strip() if self.client.stdout else ""

    def measure(self, what: str) -> tuple[float, float]:
        """Return seconds, and CPU seconds of both processes."""
        before = sum(map(cpu_seconds, (self.server.pid, self.client.pid)))
        self.say(what)
        seconds = json.loads(self.answer())
        return seconds, sum(map(cpu_seconds, (self.server.pid, self.client.pid))) - before

    def restart(self) -> str:
        """Kill the server while the client asks, start it again, and return what is answered."""
        self.server.kill()
        self.server.wait()
        self.say("restart")
        self.answer()
        self.server = self._start(0, "serve")
        return json.loads(self.answer() or '"none"')

    def close(self) -> None:
        """End both."""
        for process in (self.server, self.client):
            process.kill()
            process.wait()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def compare(place: str, on: Hosts | None, options: argparse.Namespace) -> None:
    """Measure all transports in turn, and print their table."""
    kinds = [kind for kind in KINDS if options.grpc or not kind.startswith("grpc")]
    works = {**{name: f"push {size}" for name, size in SIZES.items()}, "request": "ask"}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        pairs = {kind: Pair(kind, PORT + at, on, options) for at, kind in enumerate(kinds)}
        for kind, pair in pairs.items():
            stack.callback(pair.close)
            if pair.answer() != "ready":
                sys.exit(f"{kind}: the client has ended")
        for number in range(options.rounds):
            for name, what in works.items():
                for kind, pair in pairs.items():
                    found.setdefault((kind, name), []).append(pair.measure(what))
            print(f"{place}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        again = {kind: pair.restart() for kind, pair in pairs.items()}
    print(f"\n{place}\n")
    heads = [f"{name}, s | CPU s" for name in SIZES]
    print(f"| | {' | '.join(heads)} | request, ms | encrypts | answered after a restart |")
    print("|---|" + "---|" * (2 * len(SIZES) + 3))
    first: list[float] = []
    for kind in kinds:
        row = [
            statistics.median(column)
            for name in SIZES
            for column in zip(*found[kind, name], strict=True)
        ]
        trips = statistics.median(seconds for seconds, _ in found[kind, "request"])
        row.append(trips / ROUND_TRIPS * 1000)
        texts = [f"{value:.3g}" for value in row] if not first else []
        texts = texts or [f"{value / base:.2f}" for value, base in zip(row, first, strict=True)]
        first = first or row
        print(f"| {kind} | {' | '.join(texts)} | {KINDS[kind]} | {again[kind]} |", flush=True)


def main() -> None:
    """Compare the transports, or be a process of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--packages", default="")
    parser.add_argument("--places", nargs="+", default=["loopback", "links"])
    for internal in ("role", "kind", "address", "certificates"):
        parser.add_argument(f"--{internal}", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        ends = {"serve": serve, "client": lambda *where: obey(connected(*where))}
        ends[options.role](options.kind, options.address, options.port, Path(options.certificates))
        return
    if options.packages:
        sys.path.insert(0, options.packages)
    options.grpc = importlib.util.find_spec("grpc") is not None
    if not options.grpc:
        print("grpcio is left out: it is not installed; see --packages", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        certify(Path(folder))
        options.certificates = folder
        if "loopback" in options.places:
            compare("Loopback", None, options)
        if "links" in options.places:
            with hosts(2, RATE, DELAY) as on:
                compare(f"{RATE / 1000:g} Gbit/s, {DELAY * 1000:g} ms", on, options)


if __name__ == "__main__":
    main()
