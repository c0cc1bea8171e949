"""Held-out loss of small character models at equal tokens: synchronous, torchft's DiLoCo, ours.

``--model char-lm`` is a transformer of two blocks of width 64; ``--model gpt2`` is Hugging Face's
GPT-2 with four blocks of width 128, which ``HybridParallel`` converts.

All contestants of a row have the same initial parameters, the same samples for each replica and
step, the same inner optimizer and the same outer one. torchft 0.2.0 is read from ``--torchft``:

    pip install --target FOLDER torchft==0.2.0
    python benchmarks/push-pull/loss.py --torchft FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

ROOT = Path(__file__).parents[2]
LENGTH, WIDTH, BATCH, RATE = 64, 64, 8, 1e-3
OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def make_model(name: str, seed: int) -> nn.Module:
    """Return a transformer over characters."""
    from examples.char_lm import VOCABULARY, Block, Embedding

    torch.manual_seed(seed)
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": VOCABULARY}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **still, **ends, n_positions=LENGTH))
    blocks = [Block(WIDTH, heads=4) for _ in range(2)]
    return nn.Sequential(
        Embedding(LENGTH, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
    )


def make_data(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Return windows of the standard library for training, and 512 held out."""
    from examples.char_lm import Windows, standard_library

    windows = Windows(standard_library(8_000_000), LENGTH)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(windows), generator=generator)[: samples + 512].tolist()
    pairs = [windows[index] for index in chosen]
    inputs, targets = (torch.stack(x) for x in zip(*pairs, strict=True))
    data = TensorDataset(inputs, targets)
    return (
        TensorDataset(*data[:samples]),
        TensorDataset(*data[samples:]),
    )


def loss_of(output: Any, targets: Tensor) -> Tensor:
    """Return the mean loss of a character."""
    logits: Tensor = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def evaluate(model: nn.Module, held_out: TensorDataset) -> float:
    """Return the loss on held-out windows."""
    with torch.no_grad():
        return float(loss_of(model(held_out.tensors[0]), held_out.tensors[1]))


def positions(replica: int, replicas: int, every: int, rounds: int) -> Iterator[list[int]]:
    """Yield a replica's samples of each step, as the servers' ledger leases them."""
    for number in range(rounds):
        start = (number * replicas + replica) * every * BATCH
        for step in range(every):
            yield list(range(start + step * BATCH, start + (step + 1) * BATCH))


def synchronous(name: str, seed: int, replicas: int, steps: int) -> float:
    """Train one replica on the batches of all."""
    train, held_out = make_data(steps * replicas * BATCH)
    model = make_model(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    parts = [positions(r, replicas, 1, steps) for r in range(replicas)]
    for together in zip(*parts, strict=True):
        inputs, targets = train[[index for part in together for index in part]]
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    return evaluate(model, held_out)


def ours(name: str, seed: int, replicas: int, steps: int, every: int) -> float:
    """Train a replica by push and pull."""
    import pipollux

    pipollux.init_process_group("gloo")
    train, held_out = make_data(steps * replicas * BATCH)
    model = make_model(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    outer = pipollux.OuterSGD(**OUTER)
    wrapped = pipollux.HybridParallel(
        model,
        optimizer,
        example_inputs=train.tensors[0][:2] if name == "gpt2" else None,
        synchronization=pipollux.PushPull(
            sync_every=every, outer_optimizer=outer, adapt_to_speed=False
        ),
    )
    loader = pipollux.AdaptiveDataLoader(Subset(train, range(len(train))), batch_size=BATCH)
    for _ in pipollux.remaining_epochs_until(1):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(wrapped(inputs), targets).backward()
            optimizer.step()
    return evaluate(model, held_out)


def torchfts(name: str, seed: int, replica: int, replicas: int, steps: int, every: int) -> float:
    """Train a replica with torchft's DiLoCo."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    train, held_out = make_data(steps * replicas * BATCH)
    model = make_model(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=replicas,
        use_async_quorum=False,
        load_state_dict=lambda _state: None,
        state_dict=dict,
        replica_id=str(replica),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        hostname="127.0.0.1",
        init_sync=False,  # all have the same parameters
    )
    with DiLoCo(manager, [model], optimizer, outer, sync_every=every):
        for chosen in positions(replica, replicas, every, steps // every):
            inputs, targets = train[chosen]
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
    loss = evaluate(model, held_out)
    print(f"LOSS {loss}", flush=True)
    manager.shutdown(wait=False)
    os._exit(0)


def run(kind: str, given: argparse.Namespace, seed: int, every: int) -> float:
    """Run the replicas of a contestant, and return the loss of their shared parameters."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIPOLLUX_PROGRESS": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), given.torchft or ""])}
    environment["PIPOLLUX_HINTS_INTERVAL"] = "1000000"
    processes, lighthouse, server = [], None, None
    with tempfile.TemporaryDirectory() as folder:
        if kind == "ours":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            environment["PIPOLLUX_SERVERS"] = f"127.0.0.1:{port}"
            environment["PIPOLLUX_TOKEN"] = secrets.token_hex(8)
            command = [sys.executable, "-m", "pipollux.server"]
            server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        elif kind == "torchft":
            sys.path.insert(0, given.torchft)
            from torchft.coordination import LighthouseServer

            lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=given.replicas)
            environment["LIGHTHOUSE"] = lighthouse.address()
        try:
            for replica in range(given.replicas if kind != "synchronous" else 1):
                place = {"PIPOLLUX_REPLICA": str(replica), "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
                place |= {"WORLD_SIZE": str(given.replicas if kind == "ours" else 1)}
                work = [kind, given.model, seed, replica, given.replicas, given.steps, every]
                command = [sys.executable, __file__, "--work", json.dumps(work)]
                command += ["--momentum", str(given.momentum)]
                output = (Path(folder) / str(replica)).open("w+")
                started = subprocess.Popen(command, env=environment | place, stdout=output)
                processes.append((started, output))
            losses = []
            for process, output in processes:
                process.wait(1800)
                output.seek(0)
                losses += [float(x.split()[1]) for x in output if x.startswith("LOSS ")]
                output.close()
            return statistics.fmean(losses)
        finally:
            for process in [x for x, _ in processes] + ([server] if server else []):
                process.kill()
                process.wait()
            if lighthouse is not None:
                lighthouse.shutdown()


def work(
    kind: str, name: str, seed: int, replica: int, replicas: int, steps: int, every: int
) -> None:
    """Train one replica, and print the loss."""
    torch.set_num_threads(1)
    if kind == "synchronous":
        loss = synchronous(name, seed, replicas, steps)
    elif kind == "ours":
        loss = ours(name, seed, replicas, steps, every)
    else:
        loss = torchfts(name, seed, replica, replicas, steps, every)
    print(f"LOSS {loss}", flush=True)


def main() -> None:
    """Print the losses, and their means relative to the synchronous training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchft", help="folder with torchft; left out: without it")
    parser.add_argument("--model", choices=["char-lm", "gpt2"], default="char-lm")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000, help="of each replica")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--every", type=int, nargs="+", default=[25, 50, 100])
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    OUTER.update(momentum=given.momentum, nesterov=given.momentum > 0)
    if given.work is not None:
        arguments: Any = json.loads(given.work)
        work(*arguments)
        return
    base = [run("synchronous", given, seed, 1) for seed in range(given.seeds)]
    print("| synchronous |", " | ".join(f"{x:.4f}" for x in base), "|", flush=True)
    for every in given.every:
        for kind in ["ours", *(["torchft"] if given.torchft else [])]:
            found = [run(kind, given, seed, every) for seed in range(given.seeds)]
            more = statistics.fmean(x / y - 1.0 for x, y in zip(found, base, strict=True))
            shown = " | ".join(f"{x:.4f}" for x in found)
            print(f"| H = {every}, {kind} | {shown} | {more:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
