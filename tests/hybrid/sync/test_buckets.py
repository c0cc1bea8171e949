"""Buckets: what is in them, when they go, what they carry; and clipping what came back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    SynchronizationError,
    init_process_group,
    replica_rank,
)
from pipollux_hybrid.job.context import context
from pipollux_hybrid.sync import bucket as buckets
from pipollux_hybrid.sync.bucket import Bucket, make_buckets
from tests.extent import first, turns
from tests.hybrid.models import assert_close, gradients, make_data, make_model, plain_training
from tests.hybrid.replicas import run_replicas

ROWS = 8
MAX_NORM = 0.2


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_buckets_go_from_the_last_stage_to_the_first_and_are_filled_in_reverse() -> None:
    first, second = parameters(10, 10, 10), parameters(100, 5)
    found = make_buckets([first, second], 80, None)
    expected = [[second[1]], [second[0]], [first[2], first[1]], [first[0]]]
    assert [[id(p) for p in b.parameters] for b in found] == [
        [id(p) for p in group] for group in expected
    ]
    assert [b.stage for b in found] == [1, 1, 0, 0]


def test_sixteen_bits_fit_twice_as_much_and_types_do_not_mix() -> None:
    single, double = parameters(10, 10, 10, 10), parameters(10, 10, dtype=torch.float64)
    mixed = [single[0], double[0], single[1], double[1]]
    assert len(make_buckets([single], 80, None)) == 2
    assert len(make_buckets([single], 80, torch.bfloat16)) == 1
    assert sorted(len(b.parameters) for b in make_buckets([mixed], 10_000, None)) == [2, 2]
    assert len(make_buckets([mixed], 10_000, torch.float32)) == 1
    assert make_buckets([[], []], 80, None) == []


def test_a_sum_that_cannot_begin_is_told_where_the_others_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a group that was aborted as a replica is gone; a thread of autograd's begins it."""

    def all_reduce(*_: object, **__: object) -> None:
        raise RuntimeError("NCCL communicator was aborted")

    monkeypatch.setattr(buckets, "in_use", lambda: "a library")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    bucket = Bucket(1, parameters(3), torch.float32)
    for begin in (bucket.launch, bucket.relaunch):
        begin(1.0)
        with pytest.raises(
            SynchronizationError, match="averaging the gradients of stage 1"
        ) as info:
            bucket.wait()
        assert str(info.value.__cause__) == "NCCL communicator was aborted"
        bucket.wait()  # told once


def test_buckets_of_replicas_to_come_are_made_ahead() -> None:
    init_process_group("gloo")
    module = make_model("transformer")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    synchronizer = HybridParallel(module, optimizer, num_stages=2)._synchronizer
    use = synchronizer.prepare(2)
    assert synchronizer._reducer.buckets == []
    use()
    made = synchronizer._reducer.buckets
    assert sum(len(bucket.parameters) for bucket in made) == len(list(module.parameters()))
    synchronizer.rejoin(2)
    assert synchronizer._reducer.buckets is made
    synchronizer.prepare(3)()
    synchronizer.rejoin(3)
    assert synchronizer._reducer.buckets is made
    synchronizer.rejoin(1)
    assert synchronizer._reducer.buckets == []


def train(
    reduce_dtype: torch.dtype | None, bucket_bytes: int, dtype: torch.dtype, accumulate: bool
) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    init_process_group("gloo")
    module = make_model("transformer", dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(make_data("transformer", 21, dtype), batch_size=ROWS)
    if accumulate:
        loader.autoscale_batch_size(ROWS, (1, 2), gradient_accumulation=True)
    model = HybridParallel(
        module,
        optimizer,
        num_stages=2,
        num_microbatches=2,
        reduce_dtype=reduce_dtype,
        bucket_bytes=bucket_bytes,
        check_replicas=True,
    )
    history = []
    for number, (inputs, targets) in enumerate(loader):
        model.num_microbatches = 1 + number % 3
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        micro_step = context().batch.micro_step
        assert micro_step is not None
        if micro_step.is_optimizer_step:
            history.append(gradients(module))
        optimizer.step()
    return history, dict(module.state_dict())


def plain(dtype: torch.dtype) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    module = make_model("transformer", dtype)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    batches = [range(start, min(start + ROWS, 21)) for start in range(0, 21, ROWS)]
    data = make_data("transformer", 21, dtype)
    return plain_training(module, optimizer, data, batches), dict(module.state_dict())


@pytest.mark.parametrize(
    "bucket_bytes", first(1, [700, 1, 2**20]), ids=["split", "one each", "whole stage"]
)
def test_buckets_of_any_size(bucket_bytes: int) -> None:
    expected, final = plain(torch.float64)
    for history, parameters in run_replicas(train, 2, None, bucket_bytes, torch.float64, True):
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 1e-12)
        assert_close(parameters, final, 1e-11)


@pytest.mark.parametrize("accumulate", first(1, [True, False]))
def test_sixteen_bits_on_the_wire(accumulate: bool) -> None:
    """Three replicas: each gradient is rounded once when sent, and sums once at each hop."""
    expected, final = plain(torch.float32)
    results = run_replicas(train, 3, torch.bfloat16, 700, torch.float32, accumulate)
    for history, parameters in results:
        for ours, theirs in zip(history, expected, strict=True):
            assert_close(ours, theirs, 2e-2)
        assert_close(parameters, final, 1e-2)
        assert_close(parameters, results[0][1], 0.0)
    first = next(iter(expected[0]))
    assert not torch.equal(results[0][0][0][first], expected[0][first]), "it was rounded"


def early_buckets() -> list[tuple[int, int]]:
    """Stages of buckets as they go, with the gradients that stage 0 had received by then."""
    init_process_group("gloo")
    module = make_model("mlp")
    model = HybridParallel(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        balance=[5, 4],
        num_microbatches=3,
        activation_checkpoint="always",
    )
    seen: list[tuple[int, int]] = []
    received = [0]
    for parameter in model._engine.stages[0].parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: received.__setitem__(0, received[0] + 1)
        )
    launch = Bucket.launch

    def noted(bucket: Bucket, weight: float) -> None:
        seen.append((bucket.stage, received[0]))
        launch(bucket, weight)

    Bucket.launch = noted
    inputs, targets = make_data("mlp", 6)[list(range(6))]
    F.cross_entropy(model(inputs), targets).backward()
    return seen


def test_a_stage_is_sent_while_the_one_before_it_still_computes() -> None:
    for (stage, received), last in run_replicas(early_buckets, 2):
        assert stage == 1
        # Stage 0 has three linear layers, that is six parameters, reached by three micro-batches.
        assert received < 18
        assert last[0] == 0


@pytest.mark.parametrize("value", [torch.float16, torch.int32, "bf16"])
def test_other_types_on_the_wire_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"reduce_dtype=.*bfloat16 are allowed"):
        buckets.check_wire(value, 1, 1)


@pytest.mark.parametrize("value", [0, True, 2.5])
def test_buckets_of_no_size_are_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="bucket_bytes="):
        buckets.check_wire(None, value, 1)


def complex_gradients() -> dict[str, Tensor]:
    init_process_group("gloo")
    torch.manual_seed(5)
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    model = HybridParallel(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=0.1))
    inputs = torch.full((2, 3), 1.0 + replica_rank() * 1j)
    model(inputs).abs().square().sum().mul(0.5).backward()
    return gradients(layer)


def test_complex_parameters() -> None:
    torch.manual_seed(5)
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    for rank in (0, 1):
        layer(torch.full((2, 3), 1.0 + rank * 1j)).abs().square().sum().mul(0.25).backward()
    for ours in run_replicas(complex_gradients, 2):
        assert_close(ours, gradients(layer), 1e-6)


def clip(norm_type: float, accumulate: bool) -> tuple[list[float], dict[str, Tensor]]:
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader = AdaptiveDataLoader(make_data("mlp", 24), batch_size=ROWS)
    if accumulate:
        loader.autoscale_batch_size(ROWS, (1, 2), gradient_accumulation=True)
    model = HybridParallel(module, optimizer, num_stages=3, num_microbatches=2)
    norms = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        (10.0 * F.cross_entropy(model(inputs), targets)).backward()
        norms.append(float(model.clip_grad_norm_(MAX_NORM, norm_type)))
        optimizer.step()
    return norms, dict(module.state_dict())


@pytest.mark.parametrize(
    ("accumulate", "num_replicas", "norm_type"), turns([False, True], [1, 2], [2.0, math.inf])
)
def test_clipping_by_the_norm_over_all_stages(
    num_replicas: int, accumulate: bool, norm_type: float
) -> None:
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for start in range(0, 24, ROWS):
        inputs, targets = make_data("mlp", 24)[list(range(start, start + ROWS))]
        optimizer.zero_grad()
        (10.0 * F.cross_entropy(module(inputs), targets)).backward()
        expected.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM, norm_type)))
        optimizer.step()
    assert min(expected) > MAX_NORM, "everything was clipped"
    for norms, parameters in run_replicas(clip, num_replicas, norm_type, accumulate):
        assert_close(parameters, dict(module.state_dict()), 1e-11)
        steps = len(norms) // 3
        assert (steps > 1) == accumulate
        assert norms[steps - 1 :: steps] == pytest.approx(expected, rel=1e-11)
        # On accumulation steps: the last norm that was complete.
        assert all(math.isnan(norm) for norm in norms[: steps - 1])
        if accumulate:
            assert norms[steps] == norms[steps - 1]


def clip_what_is_not_finite() -> None:
    init_process_group("gloo")
    module = make_model("mlp")
    model = HybridParallel(module, torch.optim.SGD(module.parameters(), lr=0.1))
    (model(torch.ones(2, 6, dtype=torch.float64)).sum() * math.inf).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_norm_that_is_not_finite() -> None:
    run_replicas(clip_what_is_not_finite, 1)
