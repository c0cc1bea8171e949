"""The benchmark's job as users of torchft write it: it records when its steps end.

It follows torchft's own example, `train_ddp.py`, except for the model and the batches, which are
those of `job.py`. On SIGTERM it ends after its step and shuts torchft's manager down. Its
interpreter has torchft, and not Pipollux.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

BATCH = 12


def main() -> None:
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    width, layers = 1024, int(os.environ["LAYERS"])
    through_ddp = os.environ["TORCHFT_GRADIENTS"] == "ddp"
    module: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    plain = torch.optim.AdamW(module.parameters())

    def state_dict() -> dict[str, object]:
        return {"model": module.state_dict(), "optim": plain.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        module.load_state_dict(state["model"])
        plain.load_state_dict(state["optim"])

    # torchrun would start this for each replica.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group_timeout, timeout = (
        timedelta(seconds=int(seconds)) for seconds in os.environ["TORCHFT_TIMEOUTS"].split()
    )
    group = ProcessGroupGloo(timeout=group_timeout)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{os.environ['NUMBER']}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timeout,
    )
    model = DistributedDataParallel(manager, module) if through_ddp else module
    optimizer = Optimizer(manager, plain)
    samples = torch.randn(1, width).expand(BATCH, width)
    log = Path(os.environ["TIMES"], str(os.getpid())).open("a")  # noqa: SIM115  # to the end

    def write_down(*_: object) -> None:
        """Write a completed step; torchft's discarded steps are not passed here."""
        rank = manager.participating_rank()
        rank = -1 if rank is None else rank  # its state arrived in this step
        row = (manager.current_step(), rank, manager.num_participants(), group.size())
        print(time.time(), *row, file=log, flush=True)

    plain.register_step_post_hook(write_down)
    while not stopped:
        rows = BATCH // max(manager.num_participants(), 1)  # of the last step, without waiting
        optimizer.zero_grad()
        model(samples[:rows]).square().mean().backward()
        if not through_ddp:
            reduce_gradients(manager, module)
        optimizer.step()
    manager.shutdown(wait=False)


def reduce_gradients(manager: Manager, module: nn.Module) -> None:
    gradients: list[Tensor] = [p.grad for p in module.parameters() if p.grad is not None]
    for work in [manager.allreduce(gradient) for gradient in gradients]:
        work.wait()


if __name__ == "__main__":
    main()
