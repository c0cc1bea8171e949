"""`pipollux predict --schedule`: what another order of forwards and backwards would do."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import GoodputFunction, PerfParams, Schedule, interleaved_memory
from pipollux_perfmodel.timing.step_time import compute_time, network_time, norm
from tests.cli.modeling_cases import (
    INIT,
    LAYERS,
    MIB,
    SQR,
    TWO_STAGES,
    VAR,
    complaints,
    here,
    params_json,
    pipollux,
    predicted,
    written,
)

RUN = TWO_STAGES._replace(schedule="1f1b", overlap=1.0)
KINDS = ("gpipe", "1f1b", "interleaved")


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "layers.json").write_text(json.dumps(LAYERS.to_json_object()))
    return str(written(tmp_path, params_json(RUN)))


def played(row: dict[str, Any], params: PerfParams) -> float:
    """The step time of a row by the time line of its schedule; copies are free."""
    count, several = row["num_microbatches"], row["chunks_per_stage"]
    whole = float(compute_time(params, row["atomic_bsz"] / count))
    forward, backward = (
        tuple(share * whole / several for share in shares) * several
        for shares in (params.forward_shares, params.backward_shares)
    )
    line = Schedule(row["schedule"], forward, backward, count, stages_per_device=several)
    network = network_time(params, row["num_nodes"], row["num_replicas"])
    step = norm(line.makespan, network, params.gamma)
    return float(row["accum_steps"] * line.makespan + step)


def test_all_schedules_are_predicted_from_one_that_ran(path: str) -> None:
    ask = "--replicas", "1,3", "--max-batch-size", "256", "--accumulation"
    rows = predicted(path, *ask, "--schedule", "all")["predictions"]
    assert [row["schedule"] for row in rows] == [kind for kind in KINDS for _ in range(2)]
    for row in rows:
        assert row["step_time"] == pytest.approx(played(row, RUN))
        assert row["schedule_measured"] == (row["schedule"] == "1f1b")
        assert row["memory"] is None
        assert row["chunks_per_stage"] == (2 if row["schedule"] == "interleaved" else 1)
    for replicas, marked in itertools.groupby(
        sorted(rows, key=lambda row: row["num_replicas"]), lambda row: row["num_replicas"]
    ):
        several = list(marked)
        (best,) = (row for row in several if row["best"])
        assert best["goodput"] == max(row["goodput"] for row in several), replicas
        assert best["schedule"] == "interleaved"
    own = predicted(path, *ask)["predictions"]
    assert own == predicted(path, *ask, "--schedule", "1f1b")["predictions"]
    assert [row["goodput"] for row in own] == [row["goodput"] for row in rows[2:4]]


def test_the_table_marks_what_fits_and_is_best(path: str, tmp_path: Path) -> None:
    ask = [
        "--schedule", "all", "--layers", str(tmp_path / "layers.json"), "--replicas", "1",
        "--memory-limit", "300MiB",
    ]  # fmt: skip
    rows = predicted(path, *ask)["predictions"]
    by_kind = {row["schedule"]: row for row in rows}
    # 32 samples of activations, or of two micro-batches of eight, or of three in half a stage.
    assert [by_kind[kind]["atomic_bsz"] > 0 for kind in KINDS] == [False, True, False]
    assert by_kind["1f1b"]["best"]
    assert by_kind["1f1b"]["memory"] <= 300 * MIB
    done = pipollux("predict", path, *ask, "--plot", str(tmp_path / "p.svg"))
    text = " ".join(done.stdout.split())
    assert text.count("✓ │") == 1
    assert "Schedules marked * were not measured (1f1b was)" in text
    assert ">2 stages by 1f1b<" in (tmp_path / "p.svg").read_text()
    free = predicted(path, *ask[:-2])["predictions"][2]
    micro_bsz = -(-free["atomic_bsz"] // free["num_microbatches"])
    held = interleaved_memory(LAYERS, free["balance"], 2, micro_bsz, free["num_microbatches"])
    assert free["memory"] == pytest.approx(held.max())


def test_messages_that_interleaved_stages_send_more_have_their_price(
    path: str, tmp_path: Path
) -> None:
    ask = ["--schedule", "all", "--layers", str(tmp_path / "layers.json"), "--replicas", "1",
           "--micro-batches", "8", "--no-accumulation"]  # fmt: skip
    answers = [
        predicted(path, *ask, *link)["predictions"] for link in ([], ["--link", "1GB/s,20ms"])
    ]
    for kind, (free, priced) in zip(KINDS, zip(*answers, strict=True), strict=True):
        model = GoodputFunction(RUN._replace(schedule="gpipe"), (SQR, VAR), INIT)
        assert free["goodput"] >= model.evaluate(1, 1, INIT, 0, 8) * (1 - 1e-9)
        assert (priced["step_time"] > 1.05 * free["step_time"]) == (kind == "interleaved")
    assert [row["best"] for row in answers[0]] == [False, False, True]
    assert not answers[1][2]["best"]


def test_too_few_layers_leave_a_schedule_out(path: str, tmp_path: Path) -> None:
    layers = str(tmp_path / "layers.json")
    ask = "--stages", "1,4", "--replicas", "1", "--layers", layers, "--schedule"
    answer = predicted(path, *ask, "all")
    assert [(row["num_stages"], row["schedule"]) for row in answer["predictions"]] == [
        (1, "1f1b"), (4, "gpipe"), (4, "1f1b"),
    ]  # fmt: skip
    assert any("4 stages are not interleaved: the layers are 6" in x for x in answer["notes"])


def test_what_cannot_be_asked_is_refused(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = str(tmp_path / "layers.json")
    done = here(capsys, "predict", path, "--schedule", "1f1b", "--chunks-per-stage", "3")
    assert complaints(done) == [
        "--chunks-per-stage is 3, and only interleaved stages have chunks; give --schedule "
        "interleaved, or leave it out"
    ]
    done = here(capsys, "predict", path, "--schedule", "interleaved", "--chunks-per-stage", "4",
                "--layers", layers)  # fmt: skip
    (said,) = complaints(done)
    assert "6 layers cannot be cut into 2 stages of 4 chunks" in said


@pytest.mark.exhaustive
def test_a_fit_is_told_the_schedule_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another one, faster stages that overlap less take as long: the fit would be of others."""
    run = RUN._replace(schedule="interleaved", chunks_per_stage=2)
    model = GoodputFunction(run, (SQR, VAR), INIT)
    rows = []
    for replicas, atomic_bsz, count in itertools.product((1, 2, 3), (16, 32, 64), (2, 4, 8)):
        times = model.step_time(1, replicas, atomic_bsz, 0, count)
        whole = float(compute_time(run, atomic_bsz / count))
        rows.append({
            "num_nodes": 1, "num_replicas": replicas, "atomic_bsz": atomic_bsz, "num_stages": 2,
            "num_microbatches": count, "accum_step_time": times.accum_time,
            "optim_step_time": times.optim_time,
            "forward": [whole * share for share in run.forward_shares],
            "backward": [whole * share for share in run.backward_shares],
        })  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    fitted = []
    for options in (["--schedule", "interleaved"], ["--schedule", "1f1b"]):
        done = here(capsys, "fit", path, *options, "-o", "json")
        assert done.returncode == 0, done.stderr
        params = json.loads(done.stdout)["perf_params"][0]
        assert params["schedule"] == options[1]
        fitted.append((params["beta_c"], params["overlap"]))
    assert fitted[0] == pytest.approx((RUN.beta_c, 1.0), rel=1e-3)
    assert fitted[1][0] < 0.9 * RUN.beta_c
    assert fitted[1][1] < 0.9
    done = here(capsys, "fit", path, "--chunks-per-stage", "3")
    assert "only interleaved stages have chunks" in complaints(done)[0]
