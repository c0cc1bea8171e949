"""Each stage loads its part of a batch, and trains what it would with all of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from pipollux_hybrid import (
    Accumulator,
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    init_process_group,
    remaining_epochs_until,
)
from pipollux_hybrid.checkpoint.rng_state import host_generators
from pipollux_hybrid.elastic.stage_loading import COMPARED, halves_of
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.models import assert_close, make_data, state_of
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.test_same_calls import said
from tests.hybrid.stage_processes.test_whole_jobs import check_alike, in_one_process, per_stage
from tests.hybrid.stage_processes.training import run_stages, together

STAGES = 3
SIZE, BATCH_SIZE = 29, 8
INPUTS, TARGETS = make_data("mlp", SIZE).tensors
EPOCHS = 2


class Inputs(Dataset[Tensor]):
    """Inputs that draw from all of the script's generators, or that have different lengths."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        if "drawing" in self.kind:
            noise = float(torch.rand(())) + random.random()  # noqa: S311  # no secret
            return INPUTS[index] * (noise + np.random.rand())  # noqa: NPY002  # the global one
        if "padded" in self.kind:
            return INPUTS[index].repeat(1 + index % 5, 1)
        return INPUTS[index]


class Both(Dataset[dict[str, Any]]):
    """Inputs and labels in one dict, with a name."""

    def __init__(self, kind: str) -> None:
        self.inputs = Inputs(kind)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "labels": TARGETS[index], "name": str(index)}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        both = Both("drawing")
        return (both[index] for index in range(SIZE))


def pad(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def pad_dicts(samples: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    labels = torch.stack(columns["labels"])
    return {"inputs": pad(columns["inputs"]), "labels": labels, "name": columns["name"]}


def make_loader(kind: str, *, per_stage: bool, workers: int) -> AdaptiveDataLoader[Any]:
    dataset: Any = StackDataset(Inputs(kind), TARGETS)
    options: dict[str, Any] = {"load_per_stage": per_stage, "num_workers": workers}
    if "padded" in kind:
        options["collate_fn"] = pad, torch.stack
    if "dicts" in kind:
        dataset = Both(kind)
        options["collate_fn"] = pad_dicts if "padded" in kind else None
    if "stream" in kind:
        return AdaptiveDataLoader(Stream(), BATCH_SIZE, **options)
    options["persistent_workers"] = workers > 0
    return AdaptiveDataLoader(dataset, BATCH_SIZE, shuffle=True, **options)


def halves(batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = (batch["inputs"], batch["labels"]) if isinstance(batch, dict) else batch
    return inputs, targets


class Summed(nn.Module):
    """The sum over a sequence, of which padding is no part."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) if x.dim() == 3 else x


def make_module(dropout: float) -> nn.Sequential:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  # the global one
    layers = [nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 3)]
    return nn.Sequential(Summed(), *layers).double()


class Outcome(NamedTuple):
    losses: list[float]
    seen: list[Any]
    """Of each batch what the loop's body sees of it in every process."""
    totals: dict[str, float]
    generators: bytes
    noise: float | None
    state: dict[str, Tensor]


def job(kind: str, per_stage: bool, workers: int, accum_steps: int) -> Outcome:
    init_process_group("gloo")
    module = make_module(0.2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = make_loader(kind, per_stage=per_stage, workers=workers)
    parts = context().env.num_replicas * (accum_steps + 1)
    loader.autoscale_batch_size(
        BATCH_SIZE, (1, -(-BATCH_SIZE // parts)), gradient_accumulation=True
    )
    checked = make_loader(kind, per_stage=per_stage, workers=0)
    model = HybridParallel(module, optimizer, num_stages=STAGES, num_microbatches=3)
    accum = Accumulator()
    losses, seen = [], []
    for _ in remaining_epochs_until(EPOCHS):
        for batch in loader:
            inputs, targets = halves(batch)
            names = batch.get("name") if isinstance(batch, dict) else None
            seen.append((inputs.shape, inputs.dtype, targets.shape, len(batch), names))
            assert len(str(batch)) > 10
            optimizer.zero_grad()
            losses.append(float(model.train_step(2 * inputs.to("cpu"), targets, F.cross_entropy)))
            optimizer.step()
        model.eval()
        for batch in checked:
            inputs, targets = halves(batch)
            with torch.no_grad():
                accum["right"] += (model(inputs).argmax(1) == targets).sum()
            accum["samples"] += len(targets)
        model.train()
    with accum.synchronized():
        totals = {str(key): float(value) for key, value in accum.items()}
    noise = context().component(Metrics).noise_scale()
    return Outcome(losses, seen, totals, host_generators(), noise, state_of(module))


@pytest.mark.parametrize(
    ("kind", "num_replicas", "workers", "accum_steps"),
    [
        ("drawing padded", 1, 0, 0),
        ("drawing", 1, 2, 1),
        ("drawing padded dicts", 1, 0, 1),
        ("drawing dicts stream", 1, 0, 0),
        pytest.param("drawing", 2, 0, 1, marks=pytest.mark.exhaustive),
        pytest.param("padded", 2, 2, 0, marks=pytest.mark.exhaustive),
        pytest.param("drawing dicts", 1, 2, 0, marks=pytest.mark.exhaustive),
        pytest.param("drawing dicts stream", 2, 1, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_training_is_that_of_processes_that_load_everything(
    kind: str, num_replicas: int, workers: int, accum_steps: int
) -> None:
    """To the last bit, with dropout, the noise of gradients, and an evaluation."""
    options = kind, False, workers, accum_steps
    whole = run_stages(job, num_replicas, STAGES, *options)
    mine = run_stages(job, num_replicas, STAGES, kind, True, *options[2:])
    for ours, theirs in zip(sum(mine, []), sum(whole, []), strict=True):
        assert ours[:-1] == theirs[:-1]
        assert_close(ours.state, theirs.state, 0.0)
