"""Several hosts on one machine: network namespaces on a bridge, each with a name and an address.

A host is a network namespace with an address of its own, a host name, and an `/etc/hosts` that
knows all of them. They share the machine's files, as hosts share a network file system. The machine
itself is the bridge's address `.1`, where a scheduler would run. It takes root and iproute2.

Whoever makes hosts holds the lock of their subnet while it lives. So several test processes have
theirs side by side, and what a killed one has left is cleared away by the next that makes hosts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import psutil

LOCKS = Path("/run/pipollux-hosts")
SUBNETS = 200
PROGRAMS = ("ip", "tc", "nsenter", "unshare")
MARK = "PIPOLLUX_TEST_HOSTS"
"""Environment variable that tells processes outside of the namespaces as belonging to them."""
TIMEOUT = 240.0
GATEWAY_NAME = "gateway"
"""What the hosts call the machine, besides its own name."""


def why_not() -> str | None:
    """Say why hosts cannot be made here, None if they can."""
    if os.geteuid() != 0:
        return "hosts in network namespaces take root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no program is named {' or '.join(missing)}"
    # Root of a container often may not.
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True)
    return None if probe.returncode == 0 else f"namespaces: {probe.stderr.decode().strip()}"


class Hosts:
    """Hosts on a bridge of their own; a context manager that ends whatever runs on them.

    Attributes:
        names: of the hosts.
        gateway: address of the machine itself on their network.
        folder: a folder of theirs, which is removed with them.

    Args:
        count: how many; they are called `n1`, `n2`, …

    Example::

        with Hosts(2) as hosts:
            hosts.run("n1", ["ping", "-c1", "n2"]).wait()
    """

    def __init__(self, count: int) -> None:
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self._number, self._lock = _claim()
        self.gateway = f"{_subnet(self._number)}.1"
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._make()
        except BaseException:  # also Ctrl-C: nothing stays behind
            self.close()
            raise

    def address(self, host: str) -> str:
        """Return a host's address."""
        return f"{_subnet(self._number)}.{11 + self.names.index(host)}"

    @property
    def mark(self) -> dict[str, str]:
        """What the environment of a process on the machine itself must have to end with them."""
        return {MARK: str(self._number)}

    def inside(self, host: str, *command: str) -> list[str]:
        """Return the command that runs another one on a host, in the folder it is run in."""
        holder = f"--target={self._holders[host].pid}"
        return ["nsenter", holder, "--net", "--uts", "--mount", "--wd=.", *command]

    def outside(self, *command: str) -> list[str]:
        """Return the command that runs another one on the machine, under the name `gateway`."""
        return ["unshare", "--uts", "--mount", *self._named(GATEWAY_NAME, 'exec "$@"'), *command]

    def run(
        self,
        host: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command on a host; its process id is the command's own, for signals.

        Args:
            host: where.
            command: the program and its arguments.
            env: its whole environment; None: this process's.
            options: what else `subprocess.Popen` takes.
        """
        return subprocess.Popen(self.inside(host, *command), env=env, **options)

    def call(self, host: str, *command: str) -> str:
        """Run a command on a host to its end, and return what it printed."""
        return _call(*self.inside(host, *command))

    def pids(self, host: str) -> set[int]:
        """Return the processes on a host, without the one that keeps it there."""
        return _pids(self._namespace(host)) - {self._holders[host].pid}

    def kill(self, host: str) -> None:
        """End all processes on a host at once, as a kernel's panic does; peers get resets."""
        _kill(lambda: self.pids(host))

    def link_down(self, host: str) -> None:
        """Pull a host's cable: packets are lost, and nobody is told."""
        _call("ip", "link", "set", self._cable(host), "down")

    def link_up(self, host: str) -> None:
        """Plug the cable in again."""
        _call("ip", "link", "set", self._cable(host), "up")

    def slow_link(self, host: str, rate: str, latency: str = "50ms") -> None:
        """Make a host's link slow, in both directions.

        Args:
            host: whose.
            rate: as `tc` takes it, such as `"10mbit"`.
            latency: the longest time that a packet waits for its turn before it is dropped.
        """
        shape = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", latency)
        self.call(host, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        _call("tc", "qdisc", "replace", "dev", self._cable(host), *shape)

    def close(self) -> None:
        """End all processes on the hosts, and remove the hosts."""
        _sweep(self._number)
        for holder in self._holders.values():
            holder.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        bridge = _bridge(self._number)
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "address", "add", f"{self.gateway}/24", "dev", bridge)
        _call("ip", "link", "set", bridge, "up")
        known = [("127.0.0.1", "localhost"), (self.gateway, socket.gethostname())]
        known += [(self.gateway, GATEWAY_NAME)]
        known += [(self.address(host), host) for host in self.names]
        (self.folder / "hosts").write_text("".join(f"{a}\t{name}\n" for a, name in known))
        for host in self.names:
            self._make_host(host, bridge)

    def _make_host(self, host: str, bridge: str) -> None:
        space, cable = self._namespace(host), self._cable(host)
        _call("ip", "netns", "add", space)
        _call("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _call("ip", "link", "set", cable, "master", bridge, "up")
        _call("ip", "-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _call("ip", "-n", space, "link", "set", "lo", "up")
        _call("ip", "-n", space, "link", "set", "eth0", "up")
        _call("ip", "-n", space, "route", "add", "default", "via", self.gateway)
        # Not `ip netns exec`, which hides /sys/fs/cgroup, without which slurmd does not start.
        enter = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--uts", "--mount"]
        self._holders[host] = holder = subprocess.Popen(
            [*enter, *self._named(host, "echo && exec sleep inf")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        with holder.stdout as ready:
            assert ready.readline() == b"\n", f"the host {host} could not be made"

    def _named(self, name: str, script: str) -> list[str]:
        """Return the command that goes on with a script under a name, and knows those of all."""
        setup = f"hostname {name} && mount --bind {self.folder / 'hosts'} /etc/hosts"
        if Path("/etc/resolv.conf").exists():  # nobody answers there, so nobody is asked
            setup += " && mount --bind /dev/null /etc/resolv.conf"
        return ["sh", "-c", f"{setup} && {script}", "sh"]

    def _namespace(self, host: str) -> str:
        return f"{_bridge(self._number)}-{host}"

    def _cable(self, host: str) -> str:
        return f"{_bridge(self._number)}-{host}"


def _subnet(number: int) -> str:
    """Return the first three bytes of a subnet's addresses."""
    return f"10.{177 + number // 256}.{number % 256}"


def _bridge(number: int) -> str:
    return f"pplx{number}"


def _claim() -> tuple[int, IO[bytes]]:
    """Return the number of a subnet that nobody else has, and the lock that keeps it."""
    LOCKS.mkdir(parents=True, exist_ok=True)
    mine = None
    for number in range(SUBNETS):
        path = LOCKS / str(number)
        if mine is not None and not path.exists():
            break  # numbers are taken in order, so nobody ever had this one
        lock = path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        _sweep(number)  # of one who was killed
        if mine is None and not _call("ip", "route", "show", "root", f"{_subnet(number)}.0/24"):
            mine = number, lock
        else:
            lock.close()
    assert mine is not None, f"all {SUBNETS} subnets are taken"
    return mine


def _sweep(number: int) -> None:
    """End and remove all there is of a subnet."""
    prefix = f"{_bridge(number)}-"
    _kill(lambda: _marked(str(number)))
    for path in sorted(Path("/run/netns").glob(f"{prefix}*")):
        _kill(lambda name=path.name: _pids(name))
        _call("ip", "netns", "delete", path.name)
    links = [link for _, link in socket.if_nameindex()]
    for link in links:
        if link.startswith(prefix) or link == _bridge(number):
            with suppress(subprocess.CalledProcessError):  # it went with its namespace
                _call("ip", "link", "delete", link)


def _marked(number: str) -> set[int]:
    """Return the processes whose environment says that they belong to a subnet's hosts."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            # The environment it was started with, so not this process's.
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == number:
                found.add(process.pid)
    return found


def _pids(space: str) -> set[int]:
    return {int(word) for word in _call("ip", "netns", "pids", space).split()}


def _kill(pids: Any) -> None:
    """End processes until there are none, as some may be starting others.

    All are stopped first, so that none hears of the end of another, as on a host that fails.
    """
    deadline = time.monotonic() + TIMEOUT
    while found := pids():
        _send(found, signal.SIGSTOP)
        _send(found, signal.SIGKILL)
        assert time.monotonic() < deadline, f"processes outlive SIGKILL: {found}"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process has not ended; one may be a zombie until init hears of it."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _call(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise subprocess.CalledProcessError(
            answer.returncode, command, answer.stdout, answer.stderr
        )
    return answer.stdout
