"""`pipollux simulate` as a user meets it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli_plan import complaint, pipollux
from tests.simulator.simulator_cases import write_traces

HEADER = "name,time,application,num_replicas,batch_size\n"
KEYS = (
    *("workload", "policy", "avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s"),
    *("restarts_per_job", "gpu_utilization", "policy_seconds"),
)
SMALL = ("--nodes", "2", "--gpus", "4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workload of traced jobs, one of pipelines, and traces."""
    (tmp_path / "traces").mkdir()
    write_traces(tmp_path / "traces")
    traced = "a,0,cifar10,1,1024\nb,30,cifar10,2,1024\nc,600,cifar10,1,128\n"
    (tmp_path / "traced.csv").write_text(HEADER + traced)
    rows = "".join(f"p{i},{600 * i},gpt-1.3b,2,64\n" for i in range(4))
    (tmp_path / "pipelines.csv").write_text(HEADER + rows)
    return tmp_path


@pytest.mark.exhaustive
def test_json_has_a_row_for_every_workload_and_policy(folder: Path) -> None:
    done = pipollux(
        *("simulate", "traced.csv", "pipelines.csv", "--traces", "traces", "--output", "json"),
        *("--policy", "exact,fifo", "--nodes", "2", "--gpus", "2", "--restart-seconds", "10"),
        cwd=folder,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [(row["workload"], row["policy"]) for row in rows] == [
        *(("traced", "exact"), ("traced", "fifo"), ("pipelines", "exact"), ("pipelines", "fifo"))
    ]
    for row in rows:
        assert tuple(row)[: len(KEYS)] == KEYS
        assert row["avg_jct_s"] > 0 < row["policy_seconds"]
        assert 0 < row["gpu_utilization"] <= 1
        assert (row["gpus"], row["seed"]) == (4, 0)
    # By hand: a starts at 60 s and trains 500 s on one GPU at batches of 1024; b waits 30 s, and
    # trains 250 s on two; c trains 20 · 100 iterations of half a second.
    by_fifo = rows[1]
    assert by_fifo["median_jct_s"] == pytest.approx(60 + 10 + 500)
    assert by_fifo["avg_jct_s"] == pytest.approx((570 + (30 + 10 + 250) + (10 + 1000)) / 3)
    assert by_fifo["makespan_s"] == pytest.approx(1610)


@pytest.mark.exhaustive
def test_resizes_take_the_place_of_restarts(folder: Path) -> None:
    args = ("simulate", "pipelines.csv", "--policy", "exact", *SMALL, "-o", "json")
    plain, elastic = (
        json.loads(pipollux(*args, *more, cwd=folder).stdout)[0]
        for more in ((), ("--rescale-seconds", "1"))
    )
    assert plain["restarts_per_job"] > 0 == plain["rescales_per_job"]
    assert elastic["rescales_per_job"] > 0
    assert elastic["restarts_per_job"] < plain["restarts_per_job"]
    assert elastic["avg_jct_s"] < plain["avg_jct_s"]


@pytest.mark.exhaustive
def test_the_table_says_the_same_as_the_json(folder: Path) -> None:
    args = ("simulate", "pipelines.csv", "--policy", "tiresias", *SMALL)
    table, data = pipollux(*args, cwd=folder), pipollux(*args, "-o", "json", cwd=folder)
    assert (table.returncode, table.stderr) == (0, "")
    (row,) = json.loads(data.stdout)
    (line,) = [line for line in table.stdout.splitlines() if "│ tiresias │" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells[:3] == ["pipelines", "tiresias", f"{row['avg_jct_s']:.0f} s"]
    assert cells[5] == f"{row['makespan_s']:.0f} s"


def without_clocks(text: str) -> list[dict[str, object]]:
    rows = json.loads(text)
    return [{key: row[key] for key in row if not key.startswith("policy_sec")} for row in rows]


@pytest.mark.exhaustive
def test_a_drawn_workload_is_the_same_for_a_seed_and_in_processes(folder: Path) -> None:
    args = ("--generate", "pipelines", "--num-jobs", "5", "--hours", "1", "--spot", "--failures")
    more = ("--policy", "fifo,tiresias", "-o", "json", *SMALL)
    first, second, other = (
        pipollux("simulate", *args, *more, *last, cwd=folder)
        for last in (["--seed", "7"], ["--seed", "7", "--processes", "2"], ["--seed", "8"])
    )
    assert (first.returncode, first.stderr, second.stderr) == (0, "", "")
    assert without_clocks(first.stdout) == without_clocks(second.stdout)
    assert json.loads(first.stdout)[0]["workload"] == "pipelines-7"
    assert without_clocks(first.stdout) != without_clocks(other.stdout)


def test_a_load_and_a_number_choose_jobs_and_files_are_written(folder: Path) -> None:
    done = pipollux(
        *("simulate", "pipelines.csv", "--load", "2", "--jobs", "5", "--policy", "fifo", *SMALL),
        *("--save-jobs", "jobs.csv", "--plot", "page.html", "-o", "json"),
        cwd=folder,
    )
    assert (done.returncode, done.stderr) == (0, "Wrote page.html\nWrote jobs.csv\n")
    with (folder / "jobs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["p0", "p0~2", "p1", "p1~2", "p2"]
    average = sum(float(row["jct_s"]) for row in rows) / 5
    assert json.loads(done.stdout)[0]["avg_jct_s"] == pytest.approx(average)
    page = (folder / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("data-chart=") == 3


@pytest.mark.exhaustive
def test_types_of_gpu_are_nodes_of_their_own(folder: Path) -> None:
    types = ("--node-type", "a100-40g=1x4", "--node-type", "v100-16g=1x8")
    done = pipollux("simulate", "pipelines.csv", "-p", "fifo", *types, "-o", "json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["gpus"] == 12


def test_lines_of_libraries_do_not_get_into_the_output() -> None:
    """HiGHS has left a line of its own in standard output, past Python, even when silent."""
    code = (
        "import ctypes, os\n"
        "from pipollux_sched.cli.console import libraries_on_stderr\n"
        "with libraries_on_stderr():\n"
        "    os.write(1, b'past Python\\n')\n"
        "    ctypes.CDLL(None).puts(b'kept back by C')\n"
        "print('the result')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "the result\n"
    assert sorted(done.stderr.splitlines()) == ["kept back by C", "past Python"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "there are no jobs; give a WORKLOAD.csv, --generate MIX or --from-state DIR"),
        (
            ["traced.csv", "--generate", "mixed"],
            "--generate mixed and traced.csv both define the jobs; leave one of them out",
        ),
        (
            ["none.csv"],
            "none.csv: cannot be read (No such file or directory); give the path of a file",
        ),
        (
            ["traced.csv"],
            "application 'cifar10' needs its traces; give the folder in which the folder cifar10 "
            "lies with --traces",
        ),
        (
            ["traced.csv", "--traces", "none"],
            "none: holds no folder cifar10, of which the workload has jobs; "
            "give the folder of the public traces",
        ),
        (
            ["pipelines.csv", "--policy", "exact,exakt"],
            "policy: 'exakt' is not known; did you mean exact? "
            "choose from exact, pollux, sia, optimus, tiresias, fifo",
        ),
        (
            ["pipelines.csv", "--node-type", "a100=8"],
            "--node-type: 'a100=8' must be TYPE=COUNTxGPUS, such as a100-40g=8x4",
        ),
        (
            ["pipelines.csv", "--node-type", "h100=8x4"],
            "GPU type 'h100' is not known, so pipelines cannot be timed on it; "
            "choose from a100-40g, v100-16g",
        ),
        (["pipelines.csv", "--interval", "0"], "interval: 0.0 must be above 0"),
        (
            ["pipelines.csv", "-p", "exact:tail=1,fairness=0.5,fifo"],
            "policy: exact:fairness=0.5 is invalid; fairness must be a finite number at least 1, "
            "or none; write, for example, exact:fairness=1.25",
        ),
        (
            ["pipelines.csv", "--rescale-seconds", "31"],
            "rescale_seconds: 31.0 must be between 0 and restart_seconds = 30.0, or left out",
        ),
        (["pipelines.csv", "--load", "0"], "load: 0.0 must be a finite number > 0"),
        (
            ["wrong.csv"],
            "wrong.csv, row 3, column num_replicas: 'two' must be a whole number from 1 on",
        ),
        (
            ["unknown.csv"],
            "application 'gpt-3' is not known; choose from bert, cifar10, deepspeech2, imagenet, "
            "ncf, yolov3, gpt-1.3b, gpt-2.7b, gpt-6.7b, gpt-13b",
        ),
        (["empty.csv"], "empty.csv: holds no job; give a row for each"),
    ],
)
def test_a_users_mistake_is_one_sentence(folder: Path, args: list[str], expected: str) -> None:
    (folder / "wrong.csv").write_text(HEADER + "a,0,gpt-1.3b,1,64\nb,0,gpt-1.3b,two,64\n")
    (folder / "unknown.csv").write_text(HEADER + "a,0,gpt-3,1,64\n")
    (folder / "empty.csv").write_text(HEADER)
    assert complaint(pipollux("simulate", *args, cwd=folder), 2) == expected


def test_jobs_that_never_run_end_the_command(folder: Path) -> None:
    (folder / "large.csv").write_text(HEADER + "a,0,gpt-1.3b,16,64\n")
    done = pipollux(
        "simulate", "large.csv", "-p", "fifo", "--interval", "86400", *SMALL, cwd=folder
    )
    assert complaint(done, 1).startswith("after 60 days 1 jobs are not done (a); give nodes")


def test_help_teaches() -> None:
    done = pipollux("simulate", "--help")
    assert done.returncode == 0
    for words in ("cifar10-0,124,cifar10,2,1024", "--generate", "--save-jobs", "Exit code"):
        assert words in done.stdout
    assert "simulate" in pipollux("--help").stdout


@pytest.mark.exhaustive
def test_the_result_says_what_the_policy_was_told_of_lengths(folder: Path) -> None:
    args = ("simulate", "pipelines.csv", "--jobs", "1", *SMALL, "--known-length")
    table = pipollux(*args, "none", cwd=folder)
    assert "policies know job lengths: not at all" in table.stdout
    (row,) = json.loads(pipollux(*args, "2", "-o", "json", cwd=folder).stdout)
    assert row["known_length"] == "2"
    failed = pipollux(*args, "0.5", cwd=folder)
    assert "known_length: 0.5 must be a finite factor of at least 1" in complaint(failed, 2)


@pytest.mark.exhaustive
def test_jobs_may_fit_their_model_as_adaptdl_does(folder: Path) -> None:
    nodes = ("--nodes", "2", "--gpus", "2")
    args = ("simulate", "traced.csv", "--traces", "traces", "-o", "json", *nodes, "--fit")
    (ours,), (theirs,) = (
        json.loads(pipollux(*args, fit, cwd=folder).stdout) for fit in ("pipollux", "adaptdl")
    )
    # These traces are what both models describe, so that both tell the same of them.
    assert theirs["avg_jct_s"] == pytest.approx(ours["avg_jct_s"], rel=0.05)
