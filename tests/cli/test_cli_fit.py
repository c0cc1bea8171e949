"""`pipollux fit` as a user meets it: measurements in, parameters, tables and pictures out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from pipollux_perfmodel import GoodputFunction, PerfParams, perf_params_from_json
from tests.cli.modeling_cases import (
    ONE_STAGE,
    TWO_STAGES,
    complaints,
    exact_rows,
    here,
    lines,
    pipollux,
)

GOOD = '{"num_nodes":1,"num_replicas":2,"atomic_bsz":8,"accum_step_time":0.1,"optim_step_time":0.2}'


def measured(folder: Path, text: str) -> Path:
    path = folder / "m.jsonl"
    path.write_text(text)
    return path


def fitted(content: dict[str, Any], num_stages: int) -> PerfParams:
    (entry,) = [one for one in content["perf_params"] if one["num_stages"] == num_stages]
    return perf_params_from_json({key: entry[key] for key in entry if key != "num_stages"})


def fit_to(path: Path, *args: str) -> dict[str, Any]:
    done = pipollux("fit", path, "--output", "json", *args)
    assert (done.returncode, done.stderr) == (0, "")
    content: dict[str, Any] = json.loads(done.stdout)
    return content


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is fitted to a job of one stage."""
    return fit_to(measured(tmp_path_factory.mktemp("one"), lines(exact_rows(ONE_STAGE))))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is fitted to a job that ran in one stage and in two."""
    rows = [*exact_rows(ONE_STAGE), *exact_rows(TWO_STAGES)]
    return fit_to(measured(tmp_path_factory.mktemp("both"), lines(rows)))


def test_exact_measurements_give_back_the_job(both: dict[str, Any]) -> None:
    assert [one["num_stages"] for one in both["perf_params"]] == [1, 2]
    for truth in (ONE_STAGE, TWO_STAGES):
        found = fitted(both, truth.num_stages)
        assert found.forward_shares == pytest.approx(truth.forward_shares, rel=1e-6)
        ours, theirs = (GoodputFunction(one, (1.0, 1.0), 1) for one in (found, truth))
        # One batch size is measured, the other is not.
        for shape in ((1, 2, 32, 1, 1), (2, 4, 96, 0, 4)):
            assert ours.step_time(*shape).total == pytest.approx(
                theirs.step_time(*shape).total, rel=0.02
            )
    for one in both["fit"]["fits"]:
        assert {error["name"] for error in one["errors"]} == {
            "accumulation steps",
            "one replica",
            "one node",
            "two nodes",
        }
        assert all(error["mean_error"] < 0.02 for error in one["errors"])
        assert one["outliers"] == []


@pytest.mark.exhaustive
def test_each_number_of_stages_is_fitted_by_itself(
    tmp_path: Path, one_stage: dict[str, Any], both: dict[str, Any]
) -> None:
    """Whichever comes first in the file."""
    alone = fit_to(measured(tmp_path, lines(exact_rows(TWO_STAGES))))
    mixed = fit_to(measured(tmp_path, lines([*exact_rows(TWO_STAGES), *exact_rows(ONE_STAGE)])))
    assert fitted(alone, 2) == fitted(both, 2) == fitted(mixed, 2)
    assert fitted(one_stage, 1) == fitted(both, 1) == fitted(mixed, 1)


@pytest.mark.exhaustive
def test_the_file_is_what_is_printed_and_twice_the_same(tmp_path: Path, repository: Path) -> None:
    example = repository / "examples" / "measurements.jsonl"
    files = {}
    for name in ("first", "second"):
        folder = tmp_path / name
        done = pipollux(
            *("fit", example, "--save", folder / "params.json", "--plot", folder / "fit.png"),
            *("--init-batch-size", "32", "--grad-sqr", "0.5", "--grad-var", "8", "-o", "json"),
        )
        assert done.returncode == 0, done.stderr
        assert sorted(os.listdir(folder)) == ["fit.png", "params.json"]
        files[name] = [(folder / file).read_bytes() for file in ("fit.png", "params.json")]
        content = json.loads(done.stdout)
        assert json.loads(files[name][1]) == content
        assert content["version"] == 1
        assert content["init_batch_size"] == 32
        assert content["grad_params"] == {"norm": 0.5, "var": 8.0}
    assert files["first"] == files["second"]


def test_the_example_is_explained_in_tables(repository: Path) -> None:
    done = pipollux("fit", "examples/measurements.jsonl", cwd=repository)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "1 stage: parameters",
        "2 stages: parameters",
        "s/sample",
        "assumed: ",
        "optimizer steps, one node",
        "Mean error",
    ):
        assert words in done.stdout
    assert "optimizer steps, two nodes" not in done.stdout
    num_rows = len((repository / "examples/measurements.jsonl").read_text().splitlines())
    (last,) = [line for line in done.stdout.splitlines() if "measurements.jsonl" in line]
    assert [cell.strip() for cell in last.split("│")][2] == str(num_rows)


def test_what_was_not_measured_is_called_assumed_with_a_reason(tmp_path: Path) -> None:
    rows = list(exact_rows(ONE_STAGE, [(1, 1), (1, 2)]))
    saved = tmp_path / "fitted.json"
    table = pipollux("fit", measured(tmp_path, lines(rows)), "--save", saved).stdout
    one = json.loads(saved.read_text())["fit"]["fits"][0]
    assumed = {entry["parameter"]: entry["reason"] for entry in one["assumed"]}
    assert {"alpha_n", "beta_n", "beta_r"} <= assumed.keys()
    assert not {"alpha_c", "beta_c", "alpha_r"} & assumed.keys()
    for name, start in (("alpha_n", "assumed: "), ("alpha_r", "measured")):
        (line,) = [line for line in table.splitlines() if line.startswith(f"│ {name} ")]
        assert line.split("│")[4].strip().startswith(start)


@pytest.mark.exhaustive
def test_stages_that_were_not_timed_are_called_assumed(tmp_path: Path) -> None:
    rows = [
        {key: row[key] for key in row if key not in ("forward", "backward")}
        for row in exact_rows(TWO_STAGES)
    ]
    table = pipollux("fit", measured(tmp_path, lines(rows))).stdout
    (line,) = [line for line in table.splitlines() if line.startswith("│ forward_shares ")]
    assert "assumed: stages were not timed" in line


def test_an_outlier_is_named_with_file_and_line(tmp_path: Path) -> None:
    rows = list(exact_rows(ONE_STAGE))
    rows[6]["accum_step_time"] *= 5
    rows[6]["optim_step_time"] *= 5
    path = measured(tmp_path, "\n" + lines(rows))  # an empty line counts as a line
    assert fit_to(path)["fit"]["fits"][0]["outliers"] == [f"{path}:8"]
    assert "m.jsonl:8 " in pipollux("fit", "m.jsonl", cwd=tmp_path).stdout


@pytest.mark.exhaustive
def test_duplicate_rows_are_fine(tmp_path: Path, one_stage: dict[str, Any]) -> None:
    twice = fit_to(measured(tmp_path, 2 * lines(exact_rows(ONE_STAGE))))
    assert twice["fit"]["num_rows"] == 2 * one_stage["fit"]["num_rows"]
    # The seven numbers of times; the rest are tuples and switches.
    assert fitted(twice, 1)[:7] == pytest.approx(fitted(one_stage, 1)[:7], rel=1e-3, abs=1e-6)


@pytest.mark.exhaustive
def test_standard_input_will_do(one_stage: dict[str, Any]) -> None:
    done = pipollux("fit", "-", "--output", "json", stdin=lines(exact_rows(ONE_STAGE)))
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["perf_params"] == one_stage["perf_params"]
    assert content["fit"]["source"] == "<stdin>"


BAD = {
    GOOD[:-1]: "not valid JSON: Expecting ',' delimiter (column 91)",
    "[1, 2]": '[1, 2] is not a measurement; it must be an object that begins with {"num_nodes": ',
    GOOD.replace("atomic_bsz", "atomc_bsz"): "atomc_bsz: unknown field; did you mean 'atomic_bsz'?",
    GOOD.replace('"atomic_bsz":8,', ""): "atomic_bsz: is missing; give the samples per replica "
    "in one forward and backward, a whole number",
    GOOD.replace("0.2", "-0.2"): "optim_step_time: -0.2 is not allowed; "
    "it must be a finite time above 0, in seconds",
    GOOD.replace("0.1", "NaN"): "accum_step_time: NaN is not allowed; "
    "it must be a finite time above 0, in seconds",
    GOOD.replace("0.1", "1e999"): "accum_step_time: Infinity is not allowed; "
    "it must be a finite time above 0, in seconds",
    GOOD.replace('_nodes":1', '_nodes":3'): "num_nodes: 3 is above num_replicas, 2; a replica lies "
    "on one node, so give at most 2",
    GOOD.replace(":8", ":true"): "atomic_bsz: true is not allowed; "
    "it must be a whole number from 1 on",
    GOOD.replace(":8", ":8.5"): "atomic_bsz: 8.5 is not allowed; "
    "it must be a whole number from 1 on",
    GOOD.replace(":8", ':"8"'): 'atomic_bsz: "8" is not allowed; '
    "it must be a whole number from 1 on",
    GOOD.replace(":8", ":8, " + '"atomic_bsz":9'): "'atomic_bsz' occurs twice in one object; "
    "keep one of them",
    GOOD[:-1] + ',"num_microbatches":16}': "num_microbatches: 16 is above atomic_bsz, 8; "
    "a micro-batch has at least one sample",
    GOOD[:-1] + ',"forward":[0.1],"backward":[0.2],"num_stages":2}': "forward: has length 1, "
    "but num_stages is 2; give one time for each stage",
    GOOD[:-1] + ',"forward":[0.1]}': "forward: is here without backward; give both or none",
    GOOD[:-1] + ',"forward":[-1],"backward":[1]}': "forward[0]: -1 is not allowed; "
    "it must be a finite time from 0 on, in seconds",
    "[" * 100_000: "not valid JSON: nested too deeply",
    GOOD.replace("0.1", "9" * 5000): "a number has thousands of digits; write at most 17",
}


def test_every_bad_row_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    measured(tmp_path, "\n".join([GOOD, *BAD, GOOD]))
    (tmp_path / "params.json").write_text("before")
    args = ("fit", "m.jsonl", "--save", "params.json", "--plot", "fit.png")
    assert complaints(pipollux(*args, cwd=tmp_path)) == [
        f"m.jsonl:{number}: {text}" for number, text in enumerate(BAD.values(), start=2)
    ]
    assert (tmp_path / "params.json").read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["m.jsonl", "params.json"]


def test_all_that_is_wrong_with_one_row_is_said(tmp_path: Path) -> None:
    path = measured(tmp_path, GOOD.replace("0.1", "0").replace("0.2", "null").replace(":8", ":0"))
    assert len(complaints(pipollux("fit", path))) == 3


def test_bad_rows_are_skipped_when_asked_and_named_all_the_same(
    tmp_path: Path, one_stage: dict[str, Any]
) -> None:
    good = lines(exact_rows(ONE_STAGE)).splitlines()
    mixed = [*good[:3], *list(BAD)[:4], *good[3:]]
    measured(tmp_path, "\n".join(mixed))
    done = pipollux("fit", "m.jsonl", "--skip-bad-rows", "--save", "fitted.json", cwd=tmp_path)
    assert done.returncode == 0
    *skipped, _ = done.stderr.splitlines()
    places = [line.split(": ")[:2] for line in skipped]
    assert places == [["Skipped", f"m.jsonl:{number}"] for number in (4, 5, 6, 7)]
    content = json.loads((tmp_path / "fitted.json").read_text())
    assert content["fit"]["num_skipped"] == 4
    assert content["fit"]["num_rows"] == len(good)
    assert one_stage["perf_params"] == content["perf_params"]
    (last,) = [line for line in done.stdout.splitlines() if line.startswith("│ m.jsonl ")]
    assert [cell.strip() for cell in last.split("│")[2:5]] == [str(len(good)), "0", "4"]


def test_bad_rows_alone_are_an_error_even_when_skipped(tmp_path: Path) -> None:
    path = measured(tmp_path, "nonsense\n")
    (text,) = complaints(pipollux("fit", path, "--skip-bad-rows"))
    assert text.startswith(f"{path}:1: not valid JSON")


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["none.jsonl"], 2, "none.jsonl: there is no such file in "),
        (["empty.jsonl"], 2, "empty.jsonl: no measurement found; give one JSON object a line"),
        (["latin.jsonl"], 2, "latin.jsonl: not a text file: byte 0 is not UTF-8"),
        (["."], 2, ".: cannot be read: Is a directory"),
        (["good.jsonl", "--plot", "fit.gif"], 2, "name end in .png, .svg, .pdf"),
        (["good.jsonl", "--grad-sqr", "1"], 2, "--grad-var is missing; give both"),
        (
            ["good.jsonl", "--grad-sqr", "inf", "--grad-var", "1"],
            2,
            "'--grad-sqr': inf is not a finite number",
        ),
        (["good.jsonl", "--grad-sqr", "-1", "--grad-var", "1"], 2, "'--grad-sqr'"),
        (["good.jsonl", "--init-batch-size", "0"], 2, "'--init-batch-size'"),
        (["good.jsonl", "--outptu", "x"], 2, "'pipollux fit --help'"),
        ([], 2, "'pipollux fit --help'"),
        (["good.jsonl", "--save", "folder"], 1, "folder: cannot be written (it is a folder)"),
        (["good.jsonl", "--save", "good.jsonl/x"], 1, "good.jsonl/x: cannot be written"),
        (["good.jsonl", "--plot", "good.jsonl/x.png"], 1, "give --plot the path of a file"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    code: int,
    expected: str,
) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    (text,) = complaints(here(capsys, "fit", *args), code)
    assert expected in text
    assert sorted(os.listdir(tmp_path)) == ["empty.jsonl", "folder", "good.jsonl", "latin.jsonl"]


@pytest.mark.exhaustive
def test_the_picture_has_everything_with_its_name(tmp_path: Path) -> None:
    rows = [*exact_rows(ONE_STAGE), *exact_rows(TWO_STAGES)]
    rows[0]["accum_step_time"] *= 5
    path = measured(tmp_path, lines(rows))
    for form in ("svg", "png", "pdf"):
        done = pipollux("fit", path, "--plot", tmp_path / f"fit.{form}")
        assert done.returncode == 0, done.stderr
    text = (tmp_path / "fit.svg").read_text()
    for words in (
        "1 stage",
        "2 stages",
        "accumulation steps: off by",
        "optimizer steps, one replica: off by",
        "optimizer steps, one node: off by",
        "optimizer steps, two nodes: off by",
        "outliers (1 rows)",
        "within 10 %",
        "measured step time",
        "predicted step time",
        "samples per micro-batch",
    ):
        assert f">{words}" in text, words
    pixels = imread(tmp_path / "fit.png")
    assert pixels.shape[0] > 400
    assert len(set(map(tuple, pixels.reshape(-1, 4)[::7].tolist()))) > 50
    assert (tmp_path / "fit.pdf").read_bytes().startswith(b"%PDF")


def test_one_row_is_enough_for_tables_and_a_picture(tmp_path: Path) -> None:
    path = measured(tmp_path, GOOD)
    done = pipollux("fit", path, "--plot", tmp_path / "fit.png")
    assert done.returncode == 0, done.stderr
    assert "assumed: one micro-batch size was measured" in done.stdout


def test_help_teaches() -> None:
    done = pipollux("fit", "--help")
    assert done.returncode == 0
    for words in ("accum_step_time", "--skip-bad-rows", "examples/measurements.jsonl", "Exit code"):
        assert words in done.stdout
