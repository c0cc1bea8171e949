"""A training script whose replicas die, for tests of whole runs.

``$DIES`` says who dies where: ``RANK:STEP:POINT``, several with commas; at step -1: at any. With
the option ``fails`` its script raises an error there. Where each stage has a process, RANK is
``REPLICA.STAGE``. To ``$RESULTS/PID.txt`` goes a line of JSON before and after every pass of the
loop's body.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.job import device_groups, peers
from pipollux_hybrid.job.context import context
from pipollux_hybrid.resize.elastic_membership import elastic_membership
from pipollux_hybrid.sync.bucket import Bucket
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.elastic.training import hold
from tests.hybrid.resize.changing_training import (
    EPOCHS,
    SIZE,
    digest,
    loss_of,
    make_loader,
    make_module,
    meet_at,
    parts_of,
)
from tests.hybrid.resize.nccl_stand_in import StandIn, backend

RESULTS = Path(os.environ.get("RESULTS", "."))
PROCESSES = int(os.environ.get("PROCESSES", "1"))


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
        stage = f".{context().env.stage}" if PROCESSES > 1 else ""
        told = [x.split(":") for x in os.environ.get("DIES", "").split(",") if x]
        mine = f"{self.rank}{stage}"
        self._mine = {(int(step), point) for who, step, point in told if who == mine}
        self.metrics = context().component(Metrics)
        self._times: Counts[tuple[str, int]] = Counts()

    def at(self, point: str) -> None:
        if {(self.metrics.step, point), (-1, point)} & self._mine:
            die()

    def hook(self, point: str) -> Callable[[Any], None]:
        return lambda *_: self.at(point)

    def at_call(self, owner: Any, name: str, before: str, after: str = "", number: int = 1) -> None:
        """Die when a function is called for the nth time in a step, or has returned."""
        original = getattr(owner, name)

        def called(*args: Any, **keywords: Any) -> Any:
            self._times[name, self.metrics.step] += 1
            here = self._times[name, self.metrics.step] == number
            if here:
                self.at(before)
            result = original(*args, **keywords)
            if here:
                self.at(after)
            return result

        setattr(owner, name, called)

    def expected(self, point: str) -> bool:
        return any(where == point for _, where in self._mine)


def die() -> NoReturn:
    if "fails" in os.environ.get("OPTIONS", "").split(","):
        raise ValueError("the script fails")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def die_while_forming() -> None:
    """Die when those that are left form their groups."""
    membership = elastic_membership(context())
    assert membership is not None
    folder = Path(os.environ["PIPOLLUX_RENDEZVOUS"])
    while not list(folder.glob("follows-*")):
        time.sleep(0.0005)
    die()


def fail_once(deaths: Deaths, step: int) -> None:
    """Have the sums of a step come through to others and not to this replica."""
    control, original = context().control, context().control.ride

    def ride(*args: Any) -> Any:
        sums = original(*args)
        if deaths.metrics.step == step:
            control.ride = original  # type: ignore[method-assign]  # as below
            raise RuntimeError("Connection closed by peer")
        return sums

    control.ride = ride  # type: ignore[method-assign]  # of a process of this test's own


def abort_late() -> None:
    """Have the thread that notices a death abort groups when the next ones are in use, if any."""
    device_groups.ENDED_GRACE = 0.0
    original = peers.abort_device_groups

    def abort(gone: set[int], **options: bool) -> None:
        before, end = dist.group.WORLD, time.monotonic() + 3.0
        while dist.group.WORLD in (None, before) and time.monotonic() < end:
            time.sleep(0.001)
        original(gone, **options)

    peers.abort_device_groups = abort  # type: ignore[assignment]  # of a process of this test's own


def lag_behind() -> None:
    """Have the device be late in the sums that connect the next groups, until it was asked again
    after another replica is gone from here, if one is.
    """
    original = StandIn.fence

    def fence(self: StandIn, device: torch.device) -> Callable[[], bool]:
        passed, watch, end = original(self, device), context().watch, time.monotonic() + 3.0
        if dist.is_initialized() or watch is None:
            return passed
        known, asked = watch.gone(), 0

        def late() -> bool:
            nonlocal asked
            asked += watch.gone() != known
            return (asked > 1 or time.monotonic() > end) and passed()

        return late

    StandIn.fence = fence  # type: ignore[method-assign]  # of a process of this test's own


def be_slow(layer: torch.nn.Module) -> None:
    """Have the first forward of a layer take longer than NCCL waits for another process where the
    two are not connected yet, as a layer takes that is compiled.
    """

    def wait(*_: object) -> None:
        handle.remove()
        time.sleep(1.5 * float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]))

    handle = layer.register_forward_pre_hook(wait)


def break_device() -> None:
    """Have the device fail for good, as after an access to memory of a process that is gone."""

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nMore.")

    def probe(self: StandIn, device: torch.device) -> None:
        for name in ("probe", "enter", "make"):
            setattr(StandIn, name, fail)
        self.probe(device)

    StandIn.probe = probe  # type: ignore[method-assign]  # of a process of this test's own


def miss_once(deaths: Deaths, step: int) -> None:
    """Have the sums of a step come through to all others, those of this replica, too."""
    group = context().control.group
    assert group is not None
    original = group.all_reduce

    def all_reduce(tensor: Any, timeout: float | None = None) -> None:
        original(tensor, timeout)
        if deaths.metrics.step == step:
            group.all_reduce = original  # type: ignore[method-assign]  # as above
            raise RuntimeError("Connection closed by peer")

    group.all_reduce = all_reduce  # type: ignore[method-assign]  # as above


def main() -> None:
    pipollux.init_process_group(backend(), timeout=60.0, processes_per_replica=PROCESSES)
    kind = os.environ.get("DATA", "indices")
    changes, alone = (
        {int(step) for step in os.environ.get(name, "").split(",") if step}
        for name in ("CHANGES", "CHANGES_IF_ALONE")
    )
    options = os.environ.get("OPTIONS", "").split(",")
    torch.manual_seed(1)
    deaths = Deaths()
    module = make_module(os.environ.get("LAYERS", ""))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = make_loader(kind)
    checked = pipollux.AdaptiveDataLoader(TensorDataset(torch.arange(SIZE)), 16)
    num_stages = int(os.environ.get("STAGES", "2"))
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=num_stages,
        balance=[2, 2, 1] if num_stages == 3 else None,
        schedule=os.environ.get("SCHEDULE") or None,
        lr_scheduler=schedule,
        bucket_bytes=64,
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
    for parameter in list(module.parameters())[:1]:
        parameter.register_hook(deaths.hook("backward"))
    for layer in module:
        layer.register_forward_hook(lambda *_: deaths.at("pipeline"))
    deaths.at_call(Bucket, "launch", "buckets", number=2)
    deaths.at_call(context().control, "ride", "exchange", "exchanged")
    if (mesh := context().mesh) is not None:
        deaths.at_call(mesh, "share", "share")
        deaths.at_call(mesh.calls, "gather", "loading")
    optimizer.register_step_pre_hook(lambda *_: deaths.at("step"))
    if deaths.expected("forming"):
        threading.Thread(target=die_while_forming, daemon=True).start()
    if f"behind-{deaths.rank}" in options:
        fail_once(deaths, int(os.environ["BEHIND_AT"]))
    if f"misses-{deaths.rank}.{context().env.stage}" in options:
        miss_once(deaths, int(os.environ["BEHIND_AT"]))
    if f"lags-{deaths.rank}" in options:
        lag_behind()
    if f"breaks-{deaths.rank}" in options:
        break_device()
    if "aborts-late" in options:
        abort_late()
    if f"slow-{deaths.rank}.{context().env.stage}" in options:
        be_slow(module[-1 if context().env.stage else 0])
    own = dist.new_group([0, 2]) if "waits" in options else None
    if own is not None and deaths.rank in (0, 2):
        dist.all_reduce(torch.zeros(1), group=own)  # connects both, which NCCL's host waits for
    log = (RESULTS / f"{os.getpid()}.txt").open("a")

    def write(**content: Any) -> None:
        place = {"rank": pipollux.replica_rank(), "replicas": pipollux.num_replicas()}
        place["stage"] = context().env.stage
        print(json.dumps({**place, **content}), file=log, flush=True)

    for epoch in pipollux.remaining_epochs_until(int(os.environ.get("EPOCHS", EPOCHS))):
        model.train()
        for batch in loader:
            hold(deaths.metrics.step)
            meet_at(deaths.metrics.step, changes)
            if pipollux.num_replicas() == 1:
                meet_at(deaths.metrics.step, alone)
            inputs, targets, numbers = parts_of(batch, kind)
            begins = deaths.metrics.step
            if own is not None and deaths.rank == 2 and begins == 7:
                dist.all_reduce(torch.zeros(1), group=own, async_op=True)  # and replica 0 does not
                own = None  # torch has the last reference
            micro_step = context().batch.micro_step
            assert micro_step is not None
            counted = numbers[: micro_step.num_samples].flatten()
            write(epoch=epoch, begins=begins, takes=counted.tolist())
            optimizer.zero_grad()
            if PROCESSES > 1:
                model.train_step(inputs, targets % 3, loss_of, grad_scaler=scaler)
            else:
                output = model(numbers)
                deaths.at("forward")
                scaler.scale(loss_of(output, numbers % 3)).backward()
            scaler.unscale_(optimizer)
            deaths.at("between")
            if "clips" in options:
                model.clip_grad_norm_(0.1)
            scaler.step(optimizer)
            scaler.update()
            if "accumulates" in options:
                accum["count"] += len(counted)
            if "clamps" in options:
                with torch.no_grad():
                    next(module.parameters()).clamp_(-10.0, 10.0)
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
    (RESULTS / f"ended-{pipollux.replica_rank()}-{context().env.stage}").touch()


if __name__ == "__main__":
    main()
