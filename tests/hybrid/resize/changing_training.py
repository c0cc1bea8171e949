"""A training script whose replicas come and go, for tests of whole runs.

At the steps of ``$CHANGES`` every replica waits in the loop's body until it has met those of the
next membership, so that a change comes about two steps later, always at the same one. To
``$RESULTS/PID.txt`` goes a line of JSON for every step of a replica, and to ``state-RANK-STAGE.pt``
the final state of a small model of Hugging Face.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import StackDataset, TensorDataset

import pipollux
from pipollux_hybrid.job.context import context
from pipollux_hybrid.resize import pending_membership
from pipollux_hybrid.resize.elastic_membership import elastic_membership
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.conversion import small_models
from tests.hybrid.elastic.elastic_training import Stream
from tests.hybrid.elastic.training import hold
from tests.hybrid.resize.audit import contents
from tests.hybrid.resize.nccl_stand_in import backend

RESULTS = Path(os.environ.get("RESULTS", "."))
SIZE = 121
EPOCHS = 3


def make_loader(kind: str) -> pipollux.AdaptiveDataLoader | pipollux.AdaptiveBPTTIterator:
    """A loader of batches whose last element are numbers below SIZE."""
    numbers = TensorDataset(torch.arange(SIZE))
    match kind:
        case "indices" | "other-script" | "bound" | "shrinking":
            return pipollux.AdaptiveDataLoader(numbers, 7, shuffle=True)
        case "even":
            # Replicas with equal shares scale losses by powers of two. Models that normalise in
            # float32 would round gradients otherwise than the plain loop at other scales.
            return pipollux.AdaptiveDataLoader(numbers, 6, shuffle=True)
        case "workers":
            return pipollux.AdaptiveDataLoader(numbers, 7, shuffle=True, num_workers=2)
        case "accumulation":
            loader = pipollux.AdaptiveDataLoader(numbers, 8, shuffle=True)
            loader.autoscale_batch_size(64, (1, 3), gradient_accumulation=True)
            return loader
        case "bounded":
            loader = pipollux.AdaptiveDataLoader(numbers, 8, shuffle=True)
            loader.autoscale_batch_size(8, (4, 8))
            return loader
        case "per-stage":
            pairs = StackDataset(torch.arange(SIZE), torch.arange(SIZE))
            return pipollux.AdaptiveDataLoader(pairs, 7, shuffle=True, load_per_stage=True)
        case "stream":
            return pipollux.AdaptiveDataLoader(Stream(), 7)
        case "text":
            return pipollux.AdaptiveBPTTIterator(torch.arange(-1, SIZE), 7, bptt_len=2)
    raise ValueError(kind)


def parts_of(batch: Sequence[Tensor], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs and what targets are made of, and which of them this process has."""
    if kind != "per-stage":
        return batch[-1], batch[-1], batch[-1]
    inputs, targets = batch
    return inputs, targets, inputs if context().env.stage == 0 else targets


def meet_at(step: int, changes: set[int]) -> None:
    """Wait at some steps until the groups of the next membership are there."""
    membership = elastic_membership(context())
    if membership is None or step not in changes:
        return
    (RESULTS / f"waits-{step}-{pipollux.replica_rank()}").touch()
    while not ((pending := membership._watch.pending) and pending.formed):
        time.sleep(0.01)


def have_let_go() -> None:
    """Wait until the groups of the membership before are gone, which a thread sees to."""
    membership = elastic_membership(context())
    while membership is not None and membership._watch._retired:
        time.sleep(0.01)


def die_when_formed() -> None:
    """Die at the worst moment: when the others are about to go over to the new groups."""
    membership = elastic_membership(context())
    assert membership is not None
    while not ((pending := membership._watch.pending) and pending.formed):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


class Drifting(nn.Module):
    """A layer with a buffer that each forward changes, of which replica 0's is everybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.mean: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(inputs.detach().mean(), alpha=0.1)
        return inputs + self.mean


class Initializing(nn.Module):
    """A layer that sets its weights from the first samples that a process sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.ready = False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            with torch.no_grad():
                self.shift.copy_(inputs.mean(0))
        return inputs - self.shift


@pipollux.skippable(stash=["skip"])
class Stashing(nn.Embedding):
    def forward(self, input: Tensor) -> Iterator[object]:  # noqa: A002  # torch's signature
        x = super().forward(input)
        yield pipollux.stash("skip", x)
        return torch.tanh(x)


@pipollux.skippable(pop=["skip"])
class Popping(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skipped = yield pipollux.pop("skip")
        return F.layer_norm(x + skipped, [8])


class Whole(nn.Module):
    """A model with code between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, 8)
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        x = F.dropout(self.embedding(numbers), 0.1, self.training)
        for block in self.blocks:
            x = x + self.scale * block(x)
        logits: Tensor = self.head(x)
        return logits


@functools.cache
def all_samples(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return the samples of all numbers for a model of Hugging Face, and their targets."""
    batch, targets = small_models.make_batches(kind, 1, SIZE)[0]
    return batch, targets


def samples(kind: str, numbers: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return the samples of these numbers for a model of Hugging Face, and their targets."""
    batch, targets = all_samples(kind)
    return {name: x[numbers] for name, x in batch.items()}, targets[numbers]


def make_module(kind: str) -> nn.Sequential:
    """Layers with dropout: parameters depend on random numbers going on as after a restart."""
    if kind == "converted":
        return pipollux.as_layers(Whole().double(), torch.arange(6))
    if kind in small_models.NAMES:
        return pipollux.as_layers(small_models.make_model(kind), samples(kind, torch.arange(6))[0])
    embedding = nn.Embedding(SIZE, 8)
    layers = [embedding, nn.Tanh(), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 3)]
    if kind == "tied":
        layers[-1] = nn.Linear(8, SIZE, bias=False)
        layers[-1].weight = embedding.weight
    if kind == "drifting":
        layers[1] = pipollux.per_microbatch(Drifting())
    if kind == "skips":
        layers[0], layers[3] = Stashing(SIZE, 8), Popping()
    if kind == "initializing":
        layers[1] = Initializing()
    module = nn.Sequential(*layers).double()
    if kind == "compiled":
        for layer in (module[1], module[4]):
            layer.compile(backend="eager")
    return module


def digest(tensors: list[Tensor]) -> str:
    """Of numbers: garbage of a collective would be the same on all replicas."""
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    content = b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:16]


class Bound(pipollux.State):
    """A state that cannot be taken over while others train."""

    elastic = False

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(b"bound")

    def load(self, fileobj: BinaryIO) -> None:
        fileobj.read()


class Shrinking(Bound):
    """One whose replicas can leave."""

    shrinks = True


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def not_connected(*_: object) -> None:
    raise RuntimeError("NCCL error")


def check_share(optimizer: torch.optim.Optimizer) -> None:
    """A replica has moments of its own parameters only; each of the others has some, too."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    others = pipollux.num_replicas() - 1
    assert min(count - others, 1) <= len(optimizer.state) <= max(count - others, 1)


def check_mesh(processes: int) -> None:
    """Torch's mesh is that of the replicas that are left."""
    mesh = pipollux.device_mesh()
    for dimension, size in (("replica", pipollux.num_replicas()), ("stage", processes)):
        count = torch.ones((), dtype=torch.int64)
        dist.all_reduce(count, group=mesh.get_group(dimension))
        assert count == size == mesh.size(mesh.mesh_dim_names.index(dimension))


def main() -> None:
    processes = int(os.environ.get("PROCESSES", "1"))
    pipollux.init_process_group(backend(), timeout=60.0, processes_per_replica=processes)
    stage = context().env.stage
    kind = os.environ.get("DATA", "indices")
    changes = {int(step) for step in os.environ.get("CHANGES", "").split(",") if step}
    torch.manual_seed(1)
    layers = os.environ.get("LAYERS", "")
    is_small_model = layers in small_models.NAMES
    module = make_module(layers)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = make_loader(kind)
    checked = pipollux.AdaptiveDataLoader(TensorDataset(torch.arange(SIZE)), 16)
    num_stages = int(os.environ.get("STAGES", "2"))
    model = pipollux.HybridParallel(
        module,
        optimizer,
        num_stages=num_stages,
        schedule=os.environ.get("SCHEDULE") or None,
        # Another number of stages then draws the same random numbers.
        num_microbatches=1 if layers in ("initializing", "converted") else None,
        lr_scheduler=schedule,
        check_replicas=True,
        shard_optimizer="SHARDED" in os.environ,
    )
    if layers == "skips":
        assert model.balance == [1, 4], "the skip connection is between two stages"
    accum = pipollux.Accumulator()
    average = pipollux.register_for_checkpointing("average", AveragedModel(module))
    if os.environ.get("UNCONNECTED") == str(pipollux.replica_rank()):
        pending_membership.connect = not_connected  # a library that fails here
    if "DIES" in os.environ:
        threading.Thread(target=die_when_formed, daemon=True).start()
    if kind in ("bound", "shrinking"):
        {"bound": Bound, "shrinking": Shrinking}[kind]("table.bin")
    if kind == "other-script":
        pipollux.Accumulator()
    metrics = context().component(Metrics)
    log = (RESULTS / f"{os.getpid()}.txt").open("a")
    for epoch in pipollux.remaining_epochs_until(int(os.environ.get("EPOCHS", EPOCHS))):
        model.train()
        for batch in loader:
            hold(metrics.step)
            meet_at(metrics.step, changes)
            inputs, targets, numbers = parts_of(batch, kind)
            optimizer.zero_grad()
            if is_small_model:
                model.train_step(*samples(layers, inputs), small_models.loss_of)
            else:
                model.train_step(inputs, targets % 3, loss_of)
            if "CLIPS" in os.environ:
                model.clip_grad_norm_(0.1)
            optimizer.step()
            if "SHARDED" in os.environ and metrics.step:
                check_share(optimizer)
            micro_step = context().batch.micro_step
            assert micro_step is not None
            counted = numbers[: micro_step.num_samples].flatten()
            accum["sum"] += counted.sum()
            accum["count"] += len(counted)
            line = {
                "step": metrics.step,
                "epoch": epoch,
                "rank": pipollux.replica_rank(),
                "stage": stage,
                "replicas": pipollux.num_replicas(),
                "numbers": counted.tolist(),
                "ends": micro_step.is_optimizer_step,
                "parameters": digest(list(module.parameters())),
                "random": digest([torch.get_rng_state()]),
                "rate": optimizer.param_groups[0]["lr"],
            }
            print(json.dumps(line), file=log, flush=True)
            if str(metrics.step) == os.environ.get("AUDITED"):
                have_let_go()
                words = contents([context(), model, loader, checked, accum, average])
                (RESULTS / f"audit-{pipollux.replica_rank()}-{stage}.json").write_text(
                    json.dumps(words)
                )
        model.eval()
        for (numbers,) in checked:
            with torch.no_grad():
                model(samples(layers, numbers)[0] if is_small_model else numbers)
            micro_step = context().batch.micro_step
            assert micro_step is not None
            accum["checked"] += micro_step.num_samples
        schedule.step()
    if is_small_model:
        name = f"state-{pipollux.replica_rank()}-{stage}.pt"
        torch.save(model.state_dict(), RESULTS / name)
    with accum.synchronized():
        totals = {key: float(value) for key, value in accum.items()}
    if processes > 1:
        check_mesh(processes)
    (RESULTS / f"found-{pipollux.replica_rank()}-{stage}.json").write_text(json.dumps(totals))


if __name__ == "__main__":
    main()
