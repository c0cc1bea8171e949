"""`pipollux predict` as a user meets it: parameters in, a table or data or a picture out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipollux_perfmodel import GoodputFunction, PerfParams
from tests.cli.modeling_cases import (
    INIT,
    ONE_STAGE,
    SQR,
    TWO_STAGES,
    VAR,
    complaints,
    entry,
    exact_rows,
    here,
    lines,
    params_json,
    pipollux,
    predicted,
    written,
)


def best_by_trying_all(
    params: PerfParams, num_nodes: int, num_replicas: int, max_batch_size: int, atomic: range
) -> float:
    """The highest goodput of all batch sizes and micro-batches, without accumulation."""
    model = GoodputFunction(params, (SQR, VAR), INIT)
    best = 0.0
    for num_microbatches in (1, 2, 4):
        for atomic_bsz in atomic:
            batch_size = num_replicas * atomic_bsz
            lonely = num_replicas == num_microbatches == 1 and batch_size > INIT
            if INIT <= batch_size <= max_batch_size and not lonely:
                shape = (num_nodes, num_replicas, atomic_bsz, 0, num_microbatches)
                best = max(best, model.evaluate(*shape))
    return best


def test_each_row_is_the_best_configuration_and_its_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE, TWO_STAGES))
    answer = predicted(
        path, "--replicas", "1:6", "--gpus-per-node", "4", "--micro-batches", "1,2,4",
        "--max-batch-size", "512", "--atomic-bsz", "8:64",
    )  # fmt: skip
    rows = answer["predictions"]
    order = [(row["num_stages"], row["num_replicas"]) for row in rows]
    assert order == [(stages, replicas) for stages in (1, 2) for replicas in range(1, 7)]
    alone = {row["num_stages"]: row["goodput"] for row in rows if row["num_replicas"] == 1}
    for row in rows:
        params = {1: ONE_STAGE, 2: TWO_STAGES}[row["num_stages"]]
        model = GoodputFunction(params, (SQR, VAR), INIT)
        replicas, nodes = row["num_replicas"], row["num_nodes"]
        assert nodes == -(-replicas * row["num_stages"] // 4)
        assert row["num_gpus"] == replicas * row["num_stages"]
        assert 8 <= row["atomic_bsz"] <= 64
        assert row["accum_steps"] == 0
        assert row["batch_size"] == replicas * row["atomic_bsz"] <= 512
        shape = (nodes, replicas, row["atomic_bsz"], 0, row["num_microbatches"])
        assert row["step_time"] == pytest.approx(model.step_time(*shape).total)
        assert row["throughput"] == pytest.approx(row["batch_size"] / row["step_time"])
        assert row["efficiency"] == pytest.approx(model.efficiency(row["batch_size"]))
        assert row["goodput"] == pytest.approx(row["throughput"] * row["efficiency"])
        assert row["speedup"] == pytest.approx(row["goodput"] / alone[row["num_stages"]])
        best = best_by_trying_all(params, nodes, replicas, 512, range(8, 65))
        assert best * 0.97 <= row["goodput"] <= best * (1 + 1e-9)
        assert row["measured"]


def test_replicas_lie_on_one_node_each(tmp_path: Path) -> None:
    """Nodes of 4 GPUs hold one replica of 3 stages, not one and a third."""
    path = written(tmp_path, params_json(TWO_STAGES))
    rows = predicted(path, "--stages", "3", "--replicas", "1,5", "--gpus-per-node", "4")
    assert [row["num_nodes"] for row in rows["predictions"]] == [1, 5]
    rows = predicted(path, "--stages", "2", "--replicas", "1,2,5", "--nodes", "2")
    assert [row["num_nodes"] for row in rows["predictions"]] == [1, 2, 2]
    rows = predicted(path, "--stages", "2", "--replicas", "4,5")
    assert [row["num_nodes"] for row in rows["predictions"]] == [1, 2]


def test_stages_that_were_not_measured_are_marked(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE, TWO_STAGES))
    args = ("--stages", "1,2,4", "--replicas", "1")
    answer = predicted(path, *args)
    assert [row["measured"] for row in answer["predictions"]] == [True, True, False]
    assert sum("not measured (1, 2 were)" in note for note in answer["notes"]) == 1
    table = pipollux("predict", path, *args).stdout
    marks = [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]
    assert marks[-3:] == ["1", "2", "4*"]


def test_without_gradient_statistics_there_is_throughput_only(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(TWO_STAGES, grad_params=None))
    args = ("--replicas", "1,2", "--max-batch-size", "256", "--micro-batches", "4")
    answer = predicted(path, *args)
    for row in answer["predictions"]:
        assert (row["efficiency"], row["goodput"]) == (None, None)
        assert row["batch_size"] == 256  # the fastest, for all that is known
    first, second = answer["predictions"]
    assert second["speedup"] == pytest.approx(second["throughput"] / first["throughput"])
    table = pipollux("predict", path, *args).stdout
    assert "Goodput" not in table
    assert "Efficiency" not in table
    assert table.count("The gradient statistics are not known") == 1

    given = (*args, "--grad-sqr", str(SQR), "--grad-var", str(VAR))
    assert predicted(path, *given) == predicted(written(tmp_path, params_json(TWO_STAGES)), *args)


def test_without_an_initial_batch_size_it_says_how_to_give_one(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE, init_batch_size=None))
    (text,) = complaints(pipollux("predict", path))
    assert text.startswith("the initial batch size is not known; give --init-batch-size N")
    assert predicted(path, "--init-batch-size", str(INIT)) == predicted(
        written(tmp_path, params_json(ONE_STAGE))
    )


def test_options_go_before_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE))
    answer = predicted(path, "--init-batch-size", "64", "--replicas", "1")
    assert answer["init_batch_size"] == 64
    assert answer["predictions"][0]["batch_size"] == 64


def test_what_fit_writes_predict_reads(tmp_path: Path) -> None:
    measurements = [*exact_rows(ONE_STAGE), *exact_rows(TWO_STAGES)]
    (tmp_path / "m.jsonl").write_text(lines(measurements))
    options = ("--init-batch-size", str(INIT), "--grad-sqr", str(SQR), "--grad-var", str(VAR))
    done = pipollux("fit", tmp_path / "m.jsonl", "--save", tmp_path / "fitted.json", *options)
    assert done.returncode == 0, done.stderr
    asked = ("--replicas", "1:4", "--max-batch-size", "256", "--gpus-per-node", "2")
    ours = predicted(tmp_path / "fitted.json", *asked)["predictions"]
    truth = predicted(written(tmp_path, params_json(ONE_STAGE, TWO_STAGES)), *asked)["predictions"]
    assert len(ours) == len(truth) == 8
    for one, other in zip(ours, truth, strict=True):
        assert one["goodput"] == pytest.approx(other["goodput"], rel=0.03)


@pytest.mark.exhaustive
def test_what_rests_on_assumptions_is_said(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(lines(exact_rows(ONE_STAGE, [(1, 1), (1, 2)])))
    pipollux("fit", tmp_path / "m.jsonl", "--save", tmp_path / "p.json", "--init-batch-size", "32")
    across = "Several replicas were never measured on several nodes: what"
    inside = "Never more than two replicas were measured on one node: what"
    for args, expected in (
        (("--replicas", "1:9",), {across, inside}),
        (("--replicas", "1:8",), {inside}),
        (("--replicas", "1",), set()),
        (("--replicas", "2", "--nodes", "2"), {across}),
    ):  # fmt: skip
        notes = predicted(tmp_path / "p.json", *args)["notes"]
        assert {note for note in (across, inside) if any(note in n for n in notes)} == expected


def test_the_hints_of_a_job_are_read_as_they_are(tmp_path: Path, repository: Path) -> None:
    jobs = yaml.safe_load((repository / "examples/jobs.yaml").read_text())["jobs"]
    hints = next(job["hints"] for job in jobs if job["name"] == "digits")
    path = written(tmp_path, hints)
    answer = predicted(path, "--replicas", "1,2")
    assert answer["max_batch_size"] == hints["maxBatchSize"]
    low, high = hints["localBszBounds"]
    for row in answer["predictions"]:
        assert low <= row["atomic_bsz"] <= high
        assert row["num_microbatches"] == hints.get("numMicrobatches", 1)
    assert predicted(path, "--max-batch-size", "64")["max_batch_size"] == 64


@pytest.mark.exhaustive
def test_what_no_batch_size_suits_is_a_dash(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE))
    args = ("--replicas", "1,64", "--atomic-bsz", ":64")
    feasible, impossible = predicted(path, *args)["predictions"]
    assert feasible["atomic_bsz"] == 32
    assert (impossible["atomic_bsz"], impossible["step_time"]) == (0, None)
    assert (impossible["goodput"], impossible["speedup"]) == (0.0, 0.0)
    done = pipollux("predict", path, *args, "--plot", tmp_path / "p.png")
    assert done.returncode == 0
    assert "No batch size is within bounds in 1 row" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("│      1 │       64")]
    assert row.count(" – ") == 9
    # Nothing at all is possible: a picture without lines is still a picture.
    nothing = ("--replicas", "64", "--plot", tmp_path / "empty.png")
    assert pipollux("predict", path, *nothing).returncode == 0


def test_accumulation_reaches_batch_sizes_that_memory_does_not(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE))
    args = ("--replicas", "1", "--atomic-bsz", ":8", "--micro-batches", "1")
    (without,) = predicted(path, *args)["predictions"]
    (accumulating,) = predicted(path, *args, "--accumulation")["predictions"]
    assert without["atomic_bsz"] == 0
    assert (accumulating["atomic_bsz"], accumulating["accum_steps"]) == (8, 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [3]), ("1,2,4", [1, 2, 4]), ("2:4", [2, 3, 4]), ("1:16:5", [1, 6, 11, 16]),
     ("4,1:2,2", [1, 2, 4]), (" 1 , 2 ", [1, 2])],
)  # fmt: skip
def test_ranges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: list[int]
) -> None:
    path = written(tmp_path, params_json(ONE_STAGE))
    done = here(capsys, "predict", path, "-o", "json", "--replicas", text)
    rows = json.loads(done.stdout)["predictions"]
    assert [row["num_replicas"] for row in rows] == expected


GOOD = params_json(ONE_STAGE)
PERF = entry(ONE_STAGE)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not valid JSON: "),
        ("[]", '[] is not an object; it must begin with {"version": 1'),
        ("{}", "version: is missing; this Pipollux reads version 1"),
        (GOOD | {"version": 2}, "version: is 2; this Pipollux reads version 1"),
        (GOOD | {"version": True}, "version: is true; this Pipollux reads version 1"),
        (GOOD | {"grad_parms": {}}, "grad_parms: unknown key; did you mean 'grad_params'?"),
        (GOOD | {"perf_params": []}, "perf_params: [] is not allowed; it must be a list of"),
        (GOOD | {"perf_params": [PERF | {"gama": 1}]}, "perf_params[0]: gama is not a known key; "
         "did you mean gamma?"),
        (GOOD | {"perf_params": [PERF, PERF]}, "perf_params[1].num_stages: 1 occurs a second"),
        (GOOD | {"perf_params": [PERF | {"num_stages": 2}]}, "perf_params[0].num_stages: 2, but "
         "forward_shares has 1 entries"),
        (GOOD | {"perf_params": [PERF | {"alpha_c": float("nan")}]}, "perf_params[0]: alpha_c is"),
        (GOOD | {"init_batch_size": 0}, "init_batch_size: 0 is not allowed; it must be a whole"),
        (GOOD | {"grad_params": {"norm": 1}}, "grad_params: var is missing"),
        (GOOD | {"grad_params": 3}, "grad_params: 3 is not allowed; give"),
        (GOOD | {"fit": 3}, "fit: 3 is not what `pipollux fit` writes; leave it out"),
        ('{"version": 1, "version": 1}', "'version' occurs twice in one object; keep one of them"),
        ({"initBatchSize": 32}, "hints: perfParams is null; a job reports it after its first fit"),
        ({"initBatchSize": 32, "gradParms": {}}, "hints: gradParms is not a known key"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_named_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, expected: str
) -> None:
    path = written(tmp_path, content)
    (text,) = complaints(here(capsys, "predict", path))
    assert text.startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--replicas", "4:1"], "--replicas '4:1' runs backwards; write 1:4"),
        (["--replicas", "0"], "--replicas '0' is not allowed; write whole numbers from 1 to"),
        (["--replicas", "1:"], "--replicas '1:' is not allowed; write whole numbers"),
        (["--replicas", "two"], "--replicas 'two' is not allowed; write whole numbers"),
        (["--replicas", "1:2:3:4"], "--replicas '1:2:3:4' has 4 parts; write low:high:step"),
        (["--replicas", "1:1000000"], "--replicas '1:1000000' has more than 10000 numbers"),
        (["--stages", ""], "--stages '' is not allowed; write whole numbers"),
        (["--micro-batches", "1.5"], "--micro-batches '1.5' is not allowed"),
        (["--atomic-bsz", "8"], "--atomic-bsz '8' is no range; write LO:HI, such as 8:64, or 8:"),
        (["--atomic-bsz", "64:8"], "--atomic-bsz '64:8' runs backwards; write 8:64"),
        (["--nodes", "2", "--gpus-per-node", "4"], "give --nodes or --gpus-per-node, not both"),
        (["--nodes", "0"], "'--nodes'"),
        (["--stages", "16"], "a replica of 16 stages does not fit on a node of 8 GPUs; give "
         "--gpus-per-node 16 or more"),
        (["--max-batch-size", "16"], "the largest batch size, 16, is below the initial one, 32; "
         "give --max-batch-size 32 or more"),
        (["--grad-var", "1"], "--grad-sqr is missing; give both"),
        (["--plot", "x.gif"], "name end in .png, .svg, .pdf"),
        (["--output", "xml"], "'xml'"),
        (["--replica", "2"], "'pipollux predict --help'"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: Iterable[str], expected: str
) -> None:
    (text,) = complaints(here(capsys, "predict", written(tmp_path, GOOD), *args))
    assert expected in text


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    (text,) = complaints(pipollux("predict", "none.json", cwd=tmp_path))
    assert text == f"none.json: there is no such file in {tmp_path}; check the path"


def test_table_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(TWO_STAGES))
    args = ("--replicas", "1:3", "--max-batch-size", "128")
    as_json = predicted(path, *args)
    as_yaml = pipollux("predict", path, *args, "-o", "yaml").stdout
    assert yaml.safe_load(as_yaml) == as_json
    table = pipollux("predict", "-", *args, stdin=path.read_text()).stdout
    cells = [[cell.strip() for cell in line.split("│")] for line in table.splitlines()]
    rows = [row for row in cells if len(row) > 2 and row[1] == "2"]
    assert len(rows) == len(as_json["predictions"])
    for row, one in zip(rows, as_json["predictions"], strict=True):
        names = ("num_stages", "num_replicas", "num_nodes", "num_gpus", "num_microbatches",
                 "atomic_bsz", "accum_steps", "batch_size")  # fmt: skip
        assert row[1:9] == [str(one[name]) for name in names]
        assert row[13] == f"{one['speedup']:.2f}"


@pytest.mark.exhaustive
def test_the_picture_is_the_same_twice_and_has_everything_with_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE, TWO_STAGES))
    args = ("predict", path, "--stages", "1,2,4", "--replicas", "1:4", "--plot")
    for name in ("one.png", "two.png", "one.svg", "two.svg"):
        done = pipollux(*args, tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    for words in (
        "Goodput",
        "Speedup",
        "GPUs",
        "replicas",
        "samples per second",
        "1 stage",
        "2 stages",
        "4 stages (not measured)",
        "throughput",
        "ideal",
    ):
        assert f">{words}<" in text, words
    assert sorted(os.listdir(tmp_path)) == [
        "one.png", "one.svg", "params.json", "two.png", "two.svg"
    ]  # fmt: skip


def test_replicas_that_push_and_pull_pay_on_slow_links(tmp_path: Path) -> None:
    """As by the formula; an all-reduce per step does not pay there."""
    slow = PerfParams(0.1, 0.01, 4.0, 0.5, 0.05, 0.01, 1.0)
    path = written(tmp_path, params_json(slow))
    sizes = ("--replicas", "1,2,8", "--nodes", "8", "--atomic-bsz", f"{INIT}:{INIT}")
    sizes = (*sizes, "--micro-batches", "1", "--max-batch-size", "4096")
    found = [
        predicted(path, *sizes, *more)
        for more in ((), ("--sync-every", "100"), ("--sync-every", "auto"))
    ]
    without, every, auto = ([row["speedup"] for row in one["predictions"]] for one in found)
    assert without[2] < 1 < every[1] < every[2] < auto[2]
    alone, _, eight = (row["step_time"] for row in found[1]["predictions"])
    assert eight == pytest.approx(alone + (4.0 + 0.5 * 6) / 100, rel=1e-6)
    table = pipollux("predict", path, *sizes, "--sync-every", "100").stdout
    assert "Replicas push and pull every 100 steps: 7 s each time" in " ".join(table.split())
    (text,) = complaints(pipollux("predict", path, "--sync-every", "often"))
    assert text == "--sync-every 'often': a whole number of steps of at least 1 is needed, or auto"


def test_help_teaches() -> None:
    done = pipollux("predict", "--help")
    assert done.returncode == 0
    for words in ("RANGE", "1:16:2", "--gpus-per-node", "pipollux fit examples", "Exit code"):
        assert words in done.stdout
