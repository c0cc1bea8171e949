"""What cannot be done with a process per stage is refused in a sentence that says what can."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from pipollux_hybrid import (
    ConfigurationError,
    HybridParallel,
    SynchronizationError,
    destroy_process_group,
    init_process_group,
    pop,
    skippable,
    stash,
)
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.env import JobEnvironment
from tests.hybrid.models import make_data, make_model
from tests.hybrid.stage_processes.training import run_stages
from tests.waiting import until

INPUTS, TARGETS = make_data("mlp", 11).tensors


def wrapped(module: nn.Sequential, **options: Any) -> HybridParallel:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return HybridParallel(module, optimizer, **{"num_stages": 2, "num_microbatches": 4, **options})


class Odd(nn.Module):
    """Fails where there are few samples."""

    def forward(self, x: Any) -> Tensor:
        if len(x) < 4:
            raise ValueError("too few samples for Odd") from KeyError("inner")
        kept: Tensor = x
        return kept


def plain_loop() -> None:
    model = wrapped(make_model("mlp"))
    F.cross_entropy(model(INPUTS), TARGETS)


def unknown_schedule() -> None:
    wrapped(make_model("mlp"), schedule="zigzag")


def other_stages() -> None:
    wrapped(make_model("mlp"), num_stages=3)


@skippable(stash=["kept"])
class Stashes(nn.Module):
    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("kept", self.value(x))
        return x


@skippable(pop=["kept"])
class Pops(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        kept = yield pop("kept")
        return x + kept


class Seldom(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return x


def skips(stashes: nn.Module, *layers: nn.Module) -> None:
    """Two layers in the first part, two in the last one, one in each of the others."""
    module = nn.Sequential(nn.Linear(6, 6), stashes, *layers, nn.Linear(6, 3)).double()
    schedule = "1f1b" if len(layers) == 1 else "interleaved"
    model = wrapped(module, balance=[2, *(1 for _ in layers[1:]), 2], schedule=schedule)
    model.train_step(INPUTS, TARGETS, F.cross_entropy)


def changes_a_skip() -> None:
    skips(Stashes(lambda x: x[:, :1]), nn.Sequential(nn.ReLU(True), nn.Identity(), Pops()))


def changes_a_skip_later() -> None:
    skips(Stashes(lambda x: x), nn.Identity(), nn.ReLU(True), Pops())


def skips_an_object() -> None:
    skips(Stashes(lambda _: [object()]), nn.Sequential(nn.Identity(), Pops()))


def stashes_seldom() -> None:
    skips(Seldom(Stashes(lambda x: x)), nn.Sequential(nn.Identity(), Pops()))


def too_few_targets() -> None:
    wrapped(make_model("mlp")).train_step(INPUTS, TARGETS[:-1], F.cross_entropy)


def layer_fails() -> None:
    module = nn.Sequential(nn.Linear(6, 3), Odd()).double()
    wrapped(module).train_step(INPUTS, TARGETS, F.cross_entropy)


def loss_fails() -> None:
    def loss(*_: Tensor) -> Tensor:
        raise ValueError("no loss today")

    wrapped(make_model("mlp")).train_step(INPUTS, TARGETS, loss)


def layer_of_another() -> None:
    model = wrapped(make_model("mlp"), balance=[4, 5])
    model[5 if context().env.stage == 0 else 0](INPUTS)


def two_chunks_are_four_parts() -> None:
    wrapped(make_model("mlp"), balance=[4, 5], schedule="interleaved")


def stashes_twice() -> None:
    stashes = [nn.Sequential(Stashes(lambda x: x)) for _ in range(2)]
    skips(stashes[0], nn.Sequential(stashes[1], Pops()))


def ties_two_chunks() -> None:
    module = make_model("mlp")
    module[0].bias = module[4].bias
    wrapped(module, balance=[2, 2, 2, 3], schedule="interleaved")


def clips(clip: Callable[[list[nn.Parameter]], Any]) -> None:
    model = wrapped(make_model("mlp"))
    model.train_step(INPUTS, TARGETS, F.cross_entropy)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    model.clip_grad_norm_(1.0)
    clip(list(model.parameters()))


def clips_by_torch() -> None:
    clips(lambda parameters: clip_grad_norm_(parameters, 1.0, foreach=False))


def takes_a_norm_by_torch() -> None:
    clips(lambda parameters: get_total_norm([p.grad for p in parameters if p.grad is not None]))


class ClipsAll(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([x.norm() for x in gradients if x is not None]).norm()
        torch._foreach_div_([x for x in gradients if x is not None], norm.clamp(min=1.0))
        super().step()


def norm_in_a_step() -> None:
    module = make_model("mlp")
    HybridParallel(module, ClipsAll(module.parameters(), lr=0.1), num_stages=2)


CASES: dict[str, tuple[Callable[[], None], str]] = {
    "plain loop": (plain_loop, "write loss = model.train_step(inputs, targets, loss_fn)"),
    "unknown schedule": (unknown_schedule, "'gpipe', '1f1b', 'interleaved', 'auto' are allowed"),
    "other chunks": (
        two_chunks_are_four_parts,
        "balance=[4, 5] makes 2 chunks, but num_stages=2, ",
    ),
    "ties two chunks": (ties_two_chunks, "and would be in several chunks of one stage"),
    "other stages": (other_stages, "num_stages=3: a replica of this job has 2 processes"),
    "changes a skip": (changes_a_skip, "stage 1 changes a tensor in place that shares memory"),
    "changes a skip later": (changes_a_skip_later, "chunk 2 changes a tensor in place that shares"),
    "skips an object": (skips_an_object, "the skip connection 'kept' is or holds a object"),
    "stashes seldom": (stashes_seldom, "'kept' was not stashed in this forward"),
    "stashes twice": (
        stashes_twice,
        "the skip connection 'kept' is stashed in stage 0 and 1 and popped in stage 1: one layer",
    ),
    "targets": (too_few_targets, "targets has 10 samples and inputs has 11"),
    "a layer": (layer_fails, "stage 1 (cpu), layer '1' (Odd): too few samples for Odd"),
    "the loss": (loss_fails, "no loss today"),
    "clipping": (clips_by_torch, "write model.clip_grad_norm_(max_norm)"),
    "a norm in a step": (norm_in_a_step, "optimizer is a ClipsAll, whose step() combines the"),
    "a norm": (takes_a_norm_by_torch, "write model.clip_grad_norm_(max_norm)"),
    "other layer": (layer_of_another, "is in the process of stage"),
}


def said(name: str) -> str:
    init_process_group("gloo", timeout=60.0)
    try:
        CASES[name][0]()
    except Exception as error:  # which is told to the test
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("name", list(CASES))
def test_one_sentence(name: str) -> None:
    """One stage may only see that the other is gone, and says that."""
    (stages,) = run_stages(said, 1, 2, name)
    assert any(CASES[name][1] in text for text in stages), stages
    for text in stages:
        assert CASES[name][1] in text or text.startswith(("ReplicaBrokenError", "nothing")), text


def test_a_schedule_needs_processes() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("processes_per_replica=2")):
        wrapped(make_model("mlp"), schedule="1f1b")


@pytest.mark.parametrize(
    ("schedule", "several", "message"),
    [
        ("1f1b", 2, "chunks_per_stage=2 with schedule='1f1b': only schedule='interleaved'"),
        ("interleaved", 1, "chunks_per_stage=1: a whole number of at least 2"),
        ("interleaved", True, "chunks_per_stage=True: a whole number of at least 2"),
        ("interleaved", 2.0, "chunks_per_stage=2.0: a whole number of at least 2"),
        ("interleaved", 2, "processes_per_replica=2"),
    ],
)
def test_chunks(schedule: str, several: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        wrapped(make_model("mlp"), schedule=schedule, chunks_per_stage=several)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_one_stage_needs_none(schedule: str) -> None:
    """A scheduler may choose one stage for a script that names a schedule."""
    model = wrapped(make_model("mlp"), num_stages=1, schedule=schedule)
    assert float(model.train_step(INPUTS, TARGETS, F.cross_entropy)) > 0.0


@pytest.mark.parametrize("processes", [0, 1.5, True, "2"])
def test_processes_per_replica(processes: Any) -> None:
    with pytest.raises(ConfigurationError, match="processes_per_replica"):
        init_process_group("gloo", processes_per_replica=processes)


def test_all_processes_of_a_replica_are_on_one_node() -> None:
    told = {"WORLD_SIZE": "6", "RANK": "4", "LOCAL_WORLD_SIZE": "3"}
    with pytest.raises(ConfigurationError, match="--nproc-per-node=2, or a multiple"):
        JobEnvironment.read(told, processes_per_replica=2)


def test_replicas_and_stages_are_told_from_ranks() -> None:
    """A scheduler's number of processes overrides the script's."""
    told = {"WORLD_SIZE": "12", "RANK": "7", "LOCAL_WORLD_SIZE": "6", "LOCAL_RANK": "1"}
    env = JobEnvironment.read(
        {**told, "PIPOLLUX_PROCESSES_PER_REPLICA": "3"}, processes_per_replica=2
    )
    assert (env.num_replicas, env.rank, env.stage, env.local_rank) == (4, 2, 1, 0)
    assert (env.world_size, env.world_rank, env.num_nodes, env.leads) == (12, 7, 2, False)


def leaves_and_lives_on(ended: Path) -> str:
    init_process_group("gloo")
    model = wrapped(nn.Sequential(Odd(), nn.Linear(6, 6), nn.Linear(6, 3)).double())
    try:
        model.train_step(INPUTS, TARGETS, F.cross_entropy)
    except SynchronizationError as error:
        ended.touch()
        return str(error)
    except ValueError as error:
        destroy_process_group()
        until(ended.exists, "the other stage learns that this one has left", 60.0)
        assert model.num_stages == 2, "it is held until here, with the groups of its stages"
        return str(error)
    return "nothing"


def test_a_process_that_has_left_and_lives_on_is_waited_for_no_longer(tmp_path: Path) -> None:
    ((first, last),) = run_stages(leaves_and_lives_on, 1, 2, tmp_path / "ended")
    assert "too few samples for Odd" in first
    assert "rank 1 of 2 lost its peers while passing micro-batches between stages" in last
