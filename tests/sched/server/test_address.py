"""Where a scheduler listens, and what jobs and users are told."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest

from pipollux_sched.server.address import ServerAddress
from pipollux_sched.server.http_server import HttpServer, HttpServerError
from pipollux_sched.server.tls import Tls

TLS = Tls(certificate=Path("cert.pem"), key=Path("key.pem"), authority=Path("/ca.pem"))
NAME = socket.gethostname()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (ServerAddress(), "http://127.0.0.1:7070"),
        (ServerAddress(host="10.0.0.5", tls=TLS), "https://10.0.0.5:7070"),
        (ServerAddress(host="fe80::1"), "http://[fe80::1]:7070"),
        (ServerAddress(host="0.0.0.0"), f"http://{NAME}:7070"),  # noqa: S104  # what is tested
        (ServerAddress(host="::", tls=TLS), f"https://{NAME}:7070"),
        (ServerAddress(advertise_url="https://gpus.example.com/a/"), "https://gpus.example.com/a"),
    ],
)
def test_what_jobs_are_told(address: ServerAddress, url: str) -> None:
    assert address.advertised(7070) == url
    told = {"PIPOLLUX_SCHEDULER_URL": url}
    assert address.environment(7070) == (
        {**told, "PIPOLLUX_CA_FILE": "/ca.pem"} if address.tls else told
    )
    info = address.server_info(7070, "secret")
    assert (info.url, info.port, info.token) == (url, 7070, "secret")
    assert info.ca_file == ("/ca.pem" if address.tls else None)


def test_names_that_may_be_asked_for() -> None:
    address = ServerAddress(
        host="10.0.0.5", advertise_url="https://gpus.example.com", allowed_hosts=["*.example.org"]
    )
    assert address.hosts() == ["10.0.0.5", "*.example.org", "gpus.example.com"]
    everywhere = ServerAddress(host="0.0.0.0").hosts()  # noqa: S104  # what is tested
    own = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family is socket.AF_INET
    }
    assert own | {NAME} <= {*everywhere}


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("127.0.0.1", True, False),
        ("127.0.0.9", True, False),
        ("localhost", True, False),
        ("::1", True, False),
        ("10.0.0.5", False, False),
        ("node-1", False, False),
        ("0.0.0.0", False, True),  # noqa: S104  # what is tested
        ("::", False, True),
    ],
)
def test_kinds_of_addresses(host: str, loopback: bool, wildcard: bool) -> None:
    address = ServerAddress(host=host)
    assert (address.is_loopback, address.is_wildcard) == (loopback, wildcard)


def test_a_certificate_is_of_no_use_to_who_is_told_http() -> None:
    with pytest.raises(ValueError, match="the scheduler serves HTTPS only"):
        ServerAddress(advertise_url="http://gpus.example.com", tls=TLS)


@pytest.mark.parametrize("host", ["192.0.2.1", "nobody.invalid"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(HttpServerError, match="choose as --host an address of this machine"):
        HttpServer(lambda *_: None, host, 0)  # type: ignore[arg-type,return-value]  # never asked
