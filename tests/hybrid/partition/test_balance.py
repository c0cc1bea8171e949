"""Where the layers are cut: what a profile measures, what is balanced, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchgpipe.skip import Namespace, pop, skippable, stash

from pipollux_hybrid import ConfigurationError, HybridParallel, init_process_group, profile_layers
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.partition import layer_profiler
from pipollux_hybrid.partition.balance import (
    PartitionRequest,
    choose_balance,
    measure_layers,
)
from pipollux_hybrid.partition.layer_memory import optimizer_bytes
from pipollux_hybrid.partition.layer_profiler import _line
from pipollux_hybrid.partition.tied_parameters import blocks_of, find_ties
from pipollux_perfmodel import LayerProfile, stage_memory
from pipollux_perfmodel.timing.params import Checkpoint
from tests.hybrid.clock import Clock, PerSample, Work
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def wrap(module: nn.Sequential, **options: Any) -> HybridParallel:
    return HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What layers are measured by; where they do not say otherwise they take no time."""
    clock = Clock()
    monkeypatch.setattr(layer_profiler, "time", SimpleNamespace(perf_counter=clock))
    return clock


def test_times_are_those_of_the_layers(clock: Clock) -> None:
    layers = PerSample(clock, 0.004, 0.0), PerSample(clock, 0.0, 0.001), Work(clock, 0.003)
    profile = profile_layers(nn.Sequential(*layers), torch.randn(16, 4))
    forward, backward = profile.forward_seconds(16.0), profile.backward_seconds(16.0)
    assert forward == pytest.approx([0.004, 0.016, 0.003])
    assert backward == pytest.approx([0.0, 0.0, 0.006]), "nothing but the last needs a gradient"


def test_lines_are_fitted_to_relative_errors_and_never_fall() -> None:
    assert _line([4, 8, 16], [5.0, 9.0, 17.0]) == pytest.approx((1.0, 1.0))
    assert _line([4, 8, 16], [3.0, 3.0, 3.0]) == pytest.approx((3.0, 0.0))
    alpha, beta = _line([4, 8, 16], [3.2, 3.0, 2.9])
    assert beta == 0.0
    assert 2.9 < alpha < 3.2
    assert _line([4, 8], [1.0, 3.0])[0] == 0.0
    assert _line([4, 8], [0.0, 0.0]) == (0.0, 0.0)


def test_the_model_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    profile_layers(module, torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in module.parameters())
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_bytes_are_those_that_autograd_keeps() -> None:
    """Counted by hand: float32, 8 samples."""
    module = nn.Sequential(
        nn.Linear(4, 16),  # keeps its input: 4 numbers
        nn.Tanh(),  # keeps its output: 16
        nn.Linear(16, 2),  # its input is kept already
        nn.Flatten(),  # keeps nothing
        nn.Softmax(dim=1),  # keeps its output: 2
    )
    optimizer = torch.optim.Adam(module.parameters())
    profile = profile_layers(module, torch.randn(8, 4), optimizer=optimizer)
    assert [layer.activation_bytes / 4 for layer in profile.layers] == [4, 16, 0, 0, 2]
    assert [layer.output_bytes / 4 for layer in profile.layers] == [16, 16, 2, 2, 2]
    assert [layer.parameter_bytes / 4 for layer in profile.layers] == [80, 0, 34, 0, 0]
    assert [layer.optimizer_bytes / 4 for layer in profile.layers] == [160, 0, 68, 0, 0]
    assert profile.input_bytes == 16


def test_frozen_layers_have_no_backward_and_no_gradients() -> None:
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.BatchNorm1d(2))
    module[0].requires_grad_(False)
    first, second, third, norm = profile_layers(module, torch.randn(8, 4)).layers
    assert first.parameter_bytes == 0
    assert first.optimizer_bytes == 80 * 4
    assert first.backward_alpha == first.backward_beta == 0
    assert second.backward_alpha == second.backward_beta == 0
    assert third.backward_alpha + third.backward_beta > 0
    assert norm.optimizer_bytes == 2 * 2 * 4 + 8, "running statistics, and a count"


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
        (lambda p: torch.optim.Adagrad(p), 1),
    ],
)
def test_optimizers_are_asked_what_they_keep(make: Any, rate: float) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert optimizer_bytes(make([parameter])) == {parameter: rate}


@skippable(stash=["early"])
class Early(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("early", x * 2)
        return x + 1


@skippable(pop=["early"])
class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return self.linear(x) + early


class Split(nn.Module):
    """To a tuple of floats, whole numbers and truth values."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.argmax(1), x > 0


class Join(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, index, mask = parts
        assert not index.is_floating_point()
        assert mask.dtype == torch.bool
        return x * mask + index[:, None]


def test_skip_connections_tuples_and_any_dtype() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Early(), nn.ReLU(inplace=True), Split(), Join(), Late())
    profile = profile_layers(module, torch.randn(8, 4))
    assert profile.num_layers == 6
    assert profile.layers[3].output_bytes == 4 * 4 + 8 + 4 + 4 * 4, "the skip crosses the cut, too"
    assert profile.layers[0].output_bytes == profile.layers[5].output_bytes == 4 * 4
    assert profile.layers[1].activation_bytes >= 16, "what is stashed is kept"
    assert profile.layers[5].backward_alpha + profile.layers[5].backward_beta > 0


def test_skip_connections_within_a_layer_and_out_of_it() -> None:
    inner = Namespace()
    layer = nn.Sequential(Early(), Early().isolate(inner), nn.Tanh(), Late().isolate(inner))
    profile = profile_layers(
        nn.Sequential(layer, nn.Tanh(), nn.Sequential(Late())), torch.ones(8, 4)
    )
    assert [layer.output_bytes for layer in profile.layers] == [4 * 8, 4 * 8, 4 * 4]


def test_one_sample_is_enough_even_for_batch_normalisation() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert profile_layers(module, torch.randn(1, 4)).num_layers == 2


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"layer '1' \(Linear\) fails on the inputs"):
        profile_layers(nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 4)), torch.randn(8, 4))
    with pytest.raises(ConfigurationError, match=r"example_inputs holds no tensor"):
        profile_layers(nn.Sequential(nn.Linear(4, 5)), 3)


def test_time_memory_and_parameters_cut_differently(clock: Clock) -> None:
    slow = [Work(clock, 0.006), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    sample = torch.randn(8, 4)

    def cut(**options: Any) -> HybridParallel:
        contexts.reset()
        module = nn.Sequential(*slow, nn.Linear(4, 4000))
        return wrap(module, num_stages=2, num_microbatches=2, **options)

    assert cut(example_inputs=sample).balance == [1, 4]
    assert cut(example_inputs=sample, balance="time").balance == [1, 4]
    assert cut().balance == cut(balance="parameters").balance == [4, 1]
    model = cut(example_inputs=sample, balance="memory")
    assert model.balance == [4, 1]
    profile = model.layer_profile
    assert profile is not None

    def largest(balance: list[int]) -> float:
        return float(stage_memory(profile, balance, 4, 2, checkpoint="except_last").max())

    assert largest(model.balance) == min(largest([n, 5 - n]) for n in range(1, 5))


def test_a_cut_has_to_fit(clock: Clock) -> None:
    def cut(**options: Any) -> HybridParallel:
        contexts.reset()
        module = nn.Sequential(Work(clock, 0.006), nn.Linear(4, 1000), nn.Linear(1000, 4))
        return wrap(
            module, example_inputs=torch.randn(8, 4), num_stages=2, num_microbatches=2, **options
        )

    assert cut(memory_limit=1e9).balance == [1, 2]
    # Each linear layer is 16 to 20 kB, with its gradients and a copy of them thrice that, and 32 kB
    # of activations.
    assert cut(memory_limit=95_000).balance == [2, 1]
    with pytest.raises(ConfigurationError, match=r"memory_limit is 10000 bytes but 2 stages need"):
        cut(memory_limit=10_000)
    with pytest.raises(ConfigurationError, match=r"balance=\[1, 2\]: stage 1 needs .* is 9.5e\+04"):
        cut(memory_limit=95_000, balance=[1, 2])


def test_a_given_cut_has_to_fit_in_the_mode_of_each_stage() -> None:
    module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(8)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    sample = torch.randn(800, 100)

    def cut(*modes: Checkpoint, limit: float | None = None) -> LayerProfile:
        request = PartitionRequest(
            num_stages=2,
            balance=[4, 4],
            example_inputs=sample,
            num_microbatches=8,
            checkpoint=modes or "never",
            schedule="1f1b",
            memory_limit=limit,
        )
        ctx = contexts.context()
        measured = measure_layers(ctx, module, optimizer, torch.device("cpu"), request)
        profile = choose_balance(ctx, module, request, measured).profile
        assert profile is not None
        return profile

    profile = cut()
    always, never = (
        stage_memory(profile, [4, 4], 100, 8, checkpoint=mode, schedule="1f1b")
        for mode in ("always", "never")
    )
    between = float(always[0] + never[0]) / 2
    assert never[1] < between < never[0]
    cut("always", "never", limit=between)
    with pytest.raises(ConfigurationError, match=r"balance=\[4, 4\]: stage 0 needs"):
        cut("never", "always", limit=between)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": "size"}, r"balance='size': .*'time', 'memory', 'parameters'"),
        ({"balance": "time"}, r"balance='time' needs to know .* pass example_inputs="),
        ({"memory_limit": 1e9}, r"memory_limit needs to know .* pass example_inputs="),
        (
            {"memory_limit": -1.0, "example_inputs": torch.ones(2, 6)},
            r"memory_limit=-1.0: bytes above 0",
        ),
    ],
)
def test_wrong_wishes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrap(make_model("mlp", torch.float32), num_stages=2, **options)


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(6, 6).double() for _ in range(5)])
    module[3].weight = module[1].weight
    return module


def test_tied_layers_are_found_by_name() -> None:
    (tie,) = find_ties(tied())
    assert str(tie) == "layers '1' and '3' share the parameter '1.weight'"
    assert blocks_of([tie], 5) == [1, 3, 1]


def test_a_chosen_cut_keeps_tied_layers_together() -> None:
    module, inputs = tied(), make_data("mlp", 8).tensors[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for sample in (None, inputs):
        request = PartitionRequest(
            num_stages=3, balance=None, example_inputs=sample, num_microbatches=4
        )
        ctx, device = contexts.context(), torch.device("cpu")
        measured = measure_layers(ctx, module, optimizer, device, request)
        assert choose_balance(ctx, module, request, measured).balance == [1, 3, 1]


def test_where_each_has_a_process_stages_share_parameters() -> None:
    """Each holds all of its layers, and what is hinted is cut anywhere."""
    module, inputs = tied(), make_data("mlp", 8).tensors[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    request = PartitionRequest(
        num_stages=2, balance=[2, 3], example_inputs=inputs, num_microbatches=4, ties_apart=True
    )
    ctx, device = contexts.context(), torch.device("cpu")
    measured = measure_layers(ctx, module, optimizer, device, request)
    cut = choose_balance(ctx, module, request, measured)
    found = cut.in_blocks()
    assert found is not None
    profile, balance = found
    assert balance == (2, 3)
    size = 8.0 * (36 + 6)
    assert [layer.parameter_bytes for layer in profile.layers] == [size] * 5


def test_tied_layers_apart_are_refused_by_name() -> None:
    shared = r"layers '1' and '3' share the parameter '1.weight'"
    with pytest.raises(ConfigurationError, match=rf"balance=\[2, 3\]: {shared}.*layers 1 to 3"):
        wrap(tied(), balance=[2, 3])
    with pytest.raises(ConfigurationError, match=rf"num_stages=4: {shared}.*at most 3 stages"):
        wrap(tied(), num_stages=4)


def test_parameters_without_a_shape_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(2))
    with pytest.raises(ConfigurationError, match=r"parameter '1.weight' of module has no shape"):
        HybridParallel(module, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def agreed(width: int) -> tuple[list[int], LayerProfile]:
    init_process_group("gloo")
    rank = contexts.context().env.rank
    # Rank 1 would measure quite another model, and cut it elsewhere.
    clock = Clock()
    measured = clock if rank == 0 else Clock()
    layer_profiler.time = SimpleNamespace(perf_counter=measured)  # in this process alone
    module = nn.Sequential(Work(clock, 0.004), *[nn.Linear(width, width) for _ in range(3)])
    model = wrap(module, example_inputs=torch.randn(4, width), num_stages=2, num_microbatches=2)
    assert model.layer_profile is not None
    return model.balance, model.layer_profile


def test_rank_0_measures_for_all() -> None:
    first, second = run_replicas(agreed, 2, 4)
    assert first == second
    assert first[0] == [1, 3]


def fails_on_rank_0() -> str:
    init_process_group("gloo")
    rank = contexts.context().env.rank
    sample = torch.randn(4, 5 if rank == 0 else 4)
    with pytest.raises(ConfigurationError) as refusal:
        wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), example_inputs=sample, num_stages=2)
    return str(refusal.value)


def test_a_failure_of_rank_0_reaches_all() -> None:
    first, second = run_replicas(fails_on_rank_0, 2)
    assert first == second
    assert "layer '0' (Linear) fails" in first


def test_the_cut_is_the_best_of_all_by_the_profile(clock: Clock) -> None:
    module = nn.Sequential(*[Work(clock, s / 1000) for s in (3, 1, 1, 2, 4, 1)])
    model = wrap(module, example_inputs=torch.ones(4, 2), num_stages=3, num_microbatches=2)
    profile = model.layer_profile
    assert profile is not None
    times = profile.forward_seconds(2.0) + profile.backward_seconds(2.0)

    def slowest(ends: tuple[int, ...]) -> float:
        return max(float(times[a:b].sum()) for a, b in itertools.pairwise((0, *ends, 6)))

    best = min(itertools.combinations(range(1, 6), 2), key=slowest)
    found = slowest(tuple(itertools.accumulate(model.balance))[:-1])
    assert found == pytest.approx(slowest(best))


def wraps_within(share: float, shard: bool, stages: int) -> bool:
    """Whether a limit of so much of what AdamW's undivided state asks for is taken."""
    init_process_group("gloo")
    module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    parameters = sum(p.nbytes for p in module.parameters()) / stages
    try:
        HybridParallel(
            module,
            torch.optim.AdamW(module.parameters()),
            num_stages=stages,
            num_microbatches=1,
            example_inputs=torch.randn(1, 32),
            memory_limit=parameters * 5 * share + 1e4,
            shard_optimizer=shard,
        )
    except ConfigurationError as refusal:
        assert "memory_limit is" in str(refusal)  # noqa: PT017  # the other outcome is none
        return False
    return True


@pytest.mark.parametrize(
    ("shard", "stages", "fits"),
    [(True, 1, True), (False, 1, False),
     # One process has the state of some layers, maybe all of one stage's.
     pytest.param(True, 2, False, marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_divided_optimizer_state_counts_as_divided(shard: bool, stages: int, fits: bool) -> None:
    """On two replicas: of five times the parameters, four and an eighth of the state's half."""
    assert run_replicas(wraps_within, 2, 0.88, shard, stages) == [fits] * 2
