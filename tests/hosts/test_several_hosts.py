"""Training over several hosts: as on one, over slow links, and without one that is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.harness.hosts import TIMEOUT, Hosts
from tests.hosts.job import PORT, Agents, torchrun
from tests.hybrid.elastic import test_loss_curve as curves
from tests.hybrid.elastic import training
from tests.services import require_hosts

pytestmark = pytest.mark.exhaustive
TRAINING = Path(str(training.__file__))
STOPPED_AT = 20


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    require_hosts()
    with Hosts(3) as made:
        yield made


@pytest.mark.parametrize(
    ("names", "rate"), [(["n1", "n2"], None), (["n3", "n1", "n2"], None), (["n2", "n1"], "20mbit")]
)
def test_the_losses_are_those_of_one_host(
    hosts: Hosts, tmp_path: Path, names: list[str], rate: str | None
) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    for folder in (one, several):
        folder.mkdir()
    curves.run(one, 1, (1, 1, 1, "never", 0))
    if rate is not None:
        hosts.slow_link(names[0], rate)
    environment = {
        "RESULTS": str(several),
        "PIPOLLUX_CHECKPOINT_DIR": str(several / "checkpoints"),
        "PIPOLLUX_NUM_STAGES": "2",
        "MICROBATCHES": "2",
        "MODE": "except_last",
        "STOP_AT": "0",
    }
    with torchrun(hosts, names, curves.SCRIPT, several, environment) as agents:
        assert set(agents.wait().values()) == {0}, agents.logs
    assert curves.curve(several) == pytest.approx(curves.curve(one), rel=1e-9)
    assert len(list(several.glob("losses-*.txt"))) == len(names)


def test_few_ports_and_an_interface_by_name(hosts: Hosts, tmp_path: Path) -> None:
    """Hosts whose own names lead to the loopback, as many installations have it."""
    ports = range(40000, 40200)
    for host in hosts.names:
        own = tmp_path / f"hosts-{host}"
        known = (hosts.folder / "hosts").read_text()
        own.write_text(known.replace(f"{hosts.address(host)}\t", "127.0.1.1\t"))
        hosts.call(host, "mount", "--bind", str(own), "/etc/hosts")
        kept = f"net.ipv4.ip_local_port_range={ports[0]} {ports[-1]}"
        hosts.call(host, "sysctl", "--write", kept)
    environment = {"RESULTS": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth0"}
    gate = tmp_path / f"hold-{STOPPED_AT}"
    gate.touch()
    with torchrun(hosts, hosts.names, TRAINING, tmp_path, environment) as agents:
        wait_until_held(agents, tmp_path, 3)
        for host in hosts.names:
            lines = hosts.call(host, "ss", "--no-header", "--listening", "--tcp", "-n").splitlines()
            listening = {int(line.split()[3].rpartition(":")[2]) for line in lines}
            assert listening - set(ports) == ({PORT} if host == "n1" else set())
            assert listening & set(ports)
        gate.unlink()
        assert set(agents.wait().values()) == {0}, agents.logs


def wait_until_held(agents: Agents, results: Path, num_replicas: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while len(list(results.glob(f"reached-{STOPPED_AT}-*"))) < num_replicas:
        assert agents.poll() is None, agents.logs
        assert time.monotonic() < deadline, agents.logs
        time.sleep(0.02)


def rows(results: Path, attempt: int) -> list[list[int]]:
    """Step, epoch and samples of each iteration of a run."""
    files = results.glob(f"samples-{attempt}-*.txt")
    return [[int(x) for x in line.split()] for f in files for line in f.read_text().splitlines()]


def assert_once_an_epoch(done: list[list[int]]) -> None:
    for epoch in range(training.EPOCHS):
        taken = Counter(index for _, e, *indices in done if e == epoch for index in indices)
        assert taken == Counter(range(training.SIZE))


def test_one_agent_is_asked_and_all_stop(hosts: Hosts, tmp_path: Path) -> None:
    """From three hosts to two of them, the second of which is the one that was asked."""
    environment = {
        "RESULTS": str(tmp_path),
        "PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
        "PIPOLLUX_ATTEMPT": "1",
    }
    gate = tmp_path / f"hold-{STOPPED_AT}"
    gate.touch()
    with torchrun(hosts, hosts.names, TRAINING, tmp_path, environment) as agents:
        wait_until_held(agents, tmp_path, 3)
        agents.agents["n2"].terminate()
        while not (tmp_path / f"asked-{STOPPED_AT}-1").exists():
            assert agents.poll() is None, agents.logs
        gate.unlink()
        assert set(agents.wait().values()) == {1}, "as torchrun has it after SIGTERM"
        assert "pipollux: stopped at step " in agents.log("n1"), agents.logs
    again = {**environment, "PIPOLLUX_ATTEMPT": "2"}
    with torchrun(hosts, ["n3", "n2"], TRAINING, tmp_path, again) as agents:
        assert set(agents.wait().values()) == {0}, agents.logs
    first, second = rows(tmp_path, 1), rows(tmp_path, 2)
    assert max(row[0] for row in first) < min(row[0] for row in second)
    assert_once_an_epoch([*first, *second])


@pytest.mark.parametrize("lost", ["n1", "n3"])
def test_a_lost_host_is_found_and_the_others_go_on(hosts: Hosts, tmp_path: Path, lost: str) -> None:
    """The first host is where all meet, and the one that writes checkpoints."""
    checkpoints = tmp_path / "checkpoints"
    environment = {
        "RESULTS": str(tmp_path),
        "PIPOLLUX_CHECKPOINT_DIR": str(checkpoints),
        "PIPOLLUX_CHECKPOINT_INTERVAL": "0.001",
        "PIPOLLUX_HOST_TIMEOUT": "4",
        "PIPOLLUX_ATTEMPT": "1",
    }
    gate = tmp_path / f"hold-{STOPPED_AT}"
    gate.touch()
    with torchrun(hosts, hosts.names, TRAINING, tmp_path, environment) as agents:
        wait_until_held(agents, tmp_path, 3)
        hosts.link_down(lost)
        gate.unlink()
        # Far less than the 1800 s that replicas wait for each other, or the wait fails.
        assert set(agents.wait().values()) == {1}
        logs = {host: agents.log(host) for host in hosts.names}
    left = [host for host in hosts.names if host != lost]
    for host in left:
        rank = hosts.names.index(lost)
        assert f"replica {rank} on {lost} has sent nothing for " in logs[host]
        assert f"resumes from the newest checkpoint in {checkpoints}" in logs[host]
    others = " and ".join(f"replica {hosts.names.index(host)} on {host}" for host in left)
    assert f"{others} have sent nothing for " in logs[lost], "it also ends by itself"

    again = {**environment, "PIPOLLUX_ATTEMPT": "2"}
    with torchrun(hosts, left, TRAINING, tmp_path, again) as agents:
        assert set(agents.wait().values()) == {0}, agents.logs
    # What came after the checkpoint that the second run began from is lost, and done again.
    second = rows(tmp_path, 2)
    begins = min(row[0] for row in second)
    assert 1 < begins <= STOPPED_AT + 1
    first = [row for row in rows(tmp_path, 1) if row[0] < begins]
    assert_once_an_epoch([*first, *second])
