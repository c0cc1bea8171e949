"""The hosts of the tests: they are apart, their links fail and are slow, and nothing is left."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.harness.hosts import Hosts, runs
from tests.programs import Command
from tests.services import require_hosts

PORT = 29400
GREETS = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(socket.gethostname().encode() + b" " + b"x" * 100_000)
"""
ASKS = f"""
import socket, sys
with socket.create_connection((sys.argv[1], {PORT}), float(sys.argv[2])) as connection:
    answer = b""
    while part := connection.recv(65536):
        answer += part
print(answer.split()[0].decode(), len(answer))
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_hosts()
    with Hosts(2) as made:
        yield made


@pytest.fixture
def greeter(hosts: Hosts) -> Iterator[Hosts]:
    """Hosts of which the first greets who connects."""
    command = [sys.executable, "-c", GREETS]
    with hosts.run("n1", command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"listening\n"
        yield hosts
        server.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM, "signals reach the command itself"


def ask(hosts: Hosts, seconds: float) -> str:
    """Connect from the second host to the first, by its name."""
    return hosts.call("n2", sys.executable, "-c", ASKS, "n1", str(seconds)).strip()


def test_a_host_has_a_name_and_an_address(hosts: Hosts) -> None:
    assert [hosts.call(name, "hostname").strip() for name in hosts.names] == hosts.names
    assert hosts.call("n2", "ip", "-brief", "address", "show", "eth0").split()[2] == (
        f"{hosts.address('n2')}/24"
    )
    assert hosts.call("n1", "pwd").strip() == str(Path.cwd())
    assert not hosts.call("n1", "ss", "-Hlt").strip(), "ports of the machine are not the host's"


def test_a_link_goes_down_and_up(greeter: Hosts) -> None:
    assert ask(greeter, 240) == "n1 100003"
    greeter.link_down("n1")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ask(greeter, 0.5)
    assert "timed out" in refused.value.stderr
    greeter.link_up("n1")
    assert ask(greeter, 240) == "n1 100003"


def test_the_machine_reaches_its_hosts(greeter: Hosts) -> None:
    with socket.create_connection((greeter.address("n1"), PORT), 240) as connection:
        assert connection.recv(2) == b"n1"
        assert connection.getsockname()[0] == greeter.gateway


def test_a_slow_link_loses_nothing(greeter: Hosts) -> None:
    greeter.slow_link("n1", "10mbit")
    assert "rate 10Mbit" in greeter.call("n1", "tc", "qdisc", "show", "dev", "eth0")
    assert ask(greeter, 240) == "n1 100003"


def test_a_host_is_killed_with_all_that_runs_on_it(hosts: Hosts) -> None:
    with hosts.run("n1", ["sh", "-c", "sleep inf & sleep inf"]) as command:
        while len(hosts.pids("n1")) < 3:
            assert command.poll() is None
        hosts.kill("n1")
        assert command.wait() == -signal.SIGKILL
    assert hosts.call("n1", "hostname").strip() == "n1"
    assert hosts.pids("n1") == set()


def test_two_have_hosts_of_their_own_and_what_a_killed_one_left_goes(repository: Path) -> None:
    require_hosts()
    script = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(repository)!r})\n"
        "from tests.hosts.harness.hosts import Hosts\n"
        "hosts = Hosts(2)\n"
        "print(hosts.run('n1', ['sleep', 'inf']).pid, hosts.gateway, flush=True)\n"
        "signal.pause()\n"
    )
    with Command([sys.executable, "-c", script]) as other:
        while not other.output.endswith("\n"):
            assert other.poll() is None, other.errors
        pid, gateway = other.output.split()
        with Hosts(1) as mine:
            assert mine.gateway != gateway
            assert mine.call("n1", "hostname").strip() == "n1"
        assert runs(int(pid))
        assert address_is_ours(gateway)
    with Hosts(1):
        assert not runs(int(pid))
    assert not address_is_ours(gateway)


def address_is_ours(address: str) -> bool:
    """Whether this machine has an address, so that one can listen there."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
