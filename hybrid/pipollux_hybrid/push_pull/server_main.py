"""``python -m pipollux.server``: the command of a server."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from pipollux_hybrid.errors import ConfigurationError, PipolluxError
from pipollux_protocol import environment as variables

from .server import LOST_AFTER, Server
from .transport import require_zmq


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until SIGTERM or Ctrl-C; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        require_zmq()
        asyncio.run(_run(_server(options), options.host, until_unused=options.until_unused))
    except PipolluxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipollux.server",
        description="A server for training by push and pull (HybridParallel(…, synchronization="
        "PushPull(…))). Start one for each address in PIPOLLUX_SERVERS; PIPOLLUX_TOKEN is a secret "
        "that servers and replicas share.",
    )
    parser.add_argument("--index", type=int, default=0, help="which address this server has")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--servers", help="addresses of all servers, instead of PIPOLLUX_SERVERS")
    parser.add_argument(
        "--directory", type=Path, help="folder, shared by all servers, for restarts"
    )
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between two saves")
    parser.add_argument(
        "--lost-after", type=float, default=LOST_AFTER, help="seconds until a replica is lost"
    )
    parser.add_argument(
        "--until-unused",
        action="store_true",
        help="end after standard input was closed, once no replica is left",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads for outer steps")
    return parser


def _server(options: argparse.Namespace) -> Server:
    given = options.servers or os.environ.get(variables.SERVERS.name, "")
    try:
        addresses = variables.SERVERS.kind.parse(given) if given else ()
    except ValueError:
        addresses = ()
    if not addresses:
        raise ConfigurationError(
            f"{variables.SERVERS.name}={given!r}: {variables.SERVERS.kind.allowed}; set it to the "
            "addresses of all servers, on servers and replicas alike"
        )
    token = os.environ.get(variables.TOKEN.name)
    if not token:
        raise ConfigurationError(
            f"{variables.TOKEN.name} is not set: choose a secret, the same for servers and replicas"
        )
    if not 0 <= options.index < len(addresses):
        raise ConfigurationError(
            f"--index {options.index}: a number from 0 to {len(addresses) - 1} is needed, one for "
            f"each address in {variables.SERVERS.name}"
        )
    for name in ("save_every", "lost_after", "threads"):
        if getattr(options, name) <= 0:
            flag = name.replace("_", "-")
            raise ConfigurationError(f"--{flag} {getattr(options, name)}: it has to be above 0")
    torch.set_num_threads(options.threads)
    return Server(
        options.index,
        addresses,
        token,
        options.directory,
        lost_after=options.lost_after,
        save_every=options.save_every,
    )


async def _run(server: Server, host: str, *, until_unused: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(
        f"pipollux server {server.index} of {len(server.addresses)}: "
        f"{server.addresses[server.index]}",
        file=sys.stderr,
        flush=True,
    )
    if until_unused:
        loop = asyncio.get_running_loop()
        threading.Thread(target=_end_with_input, args=(loop, server), daemon=True).start()
    await server.run(host, stop)


def _end_with_input(loop: asyncio.AbstractEventLoop, server: Server) -> None:
    """Tell a server when whoever has started it has no more use for it."""
    # Not through sys.stdin, whose lock would be held when the interpreter ends.
    while os.read(0, 1024):
        pass
    with suppress(RuntimeError):  # it has ended
        loop.call_soon_threadsafe(server.end_when_unused)


if __name__ == "__main__":
    sys.exit(main())
