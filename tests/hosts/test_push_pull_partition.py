"""Push and pull on two hosts: over a slow network, and one that is cut for a minute."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.hosts.harness.hosts import TIMEOUT, Hosts
from tests.sched.scripts import PUSH_PULL
from tests.services import require_hosts

pytestmark = pytest.mark.exhaustive
PARTITION = 60.0
PORT = 7700
EPOCHS = 80


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_hosts()
    with Hosts(2) as made:
        yield made


class Job:
    """Servers and replicas on hosts; each writes a log."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        servers_on: list[str],
        options: tuple[str, ...] = (),
        **environment: str,
    ) -> None:
        self.hosts, self.folder = hosts, folder
        addresses = [f"{hosts.address(x)}:{PORT + n}" for n, x in enumerate(servers_on)]
        self.environment = {"PIPOLLUX_SERVERS": ",".join(addresses), "PIPOLLUX_TOKEN": "secret"}
        self.environment |= {"RESULTS": str(folder), "EPOCHS": str(EPOCHS), **environment}
        self.servers = [
            self._start(host, f"server-{n}", "-m", "pipollux.server", *place, *options)
            for n, host in enumerate(servers_on)
            for place in [["--index", str(n), "--host", hosts.address(host)]]
        ]
        self.replicas = {host: self.start(host) for host in hosts.names}

    def start(self, host: str) -> subprocess.Popen[bytes]:
        place = {"PIPOLLUX_REPLICA": str(self.hosts.names.index(host))}
        return self._start(host, host, str(PUSH_PULL), **place)

    def _start(self, host: str, name: str, *command: str, **more: str) -> subprocess.Popen[bytes]:
        variables = [f"{key}={value}" for key, value in (self.environment | more).items()]
        with (self.folder / f"{name}.log").open("ab") as log:
            inside = self.hosts.inside(host, "env", *variables, sys.executable, *command)
            return subprocess.Popen(inside, stdout=log, stderr=log)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def epoch(self, host: str) -> int:
        """Return the epoch in which a replica was last."""
        for path in self.folder.glob(f"*-{self.hosts.names.index(host)}.txt"):
            whole = path.read_text().rpartition("\n")[0].splitlines()
            return int(json.loads(whole[-1])["epoch"]) if whole else -1
        return -1

    def has_trained(self, host: str) -> bool:
        return self.epoch(host) >= 1

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.log('n1')} {self.log('n2')}"
            time.sleep(0.05)

    def close(self) -> None:
        for process in [*self.replicas.values(), *self.servers]:
            process.kill()
            process.wait()


@pytest.mark.parametrize("servers_on", [["n1", "n1"], ["n1", "n2"]])
def test_a_cut_network_heals(hosts: Hosts, tmp_path: Path, servers_on: list[str]) -> None:
    """Who is with the servers goes on; if they are on both sides, all wait."""
    job = Job(hosts, tmp_path, servers_on)
    try:
        for host in hosts.names:
            job.wait(partial(job.has_trained, host), f"{host} trains")
        hosts.link_down("n2")
        time.sleep(PARTITION)
        during = job.epoch("n1")
        hosts.link_up("n2")
        if servers_on[0] == servers_on[1]:
            assert during > 10
            # The others have ended its epoch, so it has to start again, as after a crash.
            assert job.replicas["n2"].wait(TIMEOUT) == 1, job.log("n2")
            assert "start it again, and it continues with theirs" in job.log("n2")
            job.replicas["n2"] = job.start("n2")
        for host, replica in job.replicas.items():
            assert replica.wait(TIMEOUT) == 0, job.log(host)
        assert job.epoch("n1") == job.epoch("n2") == EPOCHS - 1
    finally:
        job.close()
    check_epochs(tmp_path, EPOCHS)


def test_a_long_push_is_not_taken_for_a_loss(hosts: Hosts, tmp_path: Path) -> None:
    """Heartbeats have a connection of their own: a push takes longer than the servers' patience."""
    hosts.slow_link("n2", "2mbit")
    job = Job(hosts, tmp_path, ["n1"], ("--lost-after", "5"), EPOCHS="1", WIDTH="2000")
    try:
        for host, replica in job.replicas.items():
            assert replica.wait(TIMEOUT) == 0, job.log(host)
        assert "is lost" not in job.log("server-0")
    finally:
        job.close()
    check_epochs(tmp_path, 1)


def check_epochs(folder: Path, epochs: int) -> None:
    """Check that every sample was taken in every epoch; those that were lost, again."""
    taken: dict[int, list[int]] = {}
    for path in folder.glob("*.txt"):
        for line in map(json.loads, path.read_text().splitlines()):
            taken.setdefault(line["epoch"], []).extend(line["numbers"])
    assert sorted(taken) == list(range(epochs))
    assert all(set(numbers) == set(range(120)) for numbers in taken.values())
