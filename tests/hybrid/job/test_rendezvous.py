"""What all replicas must have in common is compared where they meet, and said on each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    SynchronizationError,
    init_process_group,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.agreement import by_value
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics
from tests.hybrid.replicas import run_replicas

Case = Callable[[int], dict[str, Any]]
"""What a replica of this rank does differently: arguments of :func:`wrap`."""


def plus(_self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + 1


def minus(_self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x - 1


CASES: dict[str, tuple[Case, str]] = {
    "stages": (lambda r: {"num_stages": 1 + r}, "num_stages is 1 on replica 0, and 2 on replica 1"),
    "balance": (
        lambda r: {"balance": [[1, 2], [2, 1]][r]},
        "balance is [1, 2] on replica 0, and [2, 1] on replica 1",
    ),
    "mode": (
        lambda r: {"activation_checkpoint": ["never", "always"][r]},
        "activation_checkpoint is never on replica 0, and always on replica 1",
    ),
    "buckets": (
        lambda r: {"bucket_bytes": 100 + r},
        "bucket_bytes is 100 on replica 0, and 101 on replica 1",
    ),
    "type on the wire": (
        lambda r: {"reduce_dtype": [None, torch.bfloat16][r]},
        "reduce_dtype is not set on replica 0, and torch.bfloat16 on replica 1",
    ),
    "micro-batches": (
        lambda r: {"num_microbatches": 1 + r},
        "num_microbatches is 1 on replica 0, and 2 on replica 1",
    ),
    "buffers": (
        lambda r: {"broadcast_buffers": bool(r)},
        "broadcast_buffers is False on replica 0, and True on replica 1",
    ),
    "learning rate": (
        lambda r: {"lr": 0.5 + r},
        "lr of the optimizer's group 0 is 0.5 on replica 0, and 1.5 on replica 1",
    ),
    "shapes": (
        lambda r: {"width": 4 + r},
        "parameter '0.weight' is float32 of shape (4, 6), trained, in group 0 of the optimizer on "
        "replica 0, and float32 of shape (5, 6), trained, in group 0 of the optimizer on replica 1",
    ),
    "layers": (
        lambda r: {"deep": bool(r)},
        "layer '3' is missing on replica 0, and Linear on replica 1",
    ),
    "code of a layer": (
        lambda r: {"layer": type("Own", (nn.Module,), {"forward": [plus, minus][r]})()},
        "code of Own '1' is ",
    ),
    "attributes of a layer": (
        lambda r: {"layer": nn.Dropout(0.1 + r / 10)},
        "p of Dropout '1' is 0.1 on replica 0, and 0.2 on replica 1",
    ),
    "optimizer": (
        lambda r: {"kind": [torch.optim.SGD, torch.optim.AdamW][r]},
        "optimizer is SGD on replica 0, and AdamW on replica 1",
    ),
}
"""What may differ, and what is then said."""


def wrap(
    width: int = 4,
    deep: bool = False,
    layer: nn.Module | None = None,
    lr: float = 0.1,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> tuple[HybridParallel, torch.optim.Optimizer]:
    layers = [nn.Linear(6, width), layer or nn.Tanh(), nn.Linear(width, 1)]
    module = nn.Sequential(*layers, *([nn.Linear(1, 1)] if deep else []))
    optimizer = kind(module.parameters(), lr=lr)
    return HybridParallel(module, optimizer, **options), optimizer


def differ_in_turn() -> dict[str, str]:
    """Be told of each difference; then train alike, as if nothing had been."""
    init_process_group("gloo", timeout=60)
    rank, told = context().env.rank, {}
    for name, (case, _) in CASES.items():
        with pytest.raises(ConfigurationError) as caught:
            wrap(**case(rank))
        told[name] = str(caught.value)
        contexts.reset()
    os.environ.update({"PIPOLLUX_CHECKPOINT_DIR": "/nowhere"} if rank == 0 else {})
    with pytest.raises(ConfigurationError) as caught:
        context()
    told["directory"] = str(caught.value)
    os.environ.pop("PIPOLLUX_CHECKPOINT_DIR", None)
    loops = {"batch": (32, (8, 16)[rank]), "data": ((32, 40)[rank], 8), "limits": (32, 8)}
    for name, (size, batch_size) in loops.items():
        told[name] = loop(batch_size, size, 64 if name == "limits" and rank == 1 else None)
        contexts.reset()
    told["alike"] = loop(8, 32)
    return told


def loop(batch_size: int, size: int, largest: int | None = None) -> str:
    """Train an epoch; what ended it before its time, if anything did."""
    model, optimizer = wrap()
    loader = AdaptiveDataLoader(TensorDataset(torch.ones(size, 6)), batch_size=batch_size)
    if largest is not None:
        loader.autoscale_batch_size(largest)
    try:
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    except SynchronizationError as error:
        return f"{context().component(Metrics).step} {error}"
    return "trained"


def test_whatever_differs_is_named_on_every_replica_at_once() -> None:
    for told in run_replicas(differ_in_turn, 2):
        for name, (_, sentence) in CASES.items():
            assert f"replicas differ in HybridParallel(…): {sentence}" in told[name]
            assert told[name].endswith("with the same script, arguments and environment")
        assert (
            "PIPOLLUX_CHECKPOINT_DIR is set on replica 0, and not set on replica 1"
            in (told["directory"])
        )
        for name, first, second in (
            ("batch", "samples=32, shuffle=False, seed=0, batch_size=8", "batch_size=16"),
            ("data", "samples=32, shuffle=False, seed=0, batch_size=8", "samples=40"),
            ("limits", "batch_size=8)", "autoscaled by BatchSizeLimits(init_batch_size=8, max"),
        ):
            assert told[name].startswith("0 replica "), "before the first step"
            assert "is at the beginning of loop 0 in epoch 0, over Adaptive" in told[name]
            assert first in told[name]
            assert second in told[name]
        assert told["alike"] == "trained"


ELASTIC = {"PIPOLLUX_RENDEZVOUS": "/nowhere"}
SCHEDULED = {"PIPOLLUX_ELASTIC": "1", "PIPOLLUX_ATTEMPT": "1"}
OVER_NCCL = {"PIPOLLUX_ELASTIC_NCCL": "1"}
GROUPS: dict[str, tuple[list[dict[str, str]], list[str], str]] = {
    "not over NCCL on one": (
        [ELASTIC | OVER_NCCL, ELASTIC],
        ["nccl", "nccl"],
        "PIPOLLUX_ELASTIC_NCCL is 1 on replica 0, and not set on replica 1",
    ),
    "over NCCL on one": (
        [SCHEDULED, SCHEDULED | OVER_NCCL],
        ["nccl", "nccl"],
        "PIPOLLUX_ELASTIC_NCCL is not set on replica 0, and 1 on replica 1",
    ),
    "backend": (
        [SCHEDULED | OVER_NCCL, SCHEDULED],
        ["gloo", "nccl"],
        "the backend is gloo on replica 0, and nccl on replica 1",
    ),
    "no folder on one": (
        [{}, ELASTIC],
        ["gloo", "gloo"],
        "PIPOLLUX_RENDEZVOUS is not set on replica 0, and set on replica 1",
    ),
}
"""What the processes are given, their backends, and what is then said."""


def differ_in_groups(name: str) -> str:
    settings, backends, _ = GROUPS[name]
    rank = int(os.environ["RANK"])
    os.environ.update(settings[rank])
    with pytest.raises(ConfigurationError) as caught:
        init_process_group(backends[rank], timeout=600)
    return str(caught.value)


@pytest.mark.parametrize("name", GROUPS)
def test_other_groups_on_a_replica_are_refused_at_once(name: str) -> None:
    """And not after the timeout of 600 s: the processes would never find each other."""
    for told in run_replicas(differ_in_groups, 2, name):
        assert f"replicas differ in their process groups: {GROUPS[name][2]}: start" in told


def gone() -> str:
    """Replica 1 ends before it wraps its model."""
    init_process_group("gloo", timeout=60)
    if context().env.rank == 1:
        os._exit(3)
    with pytest.raises(SynchronizationError) as caught:
        wrap()
    return str(caught.value)


def test_a_peer_that_ends_before_it_wraps_its_model() -> None:
    message, _ = run_replicas(gone, 2, exit_codes=(3,))
    assert "replica 0 of 2 lost its peers while comparing common settings" in message
    assert "its log says why" in message


def test_which_replicas_have_which_value() -> None:
    assert (
        by_value(["a", "b", "a", "c"])
        == "a on replicas 0, 2, and b on replica 1, and c on replica 3"
    )
