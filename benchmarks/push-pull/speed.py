"""Samples per second over slow links: an all-reduce per step, and push and pull every H steps.

Each replica and the server have a network namespace of their own, joined by a bridge; ``tc`` gives
every link a rate, and a delay where the kernel has netem. Needs root on Linux.

    python benchmarks/push-pull/speed.py [--rates 1000 50] [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

DELAY = 10
"""Milliseconds that each link adds, so that a round trip between two hosts takes 40."""
PORT = 7700


def train(options: str, seconds: float, slow: float) -> None:
    """Train a replica for some seconds after its first step, and print its samples per second."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import pipollux

    torch.set_num_threads(1)
    pipollux.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [
        nn.Linear(512, 512),
        *(nn.Sequential(nn.ReLU(), nn.Linear(512, 512)) for _ in range(11)),
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    chosen = pipollux.PushPull(**json.loads(options)) if options else None
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=chosen)
    data = TensorDataset(torch.randn(1 << 16, 512))
    batch = 32 if chosen is not None else 32 * pipollux.num_replicas()
    loader = pipollux.AdaptiveDataLoader(data, batch_size=batch, shuffle=False)
    began, count = 0.0, 0
    for _ in pipollux.remaining_epochs_until(1):
        for (inputs,) in loader:
            optimizer.zero_grad()
            started = time.monotonic()
            nn.functional.mse_loss(wrapped(inputs), inputs).backward()
            optimizer.step()
            if slow > 1.0:
                time.sleep((slow - 1.0) * (time.monotonic() - started))
            count += len(inputs)
            if not began:
                began, count = time.monotonic(), 0
            elif time.monotonic() - began >= seconds:
                break
        break
    print(f"RATE {count / (time.monotonic() - began)}", flush=True)
    os._exit(0)


@contextmanager
def hosts(count: int, rate: float) -> Iterator[list[str]]:
    """Join namespaces by a bridge, with links of ``rate`` Mbit/s; yield their names."""
    tag = secrets.token_hex(2)
    bridge, names = f"pb{tag}", [f"ph{tag}-{index}" for index in range(count)]
    _run("ip", "link", "add", bridge, "type", "bridge")
    try:
        _run("ip", "link", "set", bridge, "up")
        for index, name in enumerate(names):
            outside = f"pv{tag}{index}"
            _run("ip", "netns", "add", name)
            _run(
                "ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name
            )
            _run("ip", "link", "set", outside, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"10.213.0.{index + 1}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", link, "up")
            # Both directions: what a host sends, and what it receives.
            for within in (("ip", "netns", "exec", name), ()):
                device = "eth0" if within else outside
                command = (*within, "tc", "qdisc", "add", "dev", device, "root")
                netem = ("netem", "delay", f"{DELAY}ms", "rate", f"{rate:g}mbit", "limit", "100000")
                tried = subprocess.run([*command, *netem], check=False, capture_output=True)
                if tried.returncode != 0:
                    print(f"no delay: {tried.stderr.decode().strip()}", file=sys.stderr)
                    _run(*command, "tbf", "rate", f"{rate:g}mbit", "burst", "64kb", "latency", "1s")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        _run("ip", "link", "delete", bridge)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def measure(
    rate: float, options: Mapping[str, object] | None, seconds: float, slow: list[float]
) -> list[float]:
    """Return the samples per second of each replica."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIPOLLUX_TOKEN": secrets.token_hex(8)}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_PORT": "29400"}
    environment |= {"PIPOLLUX_HINTS_INTERVAL": "100000", "PIPOLLUX_PROGRESS": "0"}
    with hosts(len(slow) + 1, rate) as names, tempfile.TemporaryDirectory() as folder:
        server = None
        if options is not None:
            address = f"10.213.0.{len(slow) + 1}"
            environment["PIPOLLUX_SERVERS"] = f"{address}:{PORT}"
            command = [sys.executable, "-m", "pipollux.server", "--host", address]
            server = subprocess.Popen(_within(names[-1], command), env=environment)
        try:
            replicas = []
            for rank, name in enumerate(names[:-1]):
                place = {"RANK": str(rank), "WORLD_SIZE": str(len(slow)), "LOCAL_WORLD_SIZE": "1"}
                place |= {"LOCAL_RANK": "0", "MASTER_ADDR": "10.213.0.1"}
                place["PIPOLLUX_ADDRESS"] = f"10.213.0.{rank + 1}"
                command = [sys.executable, __file__, "--replica", str(slow[rank])]
                command += ["--seconds", str(seconds), "--options", json.dumps(options or "")]
                output = (Path(folder) / str(rank)).open("w+")
                replicas.append(
                    (
                        subprocess.Popen(
                            _within(name, command), env=environment | place, stdout=output
                        ),
                        output,
                    )
                )
            rates = []
            for process, output in replicas:
                process.wait(seconds * 10 + 300)
                output.seek(0)
                rates += [float(x.split()[1]) for x in output if x.startswith("RATE ")]
                output.close()
            return rates
        finally:
            for process in [x for x, _ in replicas] + ([server] if server else []):
                process.send_signal(signal.SIGKILL)
                process.wait()


def _within(name: str, command: list[str]) -> list[str]:
    return ["ip", "netns", "exec", name, *command]


def compare_straggler(rate: float, number: int, seconds: float) -> None:
    """Print what a replica and one three times slower do alone, and together."""
    every = {"sync_every": 100, "fragments": 4, "overlap": 24}
    alone = [measure(rate, every, seconds, [slow])[0] for slow in (1.0, 3.0)]
    contestants: dict[str, dict[str, object] | None] = {
        "all-reduce per step": None,
        "H = 100, P = 4, τ = 24, s = 0": every,
        "the same, s = 2": {**every, "max_staleness": 2},
    }
    for name, options in contestants.items():
        found = measure(rate, options, seconds, [1.0, 3.0])
        ratio = sum(found) / sum(alone)
        shown = ", ".join(f"{x:.1f}" for x in (*alone, *found))
        print(f"| {rate:g} Mbit/s | {number} | {name} | {ratio:.3f} | {shown} |", flush=True)


def main() -> None:
    """Measure all contestants in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1000.0, 50.0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--straggler", action="store_true", help="one of two is three times slower")
    parser.add_argument("--replica", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--options", default='""', help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replica is not None:
        options = json.loads(given.options)
        train(json.dumps(options) if options else "", given.seconds, given.replica)
    every = {"sync_every": 100, "fragments": 4, "overlap": 24}
    contestants: dict[str, dict[str, object] | None] = {
        "all-reduce per step": None,
        "push and pull, H = 100": {"sync_every": 100},
        "H = 100, P = 4, τ = 24": dict(every),
        "H = 100, P = 4, τ = 24, int8": {**every, "compression": "int8"},
    }
    if given.straggler:
        for rate in given.rates:
            for number in range(given.rounds):
                compare_straggler(rate, number, given.seconds)
        return
    slow = [1.0, 1.0]
    for rate in given.rates:
        for number in range(given.rounds):
            for name, options in contestants.items():
                found = measure(rate, options, given.seconds, slow)
                shown = ", ".join(f"{x:.1f}" for x in found)
                print(
                    f"| {rate:g} Mbit/s | {number} | {name} | {sum(found):.1f} | {shown} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
