"""Sums over replicas and restarts: nothing lost, nothing counted twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from pipollux_hybrid import (
    Accumulator,
    AdaptiveDataLoader,
    ConfigurationError,
    SynchronizationError,
    init_process_group,
    remaining_epochs_until,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.extent import first
from tests.hybrid.replicas import run_replicas

SIZE = 23


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def test_alone() -> None:
    accum = Accumulator({"begin": 2}, other=1.5)
    accum["n"] += 3
    accum["n"] -= 1
    accum["loss"] += torch.tensor(0.1)
    accum["seen"] += torch.tensor([True, False])
    accum["seen"] += torch.tensor([True, True])
    accum += {"n": 5, 7: 1}
    accum.subtract(begin=1)
    accum -= {"other": 0.5}
    with accum.synchronized():
        assert accum["n"] == 7
        assert isinstance(accum["n"], int)
        assert accum["loss"].dtype is torch.float64
        assert accum["seen"].tolist() == [2, 1]
        assert {key: accum[key] for key in ("begin", "other", 7)} == {
            "begin": 1,
            "other": 1.0,
            7: 1,
        }
        accum["mean"] = accum["loss"] / accum["n"]
        del accum["seen"]
        with accum.synchronized():
            assert "seen" not in accum
        accum.clear()
    accum["n"] += 1
    with accum.synchronized():
        assert dict(accum) == {"n": 1}


@pytest.mark.parametrize(
    "read",
    [
        lambda accum: float(accum["x"]),
        lambda accum: accum["x"] / 2,
        lambda accum: f"{accum['x']:.3f}",
        lambda accum: print(accum["x"]),
        lambda accum: accum["x"] > 0,
        lambda accum: 1 + accum["x"],
        lambda accum: "x" in accum,
        dict,
        len,
    ],
)
def test_read_outside_of_synchronized(read: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"read outside of synchronized\(\)"):
        read(Accumulator())


def test_misuse() -> None:
    accum = Accumulator()
    with pytest.raises(ConfigurationError, match=r"'x'\] was set outside of synchronized"):
        accum["x"] = 5
    with pytest.raises(ConfigurationError, match=r"'x'\] was set outside of synchronized"):
        accum["x"] = accum["y"] + 1
    with pytest.raises(ConfigurationError, match=r"'x'\] was given a str"):
        accum["x"] += "five"
    with pytest.raises(ConfigurationError, match=r"key \(1, 2\) is a tuple"):
        accum[1, 2] += 1  # type: ignore[index]  # what is tested
    accum["v"] += torch.ones(2)
    with pytest.raises(ConfigurationError, match=r"shape \(2,\) and was given shape \(3,\)"):
        accum["v"] += torch.ones(3)
    with (
        accum.synchronized(),
        pytest.raises(ConfigurationError, match=r"'x'\] was added to inside synchronized"),
    ):
        accum.update(x=1)


def over_replicas() -> tuple[list[tuple[Any, Any]], float]:
    init_process_group("gloo")
    rank = context().env.rank
    accum = Accumulator()
    accum["n"] += rank + 1
    accum[f"mine-{rank}"] += torch.full((2,), 0.5)
    with accum.synchronized():
        found = sorted((k, v.tolist() if torch.is_tensor(v) else v) for k, v in accum.items())
        accum["n"] *= 10
    accum["n"] += 1
    with accum.synchronized():
        return found, accum["n"]


def test_sums_over_replicas() -> None:
    halves = [0.5, 0.5]
    expected = ([("mine-0", halves), ("mine-1", halves), ("mine-2", halves), ("n", 6)], 63)
    assert run_replicas(over_replicas, 3) == [expected] * 3


def count_samples() -> tuple[int, float]:
    init_process_group("gloo")
    accum = Accumulator()
    data = TensorDataset(torch.arange(1.0, 6.0))
    for _ in remaining_epochs_until(1):
        for (values,) in AdaptiveDataLoader(data, batch_size=4):
            accum["count"] += len(values)
            accum["sum"] += values.sum()
    with accum.synchronized():
        return accum["count"], float(accum["sum"])


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_batch_that_only_keeps_step_is_not_counted(num_replicas: int) -> None:
    """The last batch has one sample, which one replica takes; the others work for nothing."""
    assert run_replicas(count_samples, num_replicas) == [(5, 15.0)] * num_replicas


def differ_in_the_block() -> str:
    init_process_group("gloo")
    accum = Accumulator(n=1)
    with accum.synchronized():
        accum["n"] = context().env.rank
    try:
        with accum.synchronized():
            return "went on"
    except SynchronizationError as error:
        return str(error)


def test_changes_that_depend_on_the_rank_are_found() -> None:
    for told in run_replicas(differ_in_the_block, 2):
        assert "totals of an Accumulator differ between replicas" in told


def epochs_of_sums(stop_at: tuple[int, str, int] | None) -> list[tuple[str, float, float]]:
    """Sums in two loops an epoch, by accumulators made once and in every epoch."""
    init_process_group("gloo")
    data = TensorDataset(torch.arange(SIZE))
    loaders = {
        "training": AdaptiveDataLoader(data, batch_size=4, shuffle=True),
        "evaluation": AdaptiveDataLoader(data, batch_size=6),
    }
    forever = Accumulator()
    forever["made"] += 1
    told = []
    for epoch in remaining_epochs_until(3):
        forever["epochs"] += 1
        own = Accumulator()
        for name, loader in loaders.items():
            for number, (batch,) in enumerate(loader):
                if (epoch, name, number) == stop_at:
                    save_all_states()
                    return told
                step = context().batch.micro_step
                assert step is not None
                forever["sum"] += int(batch[: step.num_samples].sum())
                own["sum"] += batch[: step.num_samples].sum()
            own["between"] += 1
            with own.synchronized():
                told.append((f"{epoch} {name}", float(own["sum"]), float(own["between"])))
                own["sum"] = 0
    with forever.synchronized():
        told.append(("all", forever["sum"], forever["epochs"] + 1000 * forever["made"]))
    return told


@pytest.mark.parametrize(
    "stop_at",
    first(2, [(1, "training", 2), (1, "evaluation", 2), (0, "training", 0), (2, "evaluation", 1)]),
)
def test_restarted_with_other_replicas(tmp_path: Path, stop_at: tuple[int, str, int]) -> None:
    """Stopped in either loop of an epoch: what is told later is as if it had not been."""
    total = float(sum(range(SIZE)))
    env = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    before = run_replicas(epochs_of_sums, 2, stop_at, environment=env)
    after = run_replicas(epochs_of_sums, 2, None, environment=env)
    assert before[0] == before[1]
    assert after[0] == after[1]
    # Code between loops is run by both replicas, and what it adds counts twice.
    expected = [
        (f"{epoch} {name}", total, between)
        for epoch in range(3)
        for name, between in (("training", 2.0), ("evaluation", 4.0))
    ]
    # The epoch under way is told once more from its beginning, with the same numbers.
    resumed = next(i for i, row in enumerate(expected) if row[0].startswith(f"{stop_at[0]} "))
    told = [*before[0][:resumed], *after[0]]
    assert told == [*expected, ("all", 6 * total, 2 * 3 + 2000)]


def test_from_three_replicas_to_one(tmp_path: Path) -> None:
    env = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}
    run_replicas(epochs_of_sums, 3, (1, "evaluation", 1), environment=env)
    (after,) = run_replicas(epochs_of_sums, 1, None, environment=env)
    assert after[-1][:2] == ("all", 6.0 * sum(range(SIZE)))
