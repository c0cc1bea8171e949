"""Optimizer state divided among replicas: the same bits as without, and a share of the state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    GradScaler,
    HybridParallel,
    init_process_group,
    num_replicas,
    remaining_epochs_until,
    replica_rank,
    save_all_states,
)
from pipollux_hybrid.checkpoint.optimizer_shards import give_out
from pipollux_hybrid.checkpoint.storage import find, parts_of
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.optim.gradient_noise_scale import MeasuredNoise
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.extent import first
from tests.hybrid.models import make_data
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import Case, Trained, run_stages, train

PASSED = 17
"""Iterations of a run."""
SAMPLES = 55
"""Batches of 12, and of 24 from the second epoch on: the last is short, and uneven."""
Groups = list[dict[str, Any]]
OPTIMIZERS: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "foreach": lambda groups: torch.optim.Adam(groups, lr=0.01, foreach=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.5),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=0.01),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=0.05),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
}


KINDS, DTYPES = ["sgd", "adam", "adamw"], [torch.float32, torch.float64]
USUAL = ("adam", torch.float32, 2), ("sgd", torch.float64, 3), ("adamw", torch.float64, 1)
CASES = list(dict.fromkeys((*USUAL, *itertools.product(KINDS, DTYPES, [1, 2, 3]))))
"""Optimizer, type of the parameters, number of replicas."""
ADAMS = torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam


class Unused(nn.Module):
    """Has a parameter that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x


def make_module(dtype: torch.dtype) -> nn.Sequential:
    """Inputs [batch, 6], outputs [batch, 3]; the second layer is frozen."""
    torch.manual_seed(5)
    module = nn.Sequential(
        nn.Linear(6, 16), nn.Linear(16, 16), nn.Tanh(), Unused(), nn.Linear(16, 8), nn.Linear(8, 3)
    )
    module[1].requires_grad_(False)
    return module.to(dtype)


def make_groups(module: nn.Sequential) -> Groups:
    """The weights and the biases, which have a learning rate of their own."""
    weights = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    return [
        {"params": weights, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0, "lr": 0.004},
    ]


@pytest.fixture(autouse=True)
def no_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


class Stopped(Exception):  # noqa: N818  # it is no error
    """The job ends here, right after a checkpoint."""


class Run:
    """A training script, and what came of each pass of its loop's body.

    Args:
        kind: Which of OPTIMIZERS.
        dtype: Of the parameters.
        sharded: ``shard_optimizer``.
        scale: Of the loss at first, for a GradScaler; None: without.
        stops_after: Steps after which the job ends, with a checkpoint.
    """

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        *,
        sharded: bool,
        scale: float | None = None,
        stops_after: int | None = None,
    ) -> None:
        contexts.reset()
        init_process_group("gloo")
        self.module = make_module(dtype)
        self.optimizer = OPTIMIZERS[kind](make_groups(self.module))
        self.loader = AdaptiveDataLoader(make_data("mlp", SAMPLES, dtype), 12, shuffle=True)
        self.loader.autoscale_batch_size(24, (1, 4), gradient_accumulation=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.model = HybridParallel(
            self.module,
            self.optimizer,
            num_stages=2,
            num_microbatches=2,
            lr_scheduler=self.schedule,
            shard_optimizer=sharded,
        )
        self.scaler = GradScaler(
            "cpu",
            init_scale=scale or 1.0,
            backoff_factor=2.0**-100,
            growth_factor=2.0**100,
            growth_interval=7,
            enabled=scale is not None,
        )
        self.numbers: list[float] = []
        self.stepped: list[list[Tensor]] = []
        self.optimizer.register_step_pre_hook(lambda *_: self._note_gradients())
        self.optimizer.register_step_post_hook(lambda *_: self._note_parameters())
        self._stops_after, self._background = stops_after, sharded
        with suppress(Stopped):
            self._train()

    def _train(self) -> None:
        for epoch in remaining_epochs_until(5):
            if epoch == 1 and num_replicas() <= 3:
                context().component(Metrics)._proposal = 4, 6 // num_replicas() - 1, 0
            for inputs, targets in self.loader:
                if len(self.stepped) == 2 * (self._stops_after or PASSED + 1):
                    save_all_states(background=self._background)
                    raise Stopped
                self._body(inputs, targets)

    def _body(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = self.model.clip_grad_norm_(0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        metrics, noise = context().component(Metrics), context().component(MeasuredNoise).scale
        self.numbers += [float(norm), self.model.gain, metrics.rate_factor]
        self.numbers += [] if noise is None else [*noise.to_json()["sqr"], *noise.to_json()["var"]]
        self.numbers += [self.scaler.get_scale(), self.optimizer.param_groups[1]["lr"]]

    def _note_gradients(self) -> None:
        """As a hook of the script's sees them: all are there."""
        self.stepped.append(
            [torch.ones(1) * (p.grad is not None) for p in self.module.parameters()]
            + [p.grad.clone() for p in self.module.parameters() if p.grad is not None]
        )

    def _note_parameters(self) -> None:
        self.stepped.append([p.detach().clone() for p in self.module.parameters()])

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state that this replica holds, without the numbers of steps."""
        tensors = [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in tensors if isinstance(x, Tensor) and x.dim() > 0)


def same(one: Any, other: Any) -> bool:
    """Whether two nested lists of tensors and numbers are the same to the last bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(x, other[name]) for name, x in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def compare(kind: str, dtype: torch.dtype, scale: float | None) -> tuple[bool, int, int, int]:
    whole = Run(kind, dtype, sharded=False, scale=scale)
    expected = whole.numbers, whole.stepped
    ours = Run(kind, dtype, sharded=True, scale=scale)
    noise = context().component(MeasuredNoise).scale
    assert noise is not None
    assert noise.preconditioned == isinstance(ours.optimizer, ADAMS)
    assert whole.model.gain > 1.0, "the noise was never measured"
    equal = same(expected, (ours.numbers, ours.stepped))
    return equal, whole.state_bytes(), ours.state_bytes(), len(ours.stepped)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_undivided_optimizer(case: tuple[str, torch.dtype, int]) -> None:
    """Groups, a frozen layer, an unused one, accumulation, short batches, clipping, a schedule."""
    kind, dtype, size = case
    results = run_replicas(compare, size, kind, dtype, None)
    assert all(equal for equal, *_ in results)
    assert sum(ours for _, _, ours, _ in results) == results[0][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS.keys() - {"sgd", "adam", "adamw"}))
def test_bits_are_the_same_with_every_optimizer_that_may_be_divided(kind: str) -> None:
    results = run_replicas(compare, 2, kind, torch.float32, None)
    assert all(equal for equal, *_ in results)
    assert sum(ours for _, _, ours, _ in results) == results[0][1]


@pytest.mark.parametrize(("kind", "size"), [("adam", 2), ("sgd", 3)])
@pytest.mark.exhaustive
def test_bits_are_the_same_where_a_scaler_leaves_steps_out(kind: str, size: int) -> None:
    """The first scale is so large that gradients are infinite."""
    results = run_replicas(compare, size, kind, torch.float32, 2.0**127)
    assert all(equal for equal, *_ in results)
    assert results[0][3] < 2 * PASSED, "no step was left out"


def parts(widths: list[int]) -> tuple[int, list[int]]:
    """Bytes of Adam's state that a replica holds after a step, and which parameters it is of."""
    init_process_group("gloo")
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    model = HybridParallel(module, optimizer, shard_optimizer=True)
    model(torch.full((2, widths[0]), replica_rank() + 1.0)).sum().backward()
    optimizer.step()
    held = [i for i, p in enumerate(module.parameters()) if p in optimizer.state]
    tensors = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    return sum(x.nbytes for x in tensors), held


@pytest.mark.parametrize("size", first(1, [2, 3]))
def test_each_replica_holds_its_share_of_the_state(size: int) -> None:
    widths = [64, 96, 64, 32, 96, 48]
    results = run_replicas(parts, size, widths)
    total = 2 * 4 * sum((a + 1) * b for a, b in itertools.pairwise(widths))
    held = sorted(number for _, numbers in results for number in numbers)
    assert held == list(range(10))
    assert sum(share for share, _ in results) == total
    assert max(share for share, _ in results) <= total / size * 1.2


def test_the_largest_is_given_out_first_to_who_has_least() -> None:
    assert give_out([8, 5, 4, 1], 2) == [0, 1, 1, 0]
    assert give_out([8, 5, 4, 1], 1) == [0, 0, 0, 0]
    assert give_out([1], 3) == [0]


class Coupled(torch.optim.SGD):
    """Scales its step by the norm over all parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the test's optimizer takes none
        del closure


class Named(torch.optim.SGD):
    """Another name for a known one."""


@pytest.mark.parametrize("sharded", ["yes", 1, None])
def test_the_option_is_a_truth_value(sharded: Any) -> None:
    module = make_module(torch.float32)
    with pytest.raises(ConfigurationError, match=r"shard_optimizer=.*True, for replicas that each"):
        HybridParallel(
            module, torch.optim.SGD(module.parameters(), lr=0.1), shard_optimizer=sharded
        )


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, Coupled])
def test_an_optimizer_that_may_couple_parameters_is_refused(kind: Any) -> None:
    module = make_module(torch.float32)
    with pytest.raises(ConfigurationError, match=rf"shard_optimizer=True with {kind.__name__}, .*"):
        HybridParallel(module, kind(module.parameters(), lr=0.1), shard_optimizer=True)
    contexts.reset()
    HybridParallel(module, Named(list(module.parameters()), lr=0.1), shard_optimizer=True)


def part(kind: str, sharded: bool, stops_after: int | None) -> tuple[list[Any], int]:
    run = Run(kind, torch.float64, sharded=sharded, stops_after=stops_after)
    return run.stepped, run.state_bytes()


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("adam", (2, True), (1, False)),
        pytest.param("adagrad", (1, False), (3, True), marks=pytest.mark.exhaustive),
        pytest.param("adamw", (3, True), (2, True), marks=pytest.mark.exhaustive),
        pytest.param("sgd", (2, False), (2, True), marks=pytest.mark.exhaustive),
        pytest.param("adamw", (2, True), (2, False), marks=pytest.mark.exhaustive),
        pytest.param("adafactor", (2, True), (3, True), marks=pytest.mark.exhaustive),
    ],
)
def test_a_checkpoint_goes_from_any_replicas_to_any(
    kind: str, before: tuple[int, bool], after: tuple[int, bool], tmp_path: Path
) -> None:
    """What is written is what the undivided optimizer writes, so both go on to the same bits."""
    ends = {}
    for name, begin in {"divided": before, "whole": (before[0], False)}.items():
        environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / name)}
        run_replicas(part, begin[0], kind, begin[1], 6, environment=environment)
        then = after if name == "divided" else (after[0], False)
        ends[name] = run_replicas(part, then[0], kind, then[1], None, environment=environment)
    assert 0 < len(ends["whole"][0][0]) < 2 * PASSED, "nothing was restored"
    assert all(same(ours, ends["whole"][0][0]) for ours, _ in ends["divided"])
    held = sum(size for _, size in ends["divided"])
    assert held == ends["whole"][0][1] * (1 if after[1] else after[0])


def train_and_save(case: Case) -> Trained:
    init_process_group("gloo")
    trained = train("mlp", case, 2, adam=True)
    save_all_states()
    return trained


@pytest.mark.exhaustive
def test_where_each_stage_has_a_process_its_replicas_divide_the_state(tmp_path: Path) -> None:
    trained, saved = [], []
    for sharded in (False, True):
        environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / str(sharded))}
        case = Case("never", 1, "1f1b", sharded)
        trained.append(run_stages(train_and_save, 2, 2, case, environment=environment))
        directory = find(tmp_path / str(sharded)).directory
        assert directory is not None
        parts = [torch.load(path, weights_only=True) for path in parts_of(directory, "model.pt")]
        saved.append([[part["model"], part["optimizer"]["state"]] for part in parts])
    whole, divided = trained
    assert same([[list(x) for x in r] for r in whole], [[list(x) for x in r] for r in divided])
    assert len(saved[0]) == 2
    assert all(len(state) for _, state in saved[0])
    assert same(*saved)
