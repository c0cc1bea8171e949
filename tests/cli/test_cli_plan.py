"""`pipollux plan` as a user meets it: a process with arguments, output, errors and an exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipollux_policies import POLICIES
from tests.programs import run_pipollux

CLUSTER = "nodes:\n- {name: node-a, slots: 4}\n- {name: node-b, slots: 2}\n"
JOBS = "jobs:\n- {name: a, script: a.py, num_stages: 2}\n- {name: b, script: b.py}\n"


PROGRAM = [sys.executable, "-W", "error", "-c", "from pipollux_sched.cli import main; main()"]
EXAMPLES = ("plan", "--cluster", "examples/cluster.yaml", "--jobs", "examples/jobs.yaml")


def start(*args: str, cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PROGRAM, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd
    )


def pipollux(*args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_pipollux(*args, folder=cwd)


def plan_files(
    folder: Path, cluster: str = CLUSTER, jobs: str = JOBS, *args: str
) -> subprocess.CompletedProcess[str]:
    (folder / "cluster.yaml").write_text(cluster)
    (folder / "jobs.yaml").write_text(jobs)
    files = ("--cluster", "cluster.yaml", "--jobs", "jobs.yaml")
    return pipollux("plan", *files, *args, cwd=folder)


def complaint(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of an error, after checking that there is nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    return line.removeprefix("Error: ")


def test_a_sweep_is_planned_and_not_applied(tmp_path: Path) -> None:
    text = "jobs:\n- {name: rates, script: a.py, sweep: {grid: {lr: [1, 2, 3, 4, 5, 6, 7, 8]}}}\n"
    (tmp_path / "a.py").touch()
    done = plan_files(tmp_path, CLUSTER, text)
    assert done.returncode == 0, done.stderr
    assert "The plan has 6 of 8 trials of rates; 2 more follow as these end." in done.stdout
    files = ("--cluster", "cluster.yaml", "--jobs", "jobs.yaml")
    refused = pipollux("apply", *files, "--yes", "--state-dir", "state", cwd=tmp_path)
    words = complaint(refused, 2)
    assert words.startswith("job 'rates' is a sweep, whose trials start one after another")
    assert words.endswith(
        "run it under a scheduler, with: pipollux serve, and then: pipollux submit jobs.yaml"
    )
    assert not (tmp_path / "state").exists()


@pytest.mark.exhaustive
def test_the_examples_as_json_pipe_into_any_tool(repository: Path) -> None:
    with start(*EXAMPLES, "--output", "json", cwd=repository) as planning:
        done = subprocess.run(
            [sys.executable, "-m", "json.tool"],
            stdin=planning.stdout,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert planning.stderr is not None
        assert planning.stderr.read() == b""
    assert (planning.returncode, done.returncode, done.stderr) == (0, 0, "")
    plan = json.loads(done.stdout)
    assert [row["job"] for row in plan["assignments"]] == [
        "char-lm",
        "char-lm-wide",
        "digits",
        "char-lm-new",
    ]
    assert plan["assignments"][1]["nodes"] == ["node-b"]


def test_table_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    as_json, as_yaml, table = (
        plan_files(tmp_path, CLUSTER, JOBS, "--output", form) for form in ("json", "yaml", "table")
    )
    for done in (as_json, as_yaml, table):
        assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(as_json.stdout)
    assert yaml.safe_load(as_yaml.stdout) == plan
    for row in plan["assignments"]:
        (line,) = [line for line in table.stdout.splitlines() if f"│ {row['job']} " in line]
        assert row["why"] in line
    used = sum(node["used"] for node in plan["nodes"])
    assert f"Slots used: {used} of 6" in table.stdout


def test_planning_touches_nothing(tmp_path: Path) -> None:
    plan_files(tmp_path, CLUSTER, "jobs:\n- {name: a, script: a.py, max_replicas: 1}\n")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = pipollux("plan", "-c", "cluster.yaml", "-j", "jobs.yaml", cwd=tmp_path)
    assert again.returncode == 0
    assert "These jobs would use 1 such node; there are 2." in again.stdout
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_the_same_seed_prints_the_same(tmp_path: Path) -> None:
    first, second = (
        plan_files(tmp_path, CLUSTER, JOBS, "-o", "json", "--seed", "7") for _ in range(2)
    )
    assert first.stdout == second.stdout != ""


@pytest.mark.parametrize(
    ("cluster", "jobs", "code", "expected"),
    [
        (
            CLUSTER,
            JOBS.replace("num_stages", "num_stagse"),
            2,
            "jobs.yaml:2: jobs[0].num_stagse: unknown field; did you mean 'num_stages'?",
        ),
        (
            CLUSTER.replace("slots: 2", "slots: -2"),
            JOBS,
            2,
            "cluster.yaml:3: nodes[1].slots: -2 is not allowed; "
            "it must be a whole number of at least 1",
        ),
        ("", JOBS, 2, "cluster.yaml: the file is empty; it must begin with 'nodes:'"),
        (
            CLUSTER,
            JOBS + " x",
            2,
            "jobs.yaml:4:2: not valid YAML: expected <block end>, but found '<scalar>'",
        ),
        (
            CLUSTER,
            JOBS.replace("num_stages: 2", "num_stages: 9"),
            1,
            "job 'a' fits no node: one replica needs 9 slots on one node, and the largest node, "
            "node-a, has 4 slots; ask for less (num_stages, resources) or add a larger node",
        ),
        (
            CLUSTER,
            JOBS.replace("num_stages: 2", "allocation: [node-x]"),
            2,
            "job 'a': allocation names the node 'node-x', which the cluster does not have; "
            "its nodes are node-a, node-b",
        ),
    ],
)
def test_a_users_mistake_is_one_sentence(
    tmp_path: Path, cluster: str, jobs: str, code: int, expected: str
) -> None:
    assert complaint(plan_files(tmp_path, cluster, jobs), code) == expected


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    done = pipollux("plan", "--cluster", "none.yaml", "--jobs", "none.yaml", cwd=tmp_path)
    assert complaint(done, 2) == f"none.yaml: there is no such file in {tmp_path}; check the path"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["plan", "--clutser", "x"], "'pipollux plan --help'"),
        (["plan", "--cluster"], "'pipollux plan --help'"),
        (["plan", "--jobs", "x"], "--cluster is missing; give both files, or neither"),
        (["plan", "--cluster", "x"], "--jobs is missing; give both files, or neither"),
        (["apply", "--cluster", "x"], "--jobs is missing; give both files, or neither"),
        (["apply", "--policy", "fifo"], "--policy: the running scheduler decides by its own"),
        ([*EXAMPLES, "--diff"], "--diff is for the scheduler's own jobs; leave the files out"),
        (["plan", "-c", "x", "-j", "y", "-o", "xml"], "'xml'"),
        (["plan", "-c", "x", "-j", "y", "--seed", "-1"], "'--seed'"),
        (["paln"], "'paln'"),
        (["--colour"], "'pipollux --help'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(args: list[str], expected: str) -> None:
    assert expected in complaint(pipollux(*args), 2)


def test_help_teaches() -> None:
    done = pipollux("plan", "--help")
    assert done.returncode == 0
    for words in ("slots: 4", "num_stages: 2", "allocation: [node-a]", "--output", "Exit code"):
        assert words in done.stdout
    assert "pipollux plan --cluster examples/cluster.yaml" in done.stdout


def test_without_arguments_there_is_help_that_lists_all_commands() -> None:
    bare, asked = pipollux(), pipollux("--help")
    assert (bare.returncode, bare.stderr) == (0, "")
    for command in (
        "demo",
        "plan",
        "apply",
        "serve",
        "submit",
        "jobs",
        "cancel",
        "logs",
        "version",
    ):
        assert f"│ {command} " in bare.stdout
        assert f"│ {command} " in asked.stdout


@pytest.mark.exhaustive
def test_every_command_that_is_listed_can_be_run() -> None:
    program = (
        "from pipollux_sched.cli.app import COMMANDS, load_command\n"
        "for name in COMMANDS:\n    assert load_command(name).help, name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert pipollux("version").stdout == pipollux("--version").stdout
    assert pipollux("version").stdout == f"pipollux {version('pipollux')}\n"


@pytest.mark.exhaustive
def test_a_reader_that_has_enough_is_no_error(repository: Path) -> None:
    with start(*EXAMPLES, cwd=repository) as planning:
        assert planning.stdout is not None
        assert planning.stderr is not None
        planning.stdout.close()
        assert planning.stderr.read() == b""


def test_the_policy_is_chosen_by_name(tmp_path: Path) -> None:
    named, default = (
        plan_files(tmp_path, CLUSTER, JOBS, "--output", "json", *args)
        for args in (("--policy", "exact"), ())
    )
    assert (named.returncode, named.stdout) == (0, default.stdout)
    said = complaint(plan_files(tmp_path, CLUSTER, JOBS, "--policy", "polux"), 2)
    assert said.startswith(
        "Invalid value for '--policy': 'polux' is not known; did you mean pollux?"
    )
    assert f"choose from {', '.join(POLICIES)}" in said


def test_the_help_names_every_policy() -> None:
    help_text = " ".join(pipollux("plan", "--help").stdout.split())
    for name in POLICIES:
        assert name in help_text
