"""A training script that goes on until it is told to stop, and notes what it holds at every step.

To `$RESULTS/PID.txt` goes a line of JSON for every step of a replica: threads, descriptors, ports
that it listens at, kilobytes of memory, and keys in the store of its membership.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.resize.elastic_membership import elastic_membership
from tests.hybrid.resize.nccl_stand_in import backend

RESULTS = Path(os.environ["RESULTS"])
WIDTH = 64
ENDING = ("pipollux-release", "pipollux-abort")
"""Threads that end the groups of those that have gone: their collectives may take a while."""


def holdings(process: psutil.Process) -> dict[str, int]:
    """What this process holds."""
    membership = elastic_membership(context())
    assert membership is not None
    store = membership._watch.store
    try:
        keys = store.num_keys() if store is not None else 0
    except dist.DistNetworkError:
        return {}  # another replica was lost since the last exchange
    ports = [x for x in process.net_connections("tcp") if x.status == psutil.CONN_LISTEN]
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "ports": len(ports),
        "memory": process.memory_info().rss // 1024,
        "keys": keys,
        "objects": len(gc.get_objects()),
        "ending": sum(thread.name in ENDING for thread in threading.enumerate()),
    }


def main() -> None:
    processes = int(os.environ.get("PROCESSES", "1"))
    pipollux.init_process_group(backend(), timeout=60.0, processes_per_replica=processes)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(module.parameters())
    loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.randn(4096, WIDTH)), batch_size=24)
    model = pipollux.HybridParallel(module, optimizer, num_stages=2, check_replicas=True)
    average = pipollux.register_for_checkpointing(
        "average", torch.optim.swa_utils.AveragedModel(module)
    )
    accum = pipollux.Accumulator()
    gc.freeze()  # what is there by now, half a million objects, is not looked through each time
    process = psutil.Process()
    log = (RESULTS / f"{os.getpid()}.txt").open("a")
    for _ in pipollux.remaining_epochs_until(1_000_000):
        for (inputs,) in loader:
            optimizer.zero_grad()
            model.train_step(inputs, inputs, nn.functional.mse_loss)
            optimizer.step()
            average.update_parameters(module)
            if "SUMS" in os.environ:
                accum["samples"] += len(inputs)
            line = {"step": context().step, "replicas": pipollux.num_replicas()}
            # In a void step connections are ended, also with where the replicas met.
            if (context().step or 0) % 5 == 0 and not context().control.losses.void:
                gc.collect()
                line |= holdings(process)
            print(json.dumps(line), file=log, flush=True)


if __name__ == "__main__":
    main()
