"""Loss scaling: all stages and replicas skip the steps that the plain model skips."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    GradScaler,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    process_rank,
    register_for_checkpointing,
    remaining_epochs_until,
    replica_rank,
    save_all_states,
)
from pipollux_hybrid.job.context import context
from tests.hybrid.models import assert_close, state_of
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages, together

BATCH, STEPS = 8, 11
MAX_NORM = 0.3
FIRST, LAST = {3: 1, 4: 6}, {4: 2, 8: 7}
"""Steps in which a gradient of the first or last linear layer overflows, by one sample's."""
BAD = FIRST.keys() | LAST.keys()


class _Spike(torch.autograd.Function):
    """Identity; the gradient of the rows with a mark is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: Tensor) -> Tensor:
        ctx.save_for_backward(marks)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (marks,) = ctx.saved_tensors
        return gradient.masked_fill(marks[:, None] > 0, torch.inf), None


class Layer(nn.Module):
    """A linear layer over [batch, 6 + 2], whose weight's gradient overflows for marked rows.

    The last two columns are marks, passed on; gradients before the layer stay finite.
    """

    def __init__(self, width: int, mark: int) -> None:
        super().__init__()
        self.linear, self.mark = nn.Linear(6, width), mark

    def forward(self, x: Tensor) -> Tensor:
        values, marks = x[:, :6], x[:, 6:]
        weight, bias = self.linear.weight, self.linear.bias
        with_weight = _Spike.apply(F.linear(values.detach(), weight, bias), marks[:, self.mark])
        # The same value, with the gradient of the layer's input.
        with_input = F.linear(values, weight.detach())
        total = with_weight + with_input - with_input.detach()
        return torch.cat([torch.tanh(total), marks], dim=1)


class Head(nn.Module):
    """Drops the marks."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :-2]


def make_layers() -> nn.Sequential:
    torch.manual_seed(5)
    plain = [Layer(6, 0), nn.Identity(), nn.Identity(), Layer(3, 1), Head()]
    return nn.Sequential(*plain).double()


def make_samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(BATCH * STEPS, 8, generator=generator, dtype=torch.float64)
    inputs[:, 6:] = 0.0
    for column, marked in ((6, FIRST), (7, LAST)):
        for step, sample in marked.items():
            inputs[step * BATCH + sample, column] = 1.0
    return TensorDataset(inputs, torch.randint(3, (BATCH * STEPS,), generator=generator))


def make_scaler(kind: type[torch.amp.GradScaler]) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=2.0**10, growth_interval=3)


class Found(NamedTuple):
    state: dict[str, Tensor]
    scales: list[float]
    norms: list[float]
    steps: int


def plain(clips: bool, epochs: int = 1) -> Found:
    module = make_layers()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    scaler, scales, norms = make_scaler(torch.amp.GradScaler), [], []
    inputs, targets = make_samples().tensors
    for _ in range(epochs):
        for x, y in zip(inputs.split(BATCH), targets.split(BATCH), strict=True):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(module(x), y)).backward()
            if clips:
                scaler.unscale_(optimizer)
                norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return Found(state_of(module), scales, norms, max(steps))


def train(
    clips: bool, local: int, schedule: str | None, stages: int, epochs: int = 1, until: int = 1
) -> Found:
    """Train up to an epoch, of ``epochs``, and save."""
    init_process_group("gloo")
    module = make_layers()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    loader = AdaptiveDataLoader(make_samples(), batch_size=BATCH)
    loader.autoscale_batch_size(BATCH, (1, local), gradient_accumulation=True)
    model = HybridParallel(
        module, optimizer, num_stages=stages, num_microbatches=2, schedule=schedule
    )
    scaler = make_scaler(GradScaler)
    assert isinstance(scaler, GradScaler)
    register_for_checkpointing("scaler", scaler)
    scales, norms = [], []
    for epoch in remaining_epochs_until(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy, grad_scaler=scaler)
            micro_step = context().batch.micro_step
            assert micro_step is not None
            if clips:
                scaler.unscale_(optimizer)
                norm = float(model.clip_grad_norm_(MAX_NORM))
                norms += [norm] if micro_step.is_optimizer_step else []
            scaler.step(optimizer)
            scaler.update()
            scales += [scaler.get_scale()] if micro_step.is_optimizer_step else []
        if epoch + 1 == until:
            break
    save_all_states()
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return Found(state_of(module), scales, norms, max(steps))


def check(found: list[list[Found]], expected: Found) -> None:
    for replica in found:
        for one in replica:
            assert one.scales == expected.scales
            assert one.steps == expected.steps
            assert one.norms == pytest.approx(expected.norms, rel=1e-9, nan_ok=True)
        assert_close(together([one.state for one in replica]), expected.state, 1e-9)


def test_the_plain_loop_skips_the_marked_steps() -> None:
    found = plain(clips=True)
    assert found.steps == STEPS - len(BAD)
    falls = {k for k, (a, b) in enumerate(itertools.pairwise([2.0**10, *found.scales])) if b < a}
    assert falls == BAD
    assert max(found.scales) > 2.0**10 > min(found.scales)


@pytest.mark.exhaustive  # the test of a restart has as many processes, and skips the same steps
@pytest.mark.parametrize(
    ("clips", "local", "schedule"),
    [
        *((True, 2, "interleaved"), (False, 4, "1f1b"), (True, 2, "gpipe")),
        *((True, 4, "1f1b"), (False, 2, "interleaved"), (True, 4, "gpipe")),
    ],
)
def test_all_processes_skip_the_steps_of_the_plain_loop(
    clips: bool, local: int, schedule: str
) -> None:
    """A gradient of one stage of one replica overflows, in some steps of 11."""
    check(run_stages(train, 2, 2, clips, local, schedule, 2), plain(clips))


@pytest.mark.exhaustive
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("local", [4, 2])
def test_the_single_process_pipeline_skips_them_too(clips: bool, local: int) -> None:
    found = run_replicas(train, 2, clips, local, None, 2)
    check([[one] for one in found], plain(clips))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages_first", [True, False])
def test_a_restart_with_another_engine_goes_on_at_the_scale(
    tmp_path: Path, stages_first: bool
) -> None:
    """Two epochs, with a process per stage in the first or in the second."""
    there = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    expected = plain(clips=True, epochs=2)
    done: list[Found] = []
    for until in (1, 2):
        if stages_first == (until == 1):
            (found, *_) = run_stages(train, 2, 2, True, 4, "1f1b", 2, 2, until, environment=there)
        else:
            found = run_replicas(train, 1, True, 8, None, 2, 2, until, environment=there)
        done.append(found[0]._replace(state=together([one.state for one in found])))
    assert done[0].scales + done[1].scales == expected.scales
    assert done[0].norms + done[1].norms == pytest.approx(expected.norms, nan_ok=True)
    assert done[1].steps == expected.steps
    assert_close(done[1].state, expected.state, 1e-9)


def fail(how: str) -> str:
    init_process_group("gloo")
    module = make_layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, num_stages=2)
    scale = {"stage": process_rank() % 2, "replica": replica_rank()}.get(how, 0)
    scaler = GradScaler("cpu", init_scale=2.0 ** (10 + scale))
    given = {"torch": torch.amp.GradScaler("cpu"), "none": None}.get(how, scaler)
    inputs, targets = make_samples()[list(range(BATCH))]
    try:
        for _ in range(3):
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy, grad_scaler=given)
            scaler.step(optimizer)
            scaler.update()
    except (ConfigurationError, SynchronizationError) as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.filterwarnings("ignore:all .* replicas train on the same samples")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("torch", "use pipollux.GradScaler, with the same arguments"),
        ("none", "were not multiplied by the scale"),
        ("stage", "rank 0 is in .* at the scale 1024, and rank 1 is in .* at the scale 2048"),
        ("replica", "loss scale of group 0 is 1024 on ranks 0, 1, and 2048 on ranks 2, 3"),
    ],
)
def test_scalers_that_would_train_other_numbers(how: str, text: str) -> None:
    replicas = 2 if how == "replica" else 1
    for replica in run_stages(fail, replicas, 2, how):
        for message in replica:
            assert re.search(text, message), message
