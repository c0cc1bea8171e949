"""Exchanges the addresses of an attempt's agents through the scheduler.

Each agent registers its address with the scheduler (``POST /jobs/{name}/replicas``), replica 0 with
the port of its store, and waits until all have (``GET /jobs/{name}/replicas``). The module runs in
processes of jobs, next to an agent that is run as a file, so it must import nothing from its
package.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from pipollux_protocol import environment as variables
from pipollux_protocol.messages import ReplicaAddresses, ReplicaRegistration

Answer = TypeVar("Answer")
REQUEST_TIMEOUT = 10.0
WAIT = 20.0
"""Seconds that one request waits for the other replicas."""
BACKOFF = 2.0
"""Seconds between two attempts while the scheduler does not answer."""


def own_address() -> str:
    """Return this replica's address for the others.

    It is PIPOLLUX_ADDRESS, else the address of the interface to the scheduler.
    """
    given = os.environ.get(variables.ADDRESS.name)
    if given:
        return given
    host = urllib.parse.urlsplit(_url()).hostname or "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def use_interface_of(address: str) -> None:
    """Make collectives use the interface of an address, unless the environment names one."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: any free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def meet(replica: int, address: str, port: int, timeout: float) -> tuple[str, int]:
    """Register this replica, and wait for the others; return address and port of replica 0.

    Exits with an error if the attempt is over, the token is wrong, or `timeout` seconds have
    passed.
    """
    deadline = time.monotonic() + timeout
    register(replica, address, port, timeout)
    while True:
        found = _registered(deadline)
        if found.complete:
            place = next(other.address for other in found.replicas if other.replica == 0)
            host, _, port_text = place.rpartition(":")
            return host.strip("[]"), int(port_text)
        if time.monotonic() >= deadline:
            there = len(found.replicas)
            _give_up(f"only {there} of {found.num_replicas} replicas were there in {timeout:g} s")


def register(replica: int, address: str, port: int, timeout: float) -> None:
    """Register a replica's address with the scheduler; exits like `meet`."""
    attempt = variables.ATTEMPT.read(os.environ) or 0
    shown = f"[{address}]" if ":" in address else address
    here = ReplicaRegistration(attempt=attempt, replica=replica, address=f"{shown}:{port}")
    _ask("POST", "", time.monotonic() + timeout, bytes, here.model_dump_json().encode())


def addresses_of(replicas: Iterable[int], timeout: float) -> list[str]:
    """Wait until these replicas are registered; return host and port of each. Exits like `meet`."""
    deadline, wanted = time.monotonic() + timeout, list(replicas)
    while True:
        places = {other.replica: other.address for other in _registered(deadline).replicas}
        missing = [replica for replica in wanted if replica not in places]
        if not missing:
            return [places[replica] for replica in wanted]
        if time.monotonic() >= deadline:
            _give_up(f"replica {missing[0]}, beside a server, was not there in {timeout:g} s")


def _registered(deadline: float) -> ReplicaAddresses:
    """Return the registered replicas, after a while unless all are."""
    attempt = variables.ATTEMPT.read(os.environ) or 0
    query = f"?attempt={attempt}&wait={WAIT:g}"
    return _ask("GET", query, deadline, ReplicaAddresses.model_validate_json)


def _ask(
    method: str,
    query: str,
    deadline: float,
    read: Callable[[bytes], Answer],
    body: bytes | None = None,
) -> Answer:
    """Send a request to the scheduler, with retries until the deadline of the monotonic clock.

    `read` parses the answer, or raises ValueError.
    """
    url = f"{_url()}/jobs/{os.environ[variables.JOB_ID.name]}/replicas{query}"
    request = urllib.request.Request(  # noqa: S310  # the scheduler's URL
        url,
        method=method,
        data=body,
        headers={
            "Authorization": f"Bearer {os.environ.get(variables.TOKEN.name, '')}",
            "Content-Type": "application/json",
        },
    )
    while True:
        try:
            with _opener().open(request, timeout=REQUEST_TIMEOUT + WAIT) as answer:
                return read(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(1000).decode("utf-8", "replace")
            if error.code < 500 and error.code != 429:
                _give_up(f"{url} answers {error.code}: {text}")
            failure = f"it answers {error.code}: {text}"
        except (OSError, ValueError) as error:
            failure = str(error)
        if time.monotonic() >= deadline:
            _give_up(f"the scheduler does not answer at {url}: {failure}")
        time.sleep(BACKOFF)


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener without proxies that trusts PIPOLLUX_CA_FILE if it is set."""
    context = ssl.create_default_context(cafile=os.environ.get(variables.CA_FILE.name) or None)
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )


def _url() -> str:
    return os.environ.get(variables.SCHEDULER_URL.name, "").rstrip("/")


def _give_up(why: str) -> NoReturn:
    print(f"pipollux: the replicas cannot meet: {why}", file=sys.stderr, flush=True)
    raise SystemExit(1)
