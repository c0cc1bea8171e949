"""Hosts joined by slow links: network namespaces, and a switch that holds frames back.

Each host is a network namespace whose only device is a TAP. The switch is a process that reads the
frames a host sends and hands them to their receiver when they would have arrived: as ``tc netem``
does, which many kernels lack. Needs root on Linux.

    host --- rate ---> switch --- delay, rate ---> host
"""

from __future__ import annotations

import fcntl
import heapq
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
BROADCAST = b"\xff" * 6


class Hosts:
    """Names and addresses of hosts, and how to run a command on one of them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def address(self, index: int) -> str:
        """Return the address of a host."""
        return f"10.213.0.{index + 1}"

    def within(self, index: int, command: list[str]) -> list[str]:
        """Return the command that runs ``command`` on a host."""
        return ["ip", "netns", "exec", self.names[index], *command]


@contextmanager
def hosts(count: int, rate: float, delay: float) -> Iterator[Hosts]:
    """Make hosts whose links have ``rate`` Mbit/s; a frame takes ``delay`` seconds one way."""
    tag = secrets.token_hex(2)
    names = [f"ph{tag}-{index}" for index in range(count)]
    made = Hosts(names)
    # The switch handles some 50 000 frames per second: fast links need large ones.
    size = 1500 if rate <= 100 else 65521
    taps, switch = [], None
    try:
        for index, name in enumerate(names):
            device = f"pt{tag}{index}"
            taps.append(_open_tap(device))
            _run("ip", "netns", "add", name)
            _run("ip", "link", "set", device, "netns", name, "name", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "mtu", str(size), "txqueuelen", "10000")
            _run("ip", "-n", name, "addr", "add", f"{made.address(index)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", link, "up")
        command = [sys.executable, __file__, str(rate), str(delay), *map(str, taps)]
        switch = subprocess.Popen(command, pass_fds=taps)
        yield made
    finally:
        if switch is not None:
            switch.send_signal(signal.SIGKILL)
            switch.wait()
        for tap in taps:
            os.close(tap)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _open_tap(device: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def forward(rate: float, delay: float, taps: list[int]) -> None:
    """Hand every frame to its receiver when it would arrive over links of ``rate`` Mbit/s."""
    seconds_per_byte = 8e-6 / rate
    sending, receiving = dict.fromkeys(taps, 0.0), dict.fromkeys(taps, 0.0)
    owner: dict[bytes, int] = {}
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        ready, _, _ = select.select(taps, [], [], pause)
        now = time.monotonic()
        for source in ready:
            for frame in _frames(source):
                owner[frame[6:12]] = source
                takes = len(frame) * seconds_per_byte
                sending[source] = max(now, sending[source]) + takes
                known = owner.get(frame[:6])
                for target in [known] if known is not None else taps:
                    if target == source:
                        continue
                    receiving[target] = max(sending[source] + delay, receiving[target] + takes)
                    number += 1
                    heapq.heappush(waiting, (receiving[target], number, target, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            with suppress(OSError):  # the receiver's device is down: the frame is lost
                os.write(target, frame)


def _frames(tap: int) -> Iterator[bytes]:
    """Yield the frames that a host has sent since."""
    for _ in range(64):
        try:
            yield os.read(tap, 1 << 17)
        except BlockingIOError:
            return


if __name__ == "__main__":
    forward(float(sys.argv[1]), float(sys.argv[2]), [int(x) for x in sys.argv[3:]])
