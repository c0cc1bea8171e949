"""Samples per second over slow links: an all-reduce per step, torchft's DiLoCo, push and pull.

Each replica has a host of its own; see ``links.py``. Needs root on Linux.

    pip install --target FOLDER torchft==0.2.0
    python benchmarks/push-pull/speed.py --torchft FOLDER [--rates 1000 50] [--seconds 90]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from links import Hosts, hosts

ROOT = Path(__file__).parents[2]
DELAY = 0.02
"""Seconds that a frame takes from one host to another; a round trip takes twice as long."""
PORT, BATCH, LAYERS = 7700, 32, 12
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def train(kind: str, options: Mapping[str, Any], slow: float, step: float) -> None:
    """Train a replica until killed, and print when it has exchanged its changes.

    Args:
        kind: Of contestant.
        options: Of ``PushPull``.
        slow: How many times as long as usual a step takes.
        step: Seconds that it takes at least, as on a device.
    """
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [
        nn.Linear(512, 512),
        *(nn.Sequential(nn.ReLU(), nn.Linear(512, 512)) for _ in range(LAYERS - 1)),
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepare: Callable[..., tuple[nn.Module, Iterator[Any]]] = {
        "DDP": ddp,
        "torchft": torchfts,
    }.get(kind, ours)
    wrapped, batches = prepare(model, optimizer, options)
    every = options.get("sync_every", 1) // options.get("fragments", 1)
    for steps, inputs in enumerate(batches, 1):
        started = time.monotonic()
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), inputs).backward()
        took = time.monotonic() - started
        time.sleep(slow * max(took, step) - took)
        optimizer.step()
        if steps % every == 0 and steps >= options.get("sync_every", 1):
            print("STEPS", time.monotonic(), steps, flush=True)


def ours(model: Any, optimizer: Any, options: Mapping[str, Any]) -> tuple[Any, Iterator[Any]]:
    """Wrap the model in HybridParallel."""
    import torch
    from torch.utils.data import TensorDataset

    import pipollux

    pipollux.init_process_group("gloo")
    chosen = None
    if options:
        outer = pipollux.OuterSGD(**OUTER)
        chosen = pipollux.PushPull(outer_optimizer=outer, **options)
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=chosen)
    data = TensorDataset(torch.randn(1 << 18, 512))
    batch = BATCH if chosen is not None else BATCH * pipollux.num_replicas()
    loader = pipollux.AdaptiveDataLoader(data, batch_size=batch, shuffle=False)

    def batches() -> Iterator[Any]:
        for _ in pipollux.remaining_epochs_until(1):
            for (inputs,) in loader:
                yield inputs

    return wrapped, batches()


def ddp(model: Any, *_: Any) -> tuple[Any, Iterator[Any]]:
    """Wrap the model in DistributedDataParallel."""
    import torch

    torch.distributed.init_process_group("gloo")
    return torch.nn.parallel.DistributedDataParallel(model), _random_batches()


def torchfts(model: Any, optimizer: Any, options: Mapping[str, Any]) -> tuple[Any, Iterator[Any]]:
    """Have torchft's DiLoCo watch the optimizer."""
    import torch
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    address = os.environ["PIPOLLUX_ADDRESS"]
    store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        min_replica_size=int(os.environ["WORLD_SIZE"]),
        use_async_quorum=False,
        load_state_dict=lambda _state: None,
        state_dict=dict,
        replica_id=os.environ["RANK"],
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        hostname=address,
        init_sync=False,  # all have the same parameters
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=120),
    )
    number = options.get("fragments", 1)
    size = LAYERS // number
    parts = [model[at : at + size] for at in range(0, LAYERS, size)]
    diloco = DiLoCo(
        manager,
        parts,
        optimizer,
        [torch.optim.SGD(part.parameters(), **OUTER) for part in parts],
        sync_every=options["sync_every"],
        fragment_sync_delay=options.get("overlap", 0),
    )
    diloco.__enter__()
    model.torchft = manager, store  # for as long as the model trains
    return model, _random_batches()


def _random_batches() -> Iterator[Any]:
    import torch

    data = torch.randn(1 << 16, 512)
    while True:
        yield from data.split(BATCH)


def lighthouse(address: str) -> None:
    """Run torchft's lighthouse until killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(address, min_replicas=int(os.environ["WORLD_SIZE"]))
    print(server.address(), flush=True)
    time.sleep(1e6)


def measure(
    rate: float, kind: str, options: Mapping[str, Any], given: argparse.Namespace, slow: list[float]
) -> list[float]:
    """Return the samples per second of each replica."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIPOLLUX_TOKEN": secrets.token_hex(8)}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    environment |= {"MASTER_ADDR": "10.213.0.1", "MASTER_PORT": "29400"}
    environment |= {"PIPOLLUX_HINTS_INTERVAL": "100000", "PIPOLLUX_PROGRESS": "0"}
    environment |= {"WORLD_SIZE": str(len(slow)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"PYTHONPATH": given.torchft or "", "RUST_LOG": "error"}
    with hosts(len(slow) + 1, rate, DELAY) as made, tempfile.TemporaryDirectory() as folder:
        served = []
        address = made.address(len(slow))
        if kind == "torchft":
            environment["LIGHTHOUSE"] = f"http://{address}:{PORT}"
            command = [sys.executable, __file__, "--lighthouse", f"{address}:{PORT}"]
            served.append(_start(made, len(slow), command, environment, Path(folder), "light"))
        elif options:
            on = range(len(slow)) if given.servers == "beside" else [len(slow)]
            environment["PIPOLLUX_SERVERS"] = ",".join(f"{made.address(x)}:{PORT}" for x in on)
            for index, host in enumerate(on):
                command = [sys.executable, "-m", "pipollux.server", "--host", made.address(host)]
                command += ["--index", str(index)]
                served.append(_start(made, host, command, environment, Path(folder), "server"))
        replicas = []
        try:
            for rank in range(len(slow)):
                place = {"RANK": str(rank), "PIPOLLUX_ADDRESS": made.address(rank)}
                command = [sys.executable, __file__, "--replica", str(slow[rank]), "--kind", kind]
                command += ["--options", json.dumps(options), "--step", str(given.step)]
                started = _start(made, rank, command, environment | place, Path(folder), "replica")
                replicas.append(started)
            outputs = [Path(folder) / f"replica-{rank}" for rank in range(len(slow))]
            deadline = time.monotonic() + 300
            while not all(_exchanges(output) for output in outputs):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{kind}: a replica has not exchanged in 300 s")
                time.sleep(0.1)
            time.sleep(given.seconds)
            found = [_exchanges(output) for output in outputs]
            began = max(exchanges[0][0] for exchanges in found)  # all know each other's speed
            return [_rate([x for x in exchanges if x[0] >= began]) for exchanges in found]
        finally:
            for process in [*replicas, *served]:
                process.kill()
                process.wait()


def _exchanges(output: Path) -> list[tuple[float, int]]:
    """Return when a replica had taken how many steps."""
    lines = [x.split() for x in output.read_text().splitlines() if x.startswith("STEPS ")]
    return [(float(x[1]), int(x[2])) for x in lines]


def _rate(exchanges: list[tuple[float, int]]) -> float:
    """Return samples per second from one exchange to another, so that none is counted in part."""
    (start, before), (end, after) = exchanges[0], exchanges[-1]
    return BATCH * (after - before) / (end - start)


def _start(
    made: Hosts,
    host: int,
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    name: str,
) -> subprocess.Popen[bytes]:
    with (folder / f"{name}-{host}").open("w") as output:
        return subprocess.Popen(made.within(host, command), env=environment, stdout=output)


EVERY: dict[str, Any] = {"sync_every": 100}
STREAMED: dict[str, Any] = {**EVERY, "fragments": 4, "overlap": 24}
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-reduce per step": ("all-reduce", {}),
    "DDP": ("DDP", {}),
    "torchft, H = 100": ("torchft", EVERY),
    "push and pull, H = 100": ("push-pull", EVERY),
    "torchft, H = 100, P = 4, τ = 24": ("torchft", STREAMED),
    "push and pull, H = 100, P = 4, τ = 24": ("push-pull", STREAMED),
    "the same, int8": ("push-pull", {**STREAMED, "compression": "int8"}),
}


def compare(rate: float, number: int, given: argparse.Namespace) -> None:
    """Print what two equal replicas do."""
    for name, (kind, options) in CONTESTANTS.items():
        if kind not in given.kinds or (kind == "torchft" and not given.torchft):
            continue
        found = measure(rate, kind, options, given, [1.0, 1.0])
        shown = ", ".join(f"{x:.1f}" for x in found)
        print(f"| {rate:g} Mbit/s | {number} | {name} | {sum(found):.1f} | {shown} |", flush=True)


def compare_straggler(rate: float, number: int, given: argparse.Namespace) -> None:
    """Print what a replica and one three times slower do alone, and together."""
    slow = [1.0, 3.0]
    alone = [measure(rate, "push-pull", STREAMED, given, [x])[0] for x in slow]
    contestants: dict[str, tuple[str, dict[str, Any]]] = {
        "all-reduce per step": ("all-reduce", {}),
        **({"torchft": ("torchft", STREAMED)} if given.torchft else {}),
        "H = 100, P = 4, τ = 24, s = 0": ("push-pull", STREAMED),
        "the same, s = 2": ("push-pull", {**STREAMED, "max_staleness": 2}),
    }
    for name, (kind, options) in contestants.items():
        found = measure(rate, kind, options, given, slow)
        ratio = sum(found) / sum(alone)
        shown = ", ".join(f"{x:.1f}" for x in (*alone, *found))
        print(f"| {rate:g} Mbit/s | {number} | {name} | {ratio:.3f} | {shown} |", flush=True)


def main() -> None:
    """Measure all contestants in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchft", help="folder with torchft; left out: without it")
    parser.add_argument("--rates", type=float, nargs="+", default=[1000.0, 50.0])
    parser.add_argument("--seconds", type=float, default=90.0)
    kinds = sorted({kind for kind, _ in CONTESTANTS.values()})
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--servers",
        choices=["beside", "one"],
        default="beside",
        help="one beside each replica, or one on a host of its own",
    )
    parser.add_argument("--straggler", action="store_true", help="one of two is three times slower")
    parser.add_argument(
        "--step", type=float, default=0.0, help="seconds that a step takes at least, as on a device"
    )
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--lighthouse", help=argparse.SUPPRESS)
    parser.add_argument("--replica", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--options", default="{}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lighthouse:
        lighthouse(given.lighthouse)
    if given.replica is not None:
        train(given.kind, json.loads(given.options), given.replica, given.step)
    for number in range(given.rounds):
        for rate in given.rates:
            (compare_straggler if given.straggler else compare)(rate, number, given)


if __name__ == "__main__":
    main()
