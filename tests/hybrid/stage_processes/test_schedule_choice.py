"""The schedule of a job that leaves it open: chosen by what earlier runs measured."""

from __future__ import annotations

import io
import itertools
import os
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    init_process_group,
    remaining_epochs_until,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.link_probe import measure_link
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_perfmodel import Schedule
from tests.extent import first_points
from tests.hybrid.models import assert_close
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages, together

BATCH_SIZE, WIDTH = 16, 8
Notes: TypeAlias = list[tuple[PipelineSchedule, float]]
"""Schedules that steps are noted of, each with how much longer they take than by the formula."""
FEW = 2
"""Micro-batches: so few that interleaved stages wait much less."""


class Ran(NamedTuple):
    """One run, in one process."""

    schedule: str
    chunks: int
    balance: list[int]
    losses: list[float]
    state: dict[str, Tensor]
    said: str
    """While the model was wrapped."""


def measured_as(order: PipelineSchedule, factor: float = 1.0) -> None:
    """Note steps of many seconds, so that nothing that is really measured counts beside them."""
    metrics, env = context().component(Metrics), context().env
    whole = env.processes_per_replica * 3.0 * factor
    for atomic_bsz, count in itertools.product((8, 16), (2, 4)):
        configuration = metrics.configuration(atomic_bsz)._replace(
            num_microbatches=count, schedule=order.schedule,
            chunks_per_stage=order.chunks_per_stage,
        )  # fmt: skip
        one = whole * atomic_bsz / count / 8
        stages = env.processes_per_replica * order.chunks_per_stage
        forward, backward = ((one / 3 * part / stages,) * stages for part in (1, 2))
        line = Schedule(order.schedule, forward, backward, count,
                        stages_per_device=order.chunks_per_stage)  # fmt: skip
        shares = tuple(x * order.chunks_per_stage for x in forward[: env.processes_per_replica])
        for _ in range(16):  # more than were really measured, as medians count
            metrics.profile.add_step(configuration, line.makespan, 0.0, optimizer=True)
            metrics.profile.add_stages(configuration, shares, tuple(2 * x for x in shares))


def run(
    num_epochs: int,
    schedule: str,
    notes: Notes,
    options: dict[str, Any],
) -> Ran:
    """Train as a script would; then note what steps by some schedules took."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        *(torch.randn(4 * BATCH_SIZE, WIDTH, generator=generator) for _ in range(2))
    )
    with redirect_stderr(io.StringIO()) as said:
        model = HybridParallel(
            module,
            optimizer,
            num_stages=context().env.processes_per_replica,
            activation_checkpoint="never",
            schedule=schedule,
            **{
                "num_microbatches": FEW,
                "example_inputs": torch.randn(BATCH_SIZE, WIDTH),
                **options,
            },
        )
    loader = AdaptiveDataLoader(data, batch_size=BATCH_SIZE)
    losses = []
    for _ in remaining_epochs_until(num_epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            losses.append(float(model.train_step(inputs, targets, F.mse_loss)))
            optimizer.step()
        for note in notes:
            measured_as(*note)
        context().component(Metrics).fit()
    spec = context().pipeline
    state = dict(module.state_dict())
    return Ran(spec.schedule, spec.chunks_per_stage, model.balance, losses, state, said.getvalue())


def run_each(folder: str, runs: list[tuple[str, Notes, dict[str, Any]]]) -> list[Ran]:
    """Run a script again and again; each run goes on from the checkpoint of the one before."""
    init_process_group("gloo")
    found = []
    os.environ["PIPOLLUX_CHECKPOINT_DIR"] = folder
    for number, (schedule, notes, options) in enumerate(runs):
        os.environ["PIPOLLUX_ATTEMPT"] = str(number + 1)
        contexts.reset()
        found.append(run(number + 1, schedule, notes, options))
    return found


def attempts(folder: Path, *runs: tuple[str, Notes, dict[str, Any]]) -> list[list[Ran]]:
    """Return what each stage had after each run."""
    (stages,) = run_stages(run_each, 1, 2, str(folder), list(runs))
    for several in zip(*stages, strict=True):
        assert len({(one.schedule, one.chunks, tuple(one.losses)) for one in several}) == 1
    return [list(several) for several in zip(*stages, strict=True)]


SEEN = [(PipelineSchedule("1f1b"), 1.0)]
SLOW = [(PipelineSchedule("interleaved", 2), 3.0)]


@pytest.mark.exhaustive
def test_runs_take_the_schedule_that_measurements_promise(tmp_path: Path) -> None:
    """From 1F1B to interleaved stages, and back when these turn out to be slow."""
    cut = {"balance": "memory"}  # times are measured, and by them a busy machine may cut otherwise
    runs = [("auto", SEEN, cut), ("auto", SLOW, cut), ("auto", [], cut)]
    first, second, third = attempts(tmp_path / "auto", *runs)
    assert [one[0].schedule for one in (first, second, third)] == ["1f1b", "interleaved", "1f1b"]
    assert (first[0].balance, second[0].balance) == ([2, 2], [1, 1, 1, 1])
    assert not any(one[1].said for one in (first, second, third))  # the leader alone
    said = [one[0].said for one in (first, second, third)]
    assert said[0].startswith("pipollux: schedule 1f1b: nothing was measured yet")
    assert said[1].startswith("pipollux: schedule interleaved (V=2): 1f1b ")
    assert "(M=2, atomic batch size 16)" in said[1]
    assert all(text.count("\n") == 1 for text in said)

    # What is trained is the same as by one schedule throughout.
    fixed = [("1f1b", [], {})] * 3
    *_, last = attempts(tmp_path / "fixed", *fixed)
    assert third[0].losses == pytest.approx(last[0].losses, rel=1e-5)
    assert_close(together([x.state for x in third]), together([x.state for x in last]), 1e-5)


@pytest.mark.parametrize(
    ("notes", "options", "chosen"),
    [
        # Eight per cent of the bubble are not worth a change: with many micro-batches.
        pytest.param(SEEN, {"num_microbatches": 16}, "1f1b", marks=pytest.mark.exhaustive),
        # A list of chunks' layers leaves no other.
        pytest.param(SEEN, {"balance": [1, 1, 1, 1]}, "interleaved", marks=pytest.mark.exhaustive),
        # Two layers to a stage are no chunks.
        (SEEN, {"balance": [2, 2]}, "1f1b"),
        # What its messages take is not known.
        pytest.param(SEEN, {"example_inputs": None}, "1f1b", marks=pytest.mark.exhaustive),
        # What was measured goes before what is predicted.
        pytest.param(
            [*SEEN, (PipelineSchedule("gpipe"), 0.5)], {}, "gpipe", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_the_choice_keeps_to_what_is_known_and_worth_it(
    tmp_path: Path, notes: Notes, options: dict[str, Any], chosen: str
) -> None:
    _, second = attempts(tmp_path, ("auto", notes, options), ("auto", notes, options))
    assert second[0].schedule == chosen


@pytest.mark.parametrize(
    ("room", "chosen"), first_points(1, [(4.5, "1f1b"), (16.0, "interleaved")])
)
def test_memory_that_interleaved_stages_lack(tmp_path: Path, room: float, chosen: str) -> None:
    """The first stage holds 5 quarters of 1F1B's activations, and both the same parameters."""
    # Gradients, a copy of them and AdamW's two, of two layers.
    state = (WIDTH * WIDTH + WIDTH) * 4 * (3 + 2) * 2
    activations = BATCH_SIZE // 4 * WIDTH * 4  # of a layer and a micro-batch
    options = {"num_microbatches": 4, "memory_limit": state + room * activations}
    *_, second = attempts(tmp_path, *[("auto", SEEN, options)] * 2)
    said = second[0].said
    assert second[0].schedule == chosen, said
    assert ("interleaved (V=2) does not fit" in said) == (chosen == "1f1b")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sample", [True, False])
def test_a_job_of_one_stage_goes_on_in_two(tmp_path: Path, sample: bool) -> None:
    """Its fit tells of any schedule: with layers of their own times, else as if cut evenly."""
    options: dict[str, Any] = {} if sample else {"example_inputs": None}
    alone = [("auto", [(PipelineSchedule("gpipe"), 1.0)], options)]
    ((first,),) = run_replicas(run_each, 1, str(tmp_path), alone)
    assert (first.schedule, first.balance, first.said) == ("gpipe", [4], "")
    (second, _), _ = zip(*attempts(tmp_path, *[("auto", [], options)] * 2), strict=True)
    assert second.losses == []  # the first of these runs finds its epoch done
    assert re.search(r": 1f1b [\d.e+]+ samples/s", second.said), second.said
    compared = r"interleaved \(V=2\) [\d.e+]+ samples/s" if sample else r"\(V=2\) not compared"
    assert re.search(compared, second.said), second.said
    assert sample or second.schedule == "1f1b"


def measured_link() -> list[float] | None:
    init_process_group("gloo")
    mesh = context().mesh
    assert mesh is not None
    link = measure_link(mesh, torch.device("cpu"), 1 << 20)
    assert all(len(told) == 1 for told in mesh.gather_from_stages(b"1"))  # all are free again
    return None if link is None else [link.latency, link.seconds(1 << 20)]


def test_two_of_three_stages_measure_messages() -> None:
    ((first, second, third),) = run_stages(measured_link, 1, 3)
    assert third is None
    for small, large in (first, second):
        assert 0 < small < large < 10.0


def refuse() -> str:
    init_process_group("gloo")
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError) as error:
        HybridParallel(module, optimizer, num_stages=2, schedule="auto", balance=[1, 2])
    # Four chunks need as many layers, so two layers leave the others.
    devices = [torch.device("cpu", k) for k in range(2)]
    options = {"schedule": "auto", "chunks_per_stage": 2, "devices": devices}
    assert HybridParallel(module, optimizer, num_stages=2, **options).devices == devices
    return str(error.value)


def test_what_no_schedule_can_do_is_refused() -> None:
    ((first, second),) = run_stages(refuse, 1, 2)
    assert first == second
    assert "balance=[1, 2] covers 3 layers, the module has 2" in first
