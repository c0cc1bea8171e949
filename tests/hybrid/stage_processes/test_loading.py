"""Each stage loads its part of a batch, and trains what it would with all of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
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
from tests.extent import first
from tests.hybrid.models import assert_close, make_data, plain_training, state_of
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.test_same_calls import said
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
            return INPUTS[index] * (noise + np.random.rand())
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
    np.random.seed(5)
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
        pytest.param("drawing padded", 1, 1, 1, marks=pytest.mark.exhaustive),
        pytest.param("drawing dicts stream", 1, 0, 0, marks=pytest.mark.exhaustive),
        ("drawing padded", 1, 0, 0),
        pytest.param("drawing", 1, 2, 1, marks=pytest.mark.exhaustive),
        pytest.param("drawing padded dicts", 1, 0, 1, marks=pytest.mark.exhaustive),
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
    for ours, theirs in zip(chain(*mine), chain(*whole), strict=True):
        assert ours[:-1] == theirs[:-1]
        assert_close(ours.state, theirs.state, 0.0)


class Noted(Dataset[Tensor]):
    """Appends the index of each loaded sample to a file of this stage, also in workers."""

    def __init__(self, values: Tensor, path: Path) -> None:
        self.values, self.path = values, path.with_name(f"{path.name}-{context().env.stage}")

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return self.values[index]


class Merged(StackDataset[tuple[Tensor, Tensor]]):
    """Not to be taken apart: it may do anything."""


def note_loads(folder: Path, kind: type[StackDataset[Any]], workers: int) -> dict[str, Tensor]:
    """Train without dropout, over the samples in order."""
    init_process_group("gloo")
    module = make_module(0.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    dataset = kind(Noted(INPUTS, folder / "inputs"), Noted(TARGETS, folder / "targets"))
    loader = AdaptiveDataLoader(
        dataset, batch_size=BATCH_SIZE, num_workers=workers, load_per_stage=True
    )
    model = HybridParallel(module, optimizer, num_stages=STAGES, num_microbatches=2)
    for _ in remaining_epochs_until(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy)
            optimizer.step()
    return state_of(module)


def loads(folder: Path) -> dict[str, Counter[int]]:
    return {
        path.name: Counter(int(line) for line in path.read_text().split())
        for path in folder.iterdir()
    }


EACH = Counter(dict.fromkeys(range(SIZE), EPOCHS))
FIRST = Counter(range(COMPARED))


@pytest.mark.parametrize("workers", first(1, [0, 2]))
def test_inputs_and_targets_are_loaded_once_by_the_ends_of_the_pipeline(
    tmp_path: Path, workers: int
) -> None:
    """But for the samples that both ends compare; the parameters are those of the plain model."""
    stages = run_stages(note_loads, 1, STAGES, tmp_path, StackDataset, workers)[0]
    assert loads(tmp_path) == {
        "inputs-0": EACH + FIRST,
        "targets-0": FIRST,
        "inputs-2": FIRST,
        "targets-2": EACH + FIRST,
    }
    module = make_module(0.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    batches = [range(SIZE)[i : i + BATCH_SIZE] for i in range(0, SIZE, BATCH_SIZE)]
    plain_training(module, optimizer, TensorDataset(INPUTS, TARGETS), batches * EPOCHS)
    assert_close(together(stages), state_of(module), 1e-12)


@pytest.mark.exhaustive
def test_stages_between_load_nothing_of_other_data_sets(tmp_path: Path) -> None:
    run_stages(note_loads, 1, STAGES, tmp_path, Merged, 0)
    assert loads(tmp_path) == {
        f"{part}-{stage}": EACH for part in ("inputs", "targets") for stage in (0, 2)
    }


def test_one_process_loads_everything(tmp_path: Path) -> None:
    run_replicas(note_loads, 1, tmp_path, StackDataset, 0)
    assert loads(tmp_path) == {"inputs-0": EACH, "targets-0": EACH}


class Drawing(Dataset[Tensor]):
    """Targets that draw from a generator of the script's."""

    def __init__(self, draw: Callable[[], object]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        self.draw()
        return TARGETS[index]


def drawn_by_torch() -> object:
    return torch.rand(())


def train(dataset: Any, use: Callable[..., Any], **options: Any) -> None:
    module = make_module(0.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = AdaptiveDataLoader(dataset, BATCH_SIZE, load_per_stage=True, **options)
    model = HybridParallel(module, optimizer, num_stages=STAGES, num_microbatches=2)
    for inputs, targets in loader:
        use(model, inputs, targets)
        optimizer.step()


def train_step(model: HybridParallel, inputs: Tensor, targets: Tensor) -> None:
    model.train_step(inputs, targets, F.cross_entropy)


PAIRS = StackDataset(INPUTS, TARGETS)


def targets_that_draw() -> None:
    train(StackDataset(INPUTS, Drawing(drawn_by_torch)), train_step)


def targets_that_draw_in_workers() -> None:
    train(StackDataset(INPUTS, Drawing(random.random)), train_step, num_workers=1)


def collate_that_draws() -> None:
    def collate(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + 0 * np.random.randint(9)

    train(PAIRS, train_step, collate_fn=(torch.stack, collate))


def inputs_as_targets() -> None:
    mse = F.mse_loss
    train(PAIRS, lambda model, inputs, _: model.train_step(inputs, inputs.mean(1), mse))


def targets_as_inputs() -> None:
    train(PAIRS, lambda model, inputs, targets: train_step(model, targets, inputs))


def inputs_in_the_loss() -> None:
    def use(model: HybridParallel, inputs: Tensor, targets: Tensor) -> None:
        model.train_step(
            inputs, targets, lambda x, y: F.cross_entropy(x, y) + inputs.sum() * x.sum()
        )

    train(PAIRS, use)


def reads_values() -> None:
    train(PAIRS, lambda *batch: float(batch[-1].sum()))


def adds_noise_to_the_inputs() -> None:
    train(PAIRS, lambda model, x, y: train_step(model, x + torch.randn_like(x), y))


def sums_of_both_halves() -> None:
    accum = Accumulator()

    def use(_: HybridParallel, inputs: Tensor, targets: Tensor) -> None:
        accum["both"] += inputs.sum() + targets.sum()

    for _ in remaining_epochs_until(1):
        train(PAIRS, use)
    with accum.synchronized():
        pass


def batches_that_cannot_be_sent() -> None:
    def collate(samples: list[Any]) -> Any:
        return (lambda: samples), torch.stack([sample[1] for sample in samples])

    train(TensorDataset(INPUTS, TARGETS), train_step, collate_fn=collate)


FIRST_STAGE, BETWEEN, LAST_STAGE = range(STAGES)
REFUSED: list[Any] = [
    (targets_that_draw, LAST_STAGE, "the targets draw random numbers"),
    pytest.param(
        targets_that_draw_in_workers,
        LAST_STAGE,
        "the targets draw random numbers",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        collate_that_draws,
        LAST_STAGE,
        "the targets draw random numbers",
        marks=pytest.mark.exhaustive,
    ),
    (inputs_as_targets, LAST_STAGE, "stage 2 needs a part of the batch"),
    pytest.param(
        targets_as_inputs,
        FIRST_STAGE,
        "stage 0 needs a part of the batch",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        inputs_in_the_loss, LAST_STAGE, "needs a part of the batch", marks=pytest.mark.exhaustive
    ),
    (reads_values, BETWEEN, "_local_scalar_dense needs a part of the batch"),
    pytest.param(
        adds_noise_to_the_inputs,
        BETWEEN,
        "aten::randn_like needs a part of the batch",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        sums_of_both_halves,
        BETWEEN,
        "the amount of accumulator['both'] needs a part",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        batches_that_cannot_be_sent,
        FIRST_STAGE,
        "sends all of a batch but the values",
        marks=pytest.mark.exhaustive,
    ),
]


@pytest.mark.parametrize(("function", "stage", "sentence"), REFUSED)
def test_values_of_other_stages_are_refused(
    function: Callable[[], None], stage: int, sentence: str
) -> None:
    (texts,) = run_stages(said, 1, STAGES, function)
    assert "ConfigurationError: " in texts[stage]
    assert sentence in texts[stage]
    assert "load_per_stage" in texts[stage]
    assert "nothing" not in texts


def halves_in_other_orders() -> None:
    """As of a folder that each process lists in its own order."""
    train(StackDataset(INPUTS, TARGETS.roll(context().env.stage)), train_step)


def unlike_options() -> None:
    per_stage = context().env.stage > 0
    for _ in AdaptiveDataLoader(PAIRS, BATCH_SIZE, load_per_stage=per_stage):
        pass


def loops_in_one_process() -> None:
    loader = AdaptiveDataLoader(PAIRS, BATCH_SIZE, load_per_stage=True)
    for _ in loader:
        if context().env.stage == 0:
            break
    for _ in loader:
        pass


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (halves_in_other_orders, "were given different targets in the next batch"),
        pytest.param(unlike_options, "load_per_stage=True", marks=pytest.mark.exhaustive),
        (loops_in_one_process, "is in the next batch of an AdaptiveDataLoader"),
    ],
)
def test_processes_that_differ_are_refused(function: Callable[[], None], sentence: str) -> None:
    (texts,) = run_stages(said, 1, STAGES, function)
    for text in texts:
        assert text.startswith("SynchronizationError: ")
        assert sentence in text


@pytest.mark.parametrize("option", [{"load_per_stage": "targets"}, {"collate_fn": (pad,)}])
def test_wrong_options_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        AdaptiveDataLoader(PAIRS, BATCH_SIZE, **option)


def test_pairs_are_taken_apart_also_in_parts_of_data_sets() -> None:
    nested = ConcatDataset([Subset(PAIRS, [3, 1]), PAIRS])
    halves = halves_of(nested)
    assert halves is not None
    for index in range(len(nested)):
        for half, whole in zip(halves, nested[index], strict=True):
            assert torch.equal(half[index], whole)


@pytest.mark.parametrize(
    "dataset",
    [
        StackDataset(INPUTS, TARGETS, TARGETS),
        StackDataset(inputs=INPUTS, labels=TARGETS),
        Merged(INPUTS, TARGETS),
        ConcatDataset([PAIRS, TensorDataset(INPUTS, TARGETS)]),
        Subset(TensorDataset(INPUTS, TARGETS), [1]),
    ],
)
def test_other_data_sets_are_not_taken_apart(dataset: Any) -> None:
    assert halves_of(dataset) is None
