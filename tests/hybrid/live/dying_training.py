"""A training script whose replicas die, for tests of whole runs.

``$DIES`` says who dies where: ``RANK:STEP:POINT``, several with commas; at step -1: at any. To
``$RESULTS/PID.txt`` goes a line of JSON before and after every pass of the loop's body.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.live.live_membership import live_membership
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.elastic.training import hold
from tests.hybrid.live.changing_training import EPOCHS, SIZE, digest, make_loader, meet_at

RESULTS = Path(os.environ.get("RESULTS", "."))


class Counter(pipollux.State):
    """Passes of the loop's body that count."""

    def __init__(self, deaths: Deaths) -> None:
        super().__init__("counter.json")
        self._deaths = deaths
        self.count = 0

    def sync(self) -> None:
        self._deaths.at("syncing")

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(json.dumps(self.count).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.count = json.load(fileobj)


class Deaths:
    """Where this replica dies."""

    def __init__(self) -> None:
        self.rank = pipollux.replica_rank() if context().joins is None else -1
        told = [x.split(":") for x in os.environ.get("DIES", "").split(",") if x]
        self._mine = {(int(step), point) for rank, step, point in told if int(rank) == self.rank}
        self.metrics = context().component(Metrics)

    def at(self, point: str) -> None:
        if {(self.metrics.step, point), (-1, point)} & self._mine:
            die()

    def hook(self, point: str) -> Callable[[Any], None]:
        return lambda *_: self.at(point)

    def expected(self, point: str) -> bool:
        return any(where == point for _, where in self._mine)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def die_while_forming() -> None:
    """Die when those that are left form their groups."""
    live = live_membership(context())
    assert live is not None
    folder = Path(os.environ["PIPOLLUX_RENDEZVOUS"])
    while not list(folder.glob("follows-*")):
        time.sleep(0.0005)
    die()


def fail_once(deaths: Deaths, step: int) -> None:
    """Have the sums of a step come through to others and not to this replica."""
    control, original = context().control, context().control.ride

    def ride(numbers: Any) -> Any:
        sums = original(numbers)
        if deaths.metrics.step == step:
            control.ride = original  # type: ignore[method-assign]  # as below
            raise RuntimeError("Connection closed by peer")
        return sums

    control.ride = ride  # type: ignore[method-assign]  # of a process of this test's own


def main() -> None:
    pipollux.init_process_group("gloo", timeout=60.0)
    kind = os.environ.get("DATA", "indices")
    changes, alone = (
        {int(step) for step in os.environ.get(name, "").split(",") if step}
        for name in ("CHANGES", "CHANGES_IF_ALONE")
    )
    options = os.environ.get("OPTIONS", "").split(",")
    torch.manual_seed(1)
    deaths = Deaths()
    module = nn.Sequential(
        nn.Embedding(SIZE, 8), nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 3)
    ).double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = make_loader(kind)
    checked = pipollux.AdaptiveDataLoader(TensorDataset(torch.arange(SIZE)), 16)
    num_stages = int(os.environ.get("STAGES", "2"))
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=num_stages,
        lr_scheduler=schedule,
        check_replicas=True,
        shard_optimizer="sharded" in options,
    )
    # Where it is not enabled it hands everything on.
    scaler = pipollux.GradScaler("cpu", 1024.0, growth_interval=3, enabled="scaler" in options)
    pipollux.register_for_checkpointing("scaler", scaler)
    average = pipollux.register_for_checkpointing("ema", AveragedModel(module))
    counter = Counter(deaths)
    pipollux.load_state(counter)
    accum = pipollux.Accumulator()
    next(iter(module.parameters())).register_hook(deaths.hook("backward"))
    optimizer.register_step_pre_hook(lambda *_: deaths.at("step"))
    if deaths.expected("forming"):
        threading.Thread(target=die_while_forming, daemon=True).start()
    if f"behind-{deaths.rank}" in options:
        fail_once(deaths, int(os.environ["BEHIND_AT"]))
    log = (RESULTS / f"{os.getpid()}.txt").open("a")

    def write(**content: Any) -> None:
        place = {"rank": pipollux.replica_rank(), "replicas": pipollux.num_replicas()}
        print(json.dumps({**place, **content}), file=log, flush=True)

    for epoch in pipollux.remaining_epochs_until(EPOCHS):
        model.train()
        for batch in loader:
            hold(deaths.metrics.step)
            meet_at(deaths.metrics.step, changes)
            if pipollux.num_replicas() == 1:
                meet_at(deaths.metrics.step, alone)
            numbers, begins = batch[-1], deaths.metrics.step
            micro_step = context().batch.micro_step
            assert micro_step is not None
            counted = numbers[: micro_step.num_samples].flatten()
            write(epoch=epoch, begins=begins, takes=counted.tolist())
            optimizer.zero_grad()
            output = model(numbers)
            deaths.at("forward")
            loss = F.cross_entropy(output.flatten(0, -2), numbers.flatten() % 3)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            deaths.at("between")
            scaler.step(optimizer)
            scaler.update()
            if "accumulates" in options:
                accum["count"] += len(counted)
            if "clamps" in options:
                with torch.no_grad():
                    module[4].weight.clamp_(-10.0, 10.0)
            schedule.step()
            counter.count += 1
            if micro_step.is_optimizer_step:
                average.update_parameters(module)
            write(
                epoch=epoch,
                begins=begins,
                step=deaths.metrics.step,
                ends=micro_step.is_optimizer_step,
                parameters=digest(list(module.parameters())),
                average=digest(list(average.parameters())),
                random=digest([torch.get_rng_state()]),
                rate=optimizer.param_groups[0]["lr"],
                count=counter.count,
                scale=scaler.get_scale(),
            )
            deaths.at("after")
        deaths.at("outside")
        model.eval()
        for (numbers,) in checked:
            deaths.at("evaluation")
            with torch.no_grad():
                model(numbers)
            micro_step = context().batch.micro_step
            assert micro_step is not None
            if "checks" in options:
                accum["checked"] += micro_step.num_samples
        with accum.synchronized():
            if "checks" in options:
                assert accum["checked"] == SIZE
            accum.clear()
        deaths.at("over")
    (RESULTS / f"ended-{pipollux.replica_rank()}").touch()


if __name__ == "__main__":
    main()
