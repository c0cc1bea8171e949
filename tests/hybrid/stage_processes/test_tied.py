"""Layers of several stages share parameters, of which each of their processes holds a copy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import HybridParallel, init_process_group
from pipollux_hybrid.errors import PeerLostError
from pipollux_hybrid.job.context import context
from tests.extent import pairs
from tests.hybrid.models import assert_close
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.tied import (
    BATCH_SIZE,
    SIZE,
    Job,
    Outcome,
    by_all_names,
    data_of,
    make,
    make_optimizer,
    train,
)
from tests.hybrid.stage_processes.training import run_stages, together

SPLITS = {
    "ends": ("language", [2, 3]),
    "ends of three": ("language", [1, 2, 2]),
    "ends of four": ("language", [1, 1, 1, 2]),
    "three stages": ("square", [2, 2, 2]),
    "all but the second": ("square", [2, 1, 1, 2]),
    "two of a stage": ("square", [3, 3]),
}


def aliases(name: str) -> list[list[str]]:
    """The names of each shared parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for known, parameter in make(name).named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(known)
    return [known for known in names.values() if len(known) > 1]


def check_copies(name: str, state: dict[str, Tensor]) -> None:
    """All names of a parameter have the same bits."""
    for first, *others in aliases(name):
        for other in others:
            torch.testing.assert_close(state[other], state[first], rtol=0, atol=0)


def per_stage(num_replicas: int, job: Job, **options: Any) -> list[Outcome]:
    """Run with a process per stage; what each replica has, its stages' put together."""
    merged = []
    assert job.balance is not None
    num_stages = len(job.balance) // (2 if job.schedule == "interleaved" else 1)
    for stages in run_stages(train, num_replicas, num_stages, job, **options):
        first = stages[0]
        for stage in stages:
            assert stage.losses == first.losses
            assert stage.norms == first.norms
            assert stage.noise == first.noise
            assert stage.gain == first.gain
        state = together([stage.state for stage in stages])
        check_copies(job.name, state)
        for stage in stages:
            assert_close(stage.whole, state, 0.0)
        steps = [together(step) for step in zip(*(x.gradients for x in stages), strict=True)]
        for step in steps if not job.frozen else ():
            check_copies(job.name, step)
        merged.append(first._replace(state=state, gradients=steps))
    return merged


def in_one_process(num_replicas: int, job: Job, **options: Any) -> list[Outcome]:
    alone = job._replace(balance=None, schedule=None)
    return run_replicas(train, num_replicas, alone, **options)


def plain(job: Job) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
    """Train without any parallelism; gradients and norms of each step, and the parameters."""
    module = make(job.name, frozen=job.frozen)
    optimizer = make_optimizer(module, job.adam)
    history, norms = [], []
    data = data_of(job.name)
    for first in range(0, SIZE, BATCH_SIZE):
        inputs, targets = data[first : first + BATCH_SIZE]
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), targets).backward()
        history.append(by_all_names(module))
        if job.max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), job.max_norm)))
        optimizer.step()
    return history, norms, dict(module.state_dict())


def check(num_replicas: int, job: Job, **options: Any) -> list[Outcome]:
    history, norms, state = plain(job)
    found = per_stage(num_replicas, job, **options)
    for ours in found:
        assert ours.norms == pytest.approx(norms, rel=1e-12)
        for gradients, expected in zip(ours.gradients, history, strict=True):
            assert_close(gradients, expected, 1e-12)
        assert_close(ours.state, state, 1e-12)
    return found


@pytest.mark.parametrize(
    ("split", "num_replicas", "schedule", "accum_steps", "adam"),
    [
        ("ends", 2, "1f1b", 1, True),
        pytest.param("three stages", 1, "gpipe", 1, False, marks=pytest.mark.exhaustive),
        pytest.param("two of a stage", 2, "gpipe", 0, True, marks=pytest.mark.exhaustive),
        pytest.param("ends of four", 1, "interleaved", 0, True, marks=pytest.mark.exhaustive),
        pytest.param("ends of four", 2, "interleaved", 1, False, marks=pytest.mark.exhaustive),
        *(
            pytest.param(*point, marks=pytest.mark.exhaustive)
            for point in pairs(list(SPLITS), (1, 2), ("1f1b", "gpipe"), (0, 1, 2), (True, False))
        ),
    ],
)
def test_gradients_norms_and_parameters_are_the_plain_models(
    split: str, num_replicas: int, schedule: str, accum_steps: int, adam: bool
) -> None:
    """Clipped, with weight decay, and the copies are equal bit by bit."""
    name, balance = SPLITS[split]
    check(num_replicas, Job(name, balance, schedule, accum_steps, adam=adam))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.exhaustive
def test_checkpoint_modes(checkpoint: str) -> None:
    check(1, Job("language", [1, 2, 2], checkpoint=checkpoint))


def test_frozen_copies_stay_as_they_are() -> None:
    job = Job("language", [2, 3], frozen=True)
    (ours,) = check(1, job)
    torch.testing.assert_close(ours.state["4.weight"], make("language")[0].weight.detach())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_replicas", "job"),
    [
        (2, Job("language", [1, 4], accum_steps=1, sharded=True, epochs=5)),
        (1, Job("language", [1, 1, 1, 2], "interleaved", epochs=5)),
        (1, Job("square", [2, 2, 2], "gpipe", epochs=8)),
        (2, Job("square", [2, 2, 2], accum_steps=1, epochs=5)),
    ],
)
def test_the_same_as_with_the_other_engine(num_replicas: int, job: Job) -> None:
    """Losses, norms, and the gradient's noise, which counts a shared parameter once."""
    expected = in_one_process(num_replicas, job)
    for ours, theirs in zip(per_stage(num_replicas, job), expected, strict=True):
        assert len(ours.gradients) == 3 * job.epochs
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
        assert ours.norms == pytest.approx(theirs.norms, rel=1e-9)
        assert ours.noise[-1] >= 5.0
        assert ours.noise == pytest.approx(theirs.noise, rel=1e-9)
        assert ours.gain == pytest.approx(theirs.gain, rel=1e-9)
        assert_close(ours.state, theirs.state, 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    [([2, 3], None), ([1, 1, 3], [4, 1]), (None, [1, 3, 1]), ([4, 1], [1, 1, 1, 2])],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_restarts_change_the_cut_and_the_engine(
    tmp_path: Path, before: list[int] | None, after: list[int] | None, frozen: bool
) -> None:
    """A checkpoint has each name of the plain model, and the optimizer's state once."""
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}

    def run(balance: list[int] | None, epochs: int) -> Outcome:
        job = Job("language", balance, frozen=frozen, epochs=epochs)
        how = per_stage if balance else in_one_process
        return how(1, job, environment=environment)[0]

    first, second = run(before, 1), run(after, 2)
    (whole,) = in_one_process(1, Job("language", None, frozen=frozen, epochs=2))
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-9)
    assert_close(second.state, whole.state, 1e-9)


def wrapped(module: nn.Sequential, **options: Any) -> tuple[HybridParallel, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return HybridParallel(module, optimizer, num_microbatches=3, **options), optimizer


def sums_by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Add up the gradients of several backwards, with and without ``no_sync``."""
    init_process_group("gloo")
    module = make("square")
    model, _ = wrapped(module, balance=[2, 4])
    inputs, targets = data_of("square", 12).tensors
    with model.no_sync():
        model.train_step(inputs[:5], targets[:5], F.cross_entropy)
    model.train_step(inputs[5:], targets[5:], F.cross_entropy)
    once = by_all_names(module)
    model.train_step(inputs, targets, F.cross_entropy)
    return once, by_all_names(module)


def test_several_backwards_add_up() -> None:
    """What is a sum over the stages already is counted once."""
    (stages,) = run_stages(sums_by_hand, 1, 2)
    module = make("square")
    inputs, targets = data_of("square", 12).tensors
    for part in (slice(0, 5), slice(5, 12)):
        F.cross_entropy(module(inputs[part]), targets[part]).backward()
    assert_close(together([stage[0] for stage in stages]), by_all_names(module), 1e-12)
    F.cross_entropy(module(inputs), targets).backward()
    assert_close(together([stage[1] for stage in stages]), by_all_names(module), 1e-12)


def loads(strict: bool) -> list[dict[str, Tensor]]:
    init_process_group("gloo")
    module = make("square")
    model, _ = wrapped(module, balance=[2, 2, 2])
    state = {name: x.clone() for name, x in model.state_dict().items()}
    listed = [name for name, _ in make("square").named_parameters()]
    given = {name: state[name] + 1.0 for name in (state if strict else listed)}
    if strict:
        given["5.weight"] = given["5.weight"] + 1.0  # the last one holds, as in the plain model
    model.load_state_dict(given, strict=strict)
    return [state, dict(model.state_dict())]


@pytest.mark.parametrize("strict", [True, False])
def test_states_are_loaded_as_by_the_plain_model(strict: bool) -> None:
    (stages,) = run_stages(loads, 1, 3, strict)
    for before, after in stages:
        check_copies("square", after)
        assert before.keys() == make("square").state_dict().keys()
        for name, value in before.items():
            twice = strict and name in aliases("square")[0]
            torch.testing.assert_close(after[name], value + (2.0 if twice else 1.0))


def changes_a_copy() -> None:
    model, optimizer = wrapped(make("language"), balance=[2, 3], check_replicas=True)
    inputs, targets = data_of("language", 6).tensors
    model.train_step(inputs, targets, F.cross_entropy)
    if context().env.stage == 1:
        with torch.no_grad():
            model[-1].weight.mul_(1.5)  # type: ignore[operator]  # the copy of the last stage
    optimizer.step()


def freezes_a_copy() -> None:
    module = make("language")
    model, _ = wrapped(module, balance=[2, 3])
    if context().env.stage == 0:
        module[0].requires_grad_(False)
    inputs, targets = data_of("language", 6).tensors
    model.train_step(inputs, targets, F.cross_entropy)


CASES = {
    "copies": (changes_a_copy, "the copies of parameter '0.weight' differ after optimizer step 1"),
    "frozen": (freezes_a_copy, "'0.weight' is frozen in some of the stages 0, 1 that share it"),
}


def said(name: str) -> str:
    init_process_group("gloo", timeout=60.0)
    try:
        CASES[name][0]()
    except Exception as error:  # which is told to the test
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", list(CASES))
def test_copies_that_come_apart_are_refused(name: str) -> None:
    (stages,) = run_stages(said, 1, 2, name)
    for text in stages:
        assert text.startswith("SynchronizationError")
        assert CASES[name][1] in text


def dies_in_the_exchange() -> str:
    init_process_group("gloo", timeout=60.0)
    model, optimizer = wrapped(make("language"), balance=[2, 3])
    inputs, targets = data_of("language", 6).tensors

    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        for step in range(3):
            if step == 2 and context().env.stage == 1:
                assert model._tied is not None
                model._tied._sum = end  # type: ignore[assignment]  # in the middle of an iteration
            optimizer.zero_grad()
            model.train_step(inputs, targets, F.cross_entropy)
            optimizer.step()
    except PeerLostError as error:
        return str(error)
    return "nothing"


def test_a_stage_that_ends_in_the_exchange_is_missed() -> None:
    ((text, code),) = run_stages(dies_in_the_exchange, 1, 2, exit_codes=(0, -signal.SIGKILL))
    assert code == -signal.SIGKILL
    assert "rank 0 of 2 lost its peers while adding up gradients that stages share" in text


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def trains_many_steps(name: str, dtype: torch.dtype) -> list[Tensor]:
    init_process_group("gloo")
    module = make("language").to(dtype)
    optimizer = OPTIMIZERS[name](module.parameters())
    model = HybridParallel(
        module, optimizer, balance=[1, 2, 2], num_microbatches=3, check_replicas=True
    )
    inputs, targets = data_of("language", 12).tensors
    for _ in range(60):
        optimizer.zero_grad()
        model.train_step(inputs, targets, F.cross_entropy)
        model.clip_grad_norm_(0.3)
        optimizer.step()
    state = model.state_dict()
    return [state["0.weight"], state["4.weight"]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_copies_stay_equal_with_any_optimizer(name: str, dtype: torch.dtype) -> None:
    (stages,) = run_stages(trains_many_steps, 1, 3, name, dtype)
    for first, last in stages:
        assert not torch.equal(first, make("language").to(dtype)[0].weight)
        torch.testing.assert_close(last, first, rtol=0, atol=0)


def chosen_balance() -> list[int]:
    init_process_group("gloo")
    model, _ = wrapped(make("language"), num_stages=3)
    return model.balance


def test_an_automatic_cut_lets_tied_layers_apart() -> None:
    ((first, *others),) = run_stages(chosen_balance, 1, 3)
    assert sum(first) == 5
    assert len(first) == 3
    assert others == [first, first]
