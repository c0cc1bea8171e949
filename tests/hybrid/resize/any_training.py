"""A training script of any shape, whose replicas come, go and die as ``$PLAN`` says.

To ``$RESULTS/log-NAME.jsonl`` goes a line for each pass of a loop's body and one for each step that
is done. What happens at a place is written into ``event-K`` by whoever comes there first: that all
replicas of a membership come to the same conclusion there is what this script rests on.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import IterableDataset, TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.resize import elastic_membership, joining_replica, rendezvous_folder, watch
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.resize.any_events import RunEvents
from tests.hybrid.resize.any_plan import LoopPlace, RunPlan
from tests.hybrid.resize.nccl_stand_in import backend

RESULTS = Path(os.environ.get("RESULTS", "."))
CLOSING = 48
"""Samples of the last epoch, in batches of 4: enough of these for what is under way to come about.
"""


def hurry() -> None:
    """Look more often, and take silent replicas for dead earlier, than jobs do."""
    for module in (watch, joining_replica, elastic_membership):
        module.INTERVAL = 0.03  # type: ignore[attr-defined]  # of a process of this test's own
    watch.RETRY_AFTER = 0.2
    rendezvous_folder.SILENCE = 3.0


class Tally(nn.Module):
    """Holds a buffer that follows the samples which a replica sees."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.total.mul_(0.9).add_(inputs.detach().sum())
        return inputs


class RangeStream(IterableDataset[tuple[Tensor]]):
    """The numbers from 0 on, in an order of the epoch."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        generator = torch.Generator().manual_seed(self.epoch)
        return ((number,) for number in torch.randperm(self.size, generator=generator))


class Passes(pipollux.State):
    """Passes of the loops' bodies that count."""

    def __init__(self, events: RunEvents) -> None:
        super().__init__("passes.json")
        self._events = events
        self.count = 0

    def sync(self) -> None:
        self._events.at("syncing")

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(json.dumps(self.count).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.count = json.load(fileobj)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


Loader = pipollux.AdaptiveDataLoader[Any] | pipollux.AdaptiveBPTTIterator


def make_loader(plan: RunPlan) -> Loader:
    """The loader of the training samples; batches end in numbers below the plan's size."""
    loader: Loader
    match plan.kind:
        case "indices":
            numbers = TensorDataset(torch.arange(plan.size))
            loader = pipollux.AdaptiveDataLoader(numbers, plan.batch_size, shuffle=plan.shuffle)
        case "stream":
            loader = pipollux.AdaptiveDataLoader(RangeStream(plan.size), plan.batch_size)
        case "text":
            tokens = torch.arange(-1, plan.size)
            loader = pipollux.AdaptiveBPTTIterator(tokens, plan.batch_size, bptt_len=2)
        case _:
            raise ValueError(plan.kind)
    if plan.largest:
        loader.autoscale_batch_size(
            plan.max_batch_size, (1, plan.largest), gradient_accumulation=True
        )
    return loader


def digest(*values: Any) -> str:
    found = hashlib.sha256()
    for word in _words(values):
        found.update(word)
    return found.hexdigest()[:16]


def _words(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _words(value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _words(part)
    else:
        yield repr(value).encode()


class Script:
    """The training script.

    Args:
        plan: What it does.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.events = RunEvents(plan, RESULTS)
        torch.manual_seed(1)
        # Dropout makes the parameters depend on random numbers.
        self.module = nn.Sequential(
            *(nn.Embedding(max(plan.size, CLOSING), 6), nn.Tanh(), nn.Dropout(0.2)),
            *(nn.LayerNorm(6), Tally(), nn.Linear(6, 3)),
        ).double()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.train = make_loader(plan)
        whole = [TensorDataset(torch.arange(size)) for size in (plan.size, CLOSING)]
        self.other = pipollux.AdaptiveDataLoader(whole[0], plan.batch_size + 1)
        self.checked = pipollux.AdaptiveDataLoader(whole[0], 2 * plan.batch_size)
        self.closing = pipollux.AdaptiveDataLoader(whole[1], 4)
        self.model = pipollux.HybridParallel(
            self.module,
            self.optimizer,
            num_stages=plan.stages,
            num_microbatches=plan.microbatches or None,
            schedule=plan.schedule or None,
            lr_scheduler=self.schedule,
        )
        self.average = pipollux.register_for_checkpointing("average", AveragedModel(self.module))
        self.passes = Passes(self.events)
        pipollux.load_state(self.passes)
        self.accum = pipollux.Accumulator()
        parameter = next(iter(self.module.parameters()))
        parameter.register_hook(lambda *_: self.events.at("backward"))  # type: ignore[no-untyped-call]  # torch's
        if plan.processes > 1:  # in the middle of its micro-batches
            for layer in self.module:
                layer.register_forward_hook(lambda *_: self._passes_forward())
        self.optimizer.register_step_pre_hook(lambda *_: self.events.at("step"))
        self.metrics = context().component(Metrics)
        self._log = (RESULTS / f"log-{self.events.process}.jsonl").open("a")
        self._before: Tensor | None = None
        self._micro = 0

    def run(self) -> None:
        totals: dict[str, float] = {}
        for epoch in pipollux.remaining_epochs_until(self.plan.epochs + 1):
            loops = self.plan.loops if epoch < self.plan.epochs else ("closing",)
            for number, loop in enumerate(loops):
                self._loop(epoch, number, loop)
                self.events.at("outside")
            if self.plan.accumulates:
                with self.accum.synchronized():
                    totals = {name: float(value) for name, value in self.accum.items()}
            self.events.forget(epoch >= self.plan.epochs)
        (RESULTS / f"ended-{self.events.process}").write_text(json.dumps(totals))

    def _loop(self, epoch: int, number: int, loop: str) -> None:
        loaders = {"other": self.other, "evaluate": self.checked, "closing": self.closing}
        loader: Loader = loaders.get(loop, self.train)
        self.model.train(loop != "evaluate")
        self._micro = 0
        for batch in loader:
            micro_step = context().batch.micro_step
            assert micro_step is not None
            self.events.late = micro_step.is_optimizer_step
            place = LoopPlace(epoch, number, loader.current_index)
            numbers = batch[-1]
            counted = numbers[: micro_step.num_samples].flatten()
            line = {
                **self._told(place),
                "pass": self._micro,
                "ends": micro_step.is_optimizer_step,
                "numbers": counted.tolist(),
                "digest": self._digest(),
                "decision": [random.gauss(0, 1), float(np.random.randn())],
                "shape": [loader.current_batch_size, loader.accumulation_steps],
                "follows": self._follows(loader, batch),
            }
            self._write(line)
            if self._micro == 0:
                self.events.happen(place)
            if loop == "evaluate":
                with torch.no_grad():
                    self.model(numbers)
                self.events.at("forward")
            else:
                self._step(place, numbers, ends=micro_step.is_optimizer_step)
            if self.plan.accumulates:
                self.accum[f"{loop}-sum"] += counted.sum()
                self.accum[f"{loop}-count"] += len(counted)
            ends = micro_step.is_optimizer_step
            self._micro = 0 if ends else self._micro + 1
            self.events.at("after")
            if loop == "partly" and ends and place.index >= self.plan.size // 2:
                break

    def _step(self, place: LoopPlace, numbers: Tensor, *, ends: bool) -> None:
        began_at = self.metrics.step
        self.optimizer.zero_grad()
        if self.plan.processes > 1:
            self.model.train_step(numbers, numbers % 3, loss_of)
        else:
            output = self.model(numbers)
            self.events.at("forward")
            loss_of(output, numbers % 3).backward()
        self.events.at("between")
        self.optimizer.step()
        self.schedule.step()
        self.passes.count += 1
        if ends:
            self.average.update_parameters(self.module)
        if self.metrics.step > began_at:
            self._write({**self._told(place), "done": self._digest()})

    def _passes_forward(self) -> None:
        if self.model.training:
            self.events.at("forward")

    def _follows(self, loader: Loader, batch: Any) -> bool:
        """Whether windows of a text are right of those before, unless they are said to be new."""
        if not isinstance(loader, pipollux.AdaptiveBPTTIterator):
            return True
        before, (inputs, self._before) = self._before, batch
        if loader.is_fresh:
            return True
        if before is None or len(before) != len(inputs):
            return False
        # What is left of the rows when they are cut anew is laid end to end.
        seams = len(loader._state.details["cuts"]) > 1
        gaps = inputs[:, 0] - before[:, -1]
        return bool((gaps >= 0).all() if seams else (gaps == 0).all())

    def _told(self, place: LoopPlace) -> dict[str, Any]:
        return {
            "place": place,
            "member": self.events.membership.number,
            "rank": pipollux.replica_rank(),
            "stage": context().env.stage,
            "of": pipollux.num_replicas(),
            "step": self.metrics.step,
        }

    def _digest(self) -> list[str]:
        """What must be the same on all replicas, part by part."""
        parts = (self.module.state_dict(), self.optimizer.state_dict(), self.average.state_dict())
        rest = (self.schedule.state_dict(), self.passes.count)
        return [*map(digest, parts), digest(*rest)]

    def _write(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._log, flush=True)


def main() -> None:
    hurry()
    plan = RunPlan.from_json(os.environ["PLAN"])
    pipollux.init_process_group(backend(), timeout=60.0, processes_per_replica=plan.processes)
    random.seed(1)
    np.random.seed(1)
    Script(plan).run()


if __name__ == "__main__":
    main()
