"""What a user sees of a job: the progress on a terminal or in a log, TensorBoard, traces."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pty
import re
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipollux_hybrid import (
    AdaptiveDataLoader,
    ConfigurationError,
    HybridParallel,
    TensorBoard,
    init_process_group,
    remaining_epochs_until,
    report,
    save_all_states,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.chrome_trace import TraceSpan, bubble, trace_events
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_hybrid.telemetry.progress_bar import describe, figures, seconds_left
from pipollux_hybrid.telemetry.step_record import StepRecord
from pipollux_perfmodel import Schedule, StageEvent
from tests.hybrid.models import make_data, make_model
from tests.hybrid.replicas import run_replicas
from tests.programs import Forked


def point(**fields: Any) -> StepRecord:
    known: dict[str, Any] = {
        "time": 0.0,
        "step": 7,
        "epoch": 1,
        "samples": 80,
        "loss": 0.5,
        "batch_size": 16,
        "atomic_bsz": 4,
        "accum_steps": 1,
        "num_replicas": 2,
        "step_time": 0.5,
        "predicted_step_time": None,
        "goodput": 30.0,
        "efficiency": 0.9,
        "num_microbatches": 3,
        "epoch_samples": 40,
        "epoch_size": 160,
        "num_epochs": 3,
    }
    return StepRecord(**{**known, **fields})


def test_a_point_in_words() -> None:
    assert describe(point()) == (
        "epoch 1/3 25% step 7 loss 0.5000 batch size 16 throughput 32 goodput 30 samples/s"
    )
    assert figures(point()) == (
        "loss 0.5000 · 32 samples/s · goodput 30 · batch 4 × R=2 × s=2 (M=3) · 0:00:09 left"
    )
    assert "× s=2 (M=3, 1f1b) · " in figures(point(schedule="1f1b"))
    assert seconds_left(point()) == (120 + 160) / 32
    assert seconds_left(point(num_epochs=None)) == 120 / 32
    assert seconds_left(point(step_time=0.0)) is None


def test_only_what_the_scheduler_knows_is_sent() -> None:
    assert set(point().point().to_json_object()) == {
        *("time", "step", "epoch", "samples", "loss", "batchSize", "atomicBsz", "accumSteps"),
        *("numReplicas", "stepTime", "predictedStepTime", "goodput", "efficiency"),
    }


# --- progress ------------------------------------------------------------------------------------

EPOCHS = 12
SCRIPT = """
import sys, torch, pipollux_hybrid as pipollux
from torch import nn
from torch.utils.data import TensorDataset
pipollux.init_process_group("gloo")
module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.randn(64, 6)), batch_size=8)
model = pipollux.HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
for epoch in pipollux.remaining_epochs_until(EPOCHS):
    for (inputs,) in loader:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        pipollux.report(loss=loss)
    print(f"the script's own line {epoch}")
""".replace("EPOCHS", str(EPOCHS))


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIPOLLUX")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "140", **more}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_in_a_pipe_there_are_lines(script: Path) -> None:
    with Forked(script, environment=environment()) as done:
        assert done.wait() == 0, done.errors
        assert done.output.splitlines() == [
            f"the script's own line {epoch}" for epoch in range(EPOCHS)
        ]
        lines = [line for line in done.errors.splitlines() if line.startswith("pipollux: epoch")]
        assert lines
        assert "\x1b" not in done.errors
        assert re.search(
            rf"epoch {EPOCHS - 1}/{EPOCHS} 100% step {8 * EPOCHS} loss \d\.\d+ batch size 8 "
            r"throughput \d+",
            lines[-1],
        )


def test_progress_can_be_switched_off(script: Path) -> None:
    with Forked(script, environment=environment(PIPOLLUX_PROGRESS="0")) as done:
        assert done.wait() == 0
        assert done.errors == ""


@pytest.mark.exhaustive
def test_on_a_terminal_there_is_a_bar_and_prints_stay_whole() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment(TERM="xterm"), stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        pass  # how a pseudo-terminal says that nobody writes any more
    os.close(ours)
    assert process.wait(240) == 0, shown.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    lines = [line.strip() for line in re.split(r"[\r\n]+", plain)]
    own = [line for line in lines if line.startswith("the script's own line")]
    assert own == [f"the script's own line {epoch}" for epoch in range(EPOCHS)]
    bars = [line for line in lines if "samples/s" in line]
    assert any("━" in line and "batch 8 × R=1 (M=2)" in line for line in bars), lines[-5:]
    assert "64/64" in bars[-1]
    assert b"\x1b[?25h" in shown, "the cursor is there again"


# --- TensorBoard ---------------------------------------------------------------------------------

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is an optional dependency"
)


def train(num_epochs: int, *, saved_at: int) -> int:
    """Train so many epochs of 8 steps; the step that the last checkpoint is of."""
    init_process_group("gloo")
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    loader = AdaptiveDataLoader(make_data("mlp", 64), batch_size=8)
    model = HybridParallel(module, optimizer, num_stages=2, num_microbatches=2)
    for epoch in remaining_epochs_until(1000):
        if epoch == saved_at:
            save_all_states()
        if epoch == num_epochs:
            break
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            report(loss=loss)
    context().component(Metrics).flush()
    warnings.simplefilter("default")  # tensorboard's own, in the thread that imports it
    return context().component(Metrics).step


@needs_tensorboard
@pytest.mark.exhaustive
def test_tensorboard_over_a_crash(tmp_path: Path) -> None:
    """Read back with TensorBoard's reader: one run whose steps go on from the checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    env = {
        "PIPOLLUX_TENSORBOARD_DIR": str(tmp_path / "run"),
        "PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
    }
    # Steps 33 to 48 are lost with the first run, which saved after 32.
    first = run_replicas(lasting, 1, 6, 4, environment=env)[0]
    between = time.time()
    second = run_replicas(lasting, 1, 9, 9, environment=env)[0]
    assert (first, second) == (48, 72)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert {"loss", "throughput", "batch_size/global", "microbatches", "replicas"} <= set(
        events.Tags()["scalars"]
    )
    losses = events.Scalars("loss")
    steps = [scalar.step for scalar in losses]
    assert steps == sorted(set(steps)), "no step twice, in order"
    assert steps[-1] == 72
    assert 33 in steps, "the first of those that were done again"
    lost = [scalar.step for scalar in losses if scalar.wall_time < between and scalar.step > 32]
    assert not lost, "those of the first run are gone"
    assert all(0 < scalar.value < 10 for scalar in losses)
    assert {scalar.value for scalar in events.Scalars("microbatches")} == {2.0}


def lasting(num_epochs: int, saved_at: int) -> int:
    return train(num_epochs, saved_at=saved_at)


def test_without_tensorboard_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"tensorboard is not installed.*pip install"):
        TensorBoard(tmp_path)


# --- traces --------------------------------------------------------------------------------------


def rows_of(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    rows = defaultdict(list)
    for entry in trace["traceEvents"]:
        if entry["ph"] == "X":
            rows[entry["tid"]].append(entry)
    return rows


def bubble_of(rows: dict[int, list[dict[str, Any]]]) -> float:
    entries = [entry for row in rows.values() for entry in row]
    span = max(e["ts"] + e["dur"] for e in entries) - min(e["ts"] for e in entries)
    return 1 - sum(e["dur"] for e in entries) / (len(rows) * span)


@pytest.mark.parametrize(
    ("checkpoint", "recomputed"), [("never", 0), ("except_last", 2), ("always", 3)]
)
def test_a_trace_of_a_real_step(tmp_path: Path, checkpoint: str, recomputed: int) -> None:
    contexts.reset()
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = HybridParallel(
        module, optimizer, num_stages=2, num_microbatches=3, activation_checkpoint=checkpoint
    )
    model.export_chrome_trace(tmp_path / "deep" / "step.json")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    contexts.reset()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["step.json"]
    trace = json.loads((tmp_path / "deep" / "step.json").read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["stage 0 (cpu)", "stage 1 (cpu)"]
    rows = rows_of(trace)
    for row in rows.values():
        seen = [entry["name"] for entry in row]
        assert sorted(seen) == sorted(
            [f"{phase} {i}" for phase in ("forward", "backward") for i in range(3)]
            + [f"recomputation {i}" for i in range(recomputed)]
        )
        assert seen[:3] == ["forward 0", "forward 1", "forward 2"]
        for entry, after in itertools.pairwise(row):
            assert entry["dur"] >= 0
            assert entry["ts"] + entry["dur"] <= after["ts"] + 0.002, "one at a time"
        assert len({entry["cname"] for entry in row}) == 3
    assert trace["otherData"]["bubble"] == pytest.approx(bubble_of(rows), abs=1e-3)
    assert trace["otherData"]["step"] == 1


def test_the_bubble_is_gpipes() -> None:
    """K equal stages side by side: (K - 1) / (M + K - 1) of the time is spent waiting."""
    num_stages, num_microbatches = 4, 6
    events = []
    for k in range(num_stages):
        for i in range(num_microbatches):
            events.append(StageEvent(k, i, "forward", k + i, k + i + 1.0))
            start = 9 + (num_stages - 1 - k) + i
            events.append(StageEvent(k, num_microbatches - 1 - i, "backward", start, start + 1.0))
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert bubble(events, num_stages) == pytest.approx(expected)
    entries = trace_events(events, [torch.device("cpu")] * num_stages)
    assert bubble_of(rows_of({"traceEvents": entries})) == pytest.approx(expected)


def test_chunks_of_a_stage_are_no_recomputation() -> None:
    """Interleaved: arrows go from chunk to chunk, round and round the stages."""
    line = Schedule("interleaved", (1.0,) * 4, (2.0,) * 4, 2, stages_per_device=2)
    events = [event._replace(stage=event.stage % 2) for event in line.events]
    entries = trace_events(events, [torch.device("cpu")] * 2)
    blocks = {(x["tid"], x["ts"]): x["name"] for x in entries if x["ph"] == "X"}
    assert sorted(name for (row, _), name in blocks.items() if row == 0) == sorted(
        f"{phase} {i} of chunk {v}"
        for phase in ("forward", "backward")
        for i in (0, 1)
        for v in (0, 1)
    )
    arrows = [x for x in entries if x["ph"] in ("s", "f")]
    ends = [blocks[x["tid"], x["ts"]] for x in arrows]
    pairs = [
        (start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if "forward 1" in end
    ]
    assert sorted(pairs) == [
        ("forward 1 of chunk 0", "forward 1 of chunk 0"),
        ("forward 1 of chunk 0", "forward 1 of chunk 1"),
        ("forward 1 of chunk 1", "forward 1 of chunk 1"),
    ]
    assert all(a["ts"] < b["ts"] for a, b in zip(arrows[::2], arrows[1::2], strict=True))


def test_rows_for_what_is_under_way_at_once() -> None:
    spans = [
        TraceSpan(1, "all-reduces", f"all-reduce {n}", start, end, {"bytes": 4})
        for n, (start, end) in enumerate([(0.0, 2.0), (1.0, 3.0), (2.0, 2.5), (3.0, 4.0)])
    ]
    entries = trace_events([], [torch.device("cpu")] * 2, others=spans[::-1])
    titles = {x["tid"]: x["args"]["name"] for x in entries if x["name"] == "thread_name"}
    assert titles[2] == "stage 1: all-reduces"
    assert titles[3] == "stage 1: all-reduces (2)"
    rows = rows_of({"traceEvents": entries})
    assert [x["name"] for x in rows[2]] == ["all-reduce 0", "all-reduce 2", "all-reduce 3"]
    assert [x["name"] for x in rows[3]] == ["all-reduce 1"]


def test_a_trace_that_cannot_be_written_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contexts.reset()
    (tmp_path / "file").touch()
    module = make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = HybridParallel(module, optimizer, num_microbatches=2)
    model.export_chrome_trace(tmp_path / "file" / "step.json")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    contexts.reset()
    assert "the time line of step 1 cannot be written" in caplog.text


@pytest.mark.exhaustive
def test_a_directory_of_traces(tmp_path: Path) -> None:
    run_replicas(lasting, 2, 3, 9, environment={"PIPOLLUX_TRACE_DIR": str(tmp_path)})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2, "one of each replica, then half a minute nothing"
    assert [name[:9] for name in names] == ["replica-0", "replica-1"]
