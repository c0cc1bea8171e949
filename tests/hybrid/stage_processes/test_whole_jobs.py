"""What a script sees is the same with either engine, also across restarts from one to the other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipollux_hybrid import AdaptiveDataLoader, HybridParallel, init_process_group
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.step_profile import StepProfile
from tests.hybrid.models import assert_close, make_data, make_model
from tests.hybrid.replicas import run_replicas
from tests.hybrid.stage_processes.training import run_stages, together
from tests.hybrid.stage_processes.whole_job import SIZE, Outcome, whole_job
from tests.hybrid.traces import rows_of

SMALL_BUCKET = 500
"""Bytes, so that each stage's gradients go in several buckets."""


def in_one_process(num_replicas: int, num_stages: int, *args: Any, **options: Any) -> list[Outcome]:
    return run_replicas(whole_job, num_replicas, num_stages, *args, **options)


def per_stage(num_replicas: int, num_stages: int, *args: Any, **options: Any) -> list[Outcome]:
    """Run with a process per stage; what each replica has, its stages' put together."""
    merged = []
    for stages in run_stages(whole_job, num_replicas, num_stages, num_stages, *args, **options):
        first = stages[0]
        for stage in stages:
            assert stage.losses == first.losses
            assert stage.norms == first.norms
            assert stage.noise == first.noise
            assert stage.summed == first.summed
            torch.testing.assert_close(stage.outputs, first.outputs, rtol=0, atol=0)
        state = together([stage.state for stage in stages])
        size = sum(stage.optimizer_state for stage in stages)
        merged.append(first._replace(state=state, optimizer_state=size))
    return merged


def check_alike(ours: list[Outcome], theirs: list[Outcome], tolerance: float = 1e-9) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.losses == pytest.approx(b.losses, rel=tolerance)
        assert a.norms == pytest.approx(b.norms, rel=tolerance, nan_ok=True)
        assert a.noise == pytest.approx(b.noise, rel=tolerance)
        assert a.summed == pytest.approx(b.summed, rel=tolerance)
        assert a.samples == b.samples
        assert a.optimizer_state == b.optimizer_state
        torch.testing.assert_close(a.outputs, b.outputs, rtol=tolerance, atol=tolerance)
        assert_close(a.state, b.state, tolerance)


@pytest.mark.parametrize(
    ("num_replicas", "accum_steps", "schedule"),
    [
        (2, 1, "1f1b"),
        pytest.param(1, 0, "gpipe", marks=pytest.mark.exhaustive),
        pytest.param(1, 1, "1f1b", marks=pytest.mark.exhaustive),
        pytest.param(2, 1, "interleaved", marks=pytest.mark.exhaustive),
        pytest.param(2, 0, "gpipe", marks=pytest.mark.exhaustive),
    ],
)
def test_the_same_with_either_engine(num_replicas: int, accum_steps: int, schedule: str) -> None:
    """Losses, norms, the gradient's noise, sums, outputs, parameters, memory of the optimizer."""
    ours = per_stage(num_replicas, 2, 1, schedule, accum_steps)
    check_alike(ours, in_one_process(num_replicas, 2, 1, None, accum_steps))


@pytest.mark.parametrize(
    ("before", "after", "schedule"),
    [
        (2, 3, "1f1b"),
        pytest.param(None, 4, "1f1b", marks=pytest.mark.exhaustive),
        pytest.param(4, None, "1f1b", marks=pytest.mark.exhaustive),
        pytest.param(3, 2, "interleaved", marks=pytest.mark.exhaustive),
        pytest.param(None, 2, "interleaved", marks=pytest.mark.exhaustive),
    ],
)
def test_restarts_change_the_engine_and_the_stages(
    tmp_path: Path, before: int | None, after: int | None, schedule: str
) -> None:
    """Each stage writes its own layers, and takes those that it needs from what all wrote."""
    environment = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path)}

    def run(num_stages: int | None, epochs: int) -> Outcome:
        if num_stages is None:
            return in_one_process(1, 2, epochs, None, environment=environment)[0]
        return per_stage(1, num_stages, epochs, schedule, environment=environment)[0]

    first, second = run(before, 1), run(after, 2)
    whole = in_one_process(1, 1, 2, None)[0]
    assert first.samples + second.samples == [SIZE] * 2
    assert first.losses + second.losses == pytest.approx(whole.losses, rel=1e-9)
    assert_close(second.state, whole.state, 1e-9)
    newest = max(tmp_path.glob("checkpoint-*"))
    parts = sorted(path.name for path in newest.glob("model.pt*"))
    assert parts == ["model.pt", *(f"model.pt.stage{k}" for k in range(1, after or 1))]


def fitted_job(schedule: str) -> tuple[str, int, int, list[int]]:
    """Train, fit, and go on with another engine's measurements among one's own."""
    whole_job(2, 4, schedule)
    metrics = context().component(Metrics)
    metrics.fit()
    assert metrics.perf_params is not None
    rows = metrics.profile.to_json()
    other = StepProfile()
    other.load_json([{**row, "processes": 1} for row in rows])
    own = context().pipeline.order
    kept = [
        len(found.atomic_bsz) if (found := other.fit_data(2, "except_last", *key)) else 0
        for key in ((1, own), (2, own), (1, PipelineSchedule("gpipe")))
    ]
    assert other.orders(2, 1) == (own,)
    # Before schedules were noted, stages of processes of their own worked by 1F1B.
    old = StepProfile()
    old.load_json([{k: x for k, x in row.items() if k != "schedule"} for row in rows])
    assert {order.schedule for order in old.orders(2, 2)} == {"1f1b"}
    params = metrics.perf_params
    return params.schedule, params.num_stages, params.chunks_per_stage, kept


@pytest.mark.exhaustive
@pytest.mark.parametrize(("schedule", "several"), [("1f1b", 1), ("interleaved", 2)])
def test_the_performance_model_knows_the_schedule(schedule: str, several: int) -> None:
    """And takes nothing for its own that the other engine, or another schedule, has measured."""
    ((first, second),) = run_stages(fitted_job, 1, 2, schedule)
    assert first[:3] == second[:3] == (schedule, 2, several)
    assert first[3][0] > 0
    assert first[3][1:] == [0, 0]


def traced_job(folder: Path) -> list[list[list[float]]]:
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = HybridParallel(
        module, optimizer, num_stages=2, num_microbatches=4, bucket_bytes=SMALL_BUCKET
    )
    loader = AdaptiveDataLoader(make_data("mlp", 24 * 64), batch_size=64)
    model.export_chrome_trace(folder / f"{context().env.rank}-{context().env.stage}.json")
    for inputs, targets in loader:
        optimizer.zero_grad()
        model.train_step(inputs, targets, torch.nn.functional.cross_entropy)
        optimizer.step()
    rows = context().component(Metrics).profile.to_json()
    return [row["forward"] + row["backward"] for row in rows]


@pytest.mark.exhaustive
def test_stages_are_timed_in_all_processes(tmp_path: Path) -> None:
    """A row for each in the trace, in the schedule's order, and rows for all that they wait for.

    1F1B has a stage send and receive at once.
    """
    (first, second), _ = run_stages(traced_job, 2, 2, tmp_path)
    assert first == second
    (times,) = first
    assert len(times) >= 4
    assert all(seconds > 0.0 for stages in times for seconds in stages)
    alternating = [f"{phase} {n}" for n in range(4) for phase in ("forward", "backward")]
    ahead = ["forward 0", "forward 1", "backward 0", "forward 2", "backward 1", "forward 3"]
    for replica, stage in ((0, 0), (0, 1), (1, 0), (1, 1)):
        trace = json.loads((tmp_path / f"{replica}-{stage}.json").read_text())
        assert 0.0 < trace["otherData"]["schedule_bubble"] < 1.0
        assert trace["otherData"]["schedule"] == "1f1b"
        rows = rows_of(trace)
        work = [rows.pop(f"stage {k} (cpu)") for k in (0, 1)]
        assert [[x["name"] for x in row] for row in work] == [
            [*ahead, "backward 2", "backward 3"],
            alternating,
        ]
        talk = [rows.pop(f"stage {k}: sends and receives") for k in (0, 1)]
        assert [x["name"] for x in talk[0] if "receive" in x["name"]] == [
            f"receive gradient {n}" for n in range(4)
        ]
        assert [x["name"] for x in talk[0] if "send" in x["name"]] == [
            f"send output {n}" for n in range(4)
        ]
        assert [x["name"] for x in talk[1]] == [
            f"{what} {n}" for n in range(4) for what in ("receive input", "send gradient")
        ]
        for spans in (*map(by_start, map(chain, work, talk)), *work, *talk):
            assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-3 for a, b in pairwise(spans))
        for k in (0, 1):
            sums = [x for title in rows if title.startswith(f"stage {k}: all") for x in rows[title]]
            assert len(sums) > 1
            assert all(x["dur"] >= 0.0 and x["args"]["bytes"] > 0 for x in sums)
            # The last one goes when the last gradient is there.
            assert max(x["ts"] for x in sums) > work[k][-1]["ts"]
        assert trace["traceEvents"][0]["args"]["name"] == f"replica {replica}"
        arrows = [x for x in trace["traceEvents"] if x["ph"] in "sf"]
        assert [x["ph"] for x in arrows] == ["s", "f"] * 8
        starts = {(x["tid"], x["name"]): x["ts"] for x in trace["traceEvents"] if x["ph"] == "X"}
        assert all(starts[x["tid"], x["name"]] == x["ts"] for x in arrows)


def by_start(spans: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(spans, key=lambda span: (span["ts"], span["ts"] + span["dur"]))
