"""`pipollux simulate --from-state` as an admin meets it."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.spec.teams import load_teams
from pipollux_sched.store import StateDir, Store
from tests.cli.test_cli_plan import complaint, pipollux
from tests.sched.history.histories import (
    HINTS,
    NODES,
    simulated,
    spec_of,
    write_history,
    write_settings,
)
from tests.sched.scripts import PACED
from tests.sched.store.stores import Clock

from .runner import LIGHT, Cli, wait_until

JOBS = [
    (spec_of("job-0", family="", user="ana"), 0.0, 30_000.0),
    (spec_of("job-1", family="", min_replicas=2, team="vision"), 20.0, 60_000.0),
    (spec_of("job-2", family="", preemptible=False), 30.0, 20_000.0),
    (spec_of("job-3", family="", max_replicas=4, team="vision"), 60.0, 90_000.0),
]
TEAMS = """
notice: 0s
default: text
teams:
  - {name: text, quota: 2, users: [ana]}
  - {name: vision, quota: 6}
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory of a scheduler that has had four jobs, and one that never began."""
    directory, clock = StateDir(tmp_path_factory.mktemp("history") / "state"), Clock()
    directory.create()
    with Store(directory.database, create=True, clock=clock) as store:
        write_settings(store, "ExactPolicy")
        write_history(
            store, clock, JOBS, simulated(JOBS, "exact", {s.name: s.name for s, *_ in JOBS})
        )
        store.submit("late", spec_of("late").model_dump(mode="json"), "token", 3)
    return directory.path


@pytest.fixture
def folder(state: Path, tmp_path: Path) -> Path:
    """A folder with a copy `state` of it."""
    shutil.copytree(state, tmp_path / "state")
    return tmp_path


def rows(folder: Path, *args: str) -> list[dict[str, Any]]:
    done = pipollux("simulate", "--from-state", "state", *args, "-o", "json", cwd=folder)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.exhaustive)])
def test_reality_stands_beside_the_policies(folder: Path, processes: str) -> None:
    actual, exact, fifo = rows(folder, "--policy", "exact,fifo", "--processes", processes)
    assert [row["policy"] for row in (actual, exact, fifo)] == ["actual", "exact", "fifo"]
    assert {row["workload"] for row in (actual, exact, fifo)} == {"state"}
    for key in ("avg_jct_s", "p99_jct_s", "makespan_s", "restarts_per_job", "gpu_hours"):
        assert exact[key] == pytest.approx(actual[key], rel=1e-6)
    assert fifo["avg_jct_s"] > exact["avg_jct_s"]
    assert (actual["jobs"], actual["gpus"], actual["policy_calls"]) == (4, 8, 0)
    assert (exact["known_length"], actual["actual_policy"]) == ("declared", "exact")
    assert actual["agreement"]["policy"] == "exact"
    assert actual["agreement"]["avg_jct_ratio"] == pytest.approx(1)
    assert actual["agreement"]["jct_error_p90"] == pytest.approx(0, abs=1e-6)
    assert actual["paces"] == pytest.approx({spec.name: 1.0 for spec, *_ in JOBS})
    assert actual["left_out"] == [{"job": "late", "reason": "never started"}]
    assert "left_out" not in exact


def test_the_table_says_how_far_to_trust_it(folder: Path) -> None:
    done = pipollux("simulate", "--from-state", "state", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("│ state    │") == 2
    assert done.stdout.splitlines()[-3:] == [
        "actual: what happened under exact; 4 jobs replayed. They trained at 1.00 times (median) "
        "the speed of their models, and so does the replay.",
        "1 job left out: 1 never started.",
        "Replay of exact against what happened: average JCT 1.00 times, makespan 1.00 times; a "
        "job's JCT is off by 0% (median), 0% (p90).",
    ]


@pytest.mark.exhaustive
def test_more_nodes_do_no_harm(folder: Path) -> None:
    """They are like most of those that there are, of which two have two slots."""
    averages: dict[str, list[float]] = {"exact": [], "fifo": []}
    for added in (0, 3):
        actual, *found = rows(folder, "--policy", "exact,fifo", "--add-nodes", str(added))
        assert (actual["agreement"] is None) == (added > 0)
        assert {row["gpus"] for row in found} == {sum(NODES.values()) + 2 * added}
        for row in found:
            averages[row["policy"]].append(row["avg_jct_s"])
    for found in averages.values():
        assert found == sorted(found, reverse=True)
    assert averages["exact"][-1] < averages["exact"][0]


def test_other_options_work_with_it(folder: Path) -> None:
    done = pipollux(
        *("simulate", "--from-state", "state", "--policy", "fifo", "--load", "2", "--jobs", "2"),
        *("--nodes", "2", "--gpus", "4", "--interval", "10", "--restart-seconds", "1"),
        *("--known-length", "exact", "--save-jobs", "jobs.csv", "--plot", "page.html"),
        cwd=folder,
    )
    assert (done.returncode, done.stderr) == (0, "Wrote page.html\nWrote jobs.csv\n")
    assert done.stdout.splitlines()[-2:] == [
        "actual: what happened under exact; 2 jobs replayed. They trained at 1.00 times (median) "
        "the speed of their models, and so does the replay.",
        "1 job left out: 1 never started.",
    ]
    with (folder / "jobs.csv").open(newline="") as file:
        found = [(row["policy"], row["name"]) for row in csv.DictReader(file)]
    assert found == [
        *(("actual", "job-0"), ("actual", "job-1")),
        *(("fifo", "job-0"), ("fifo", "job-0~2"), ("fifo", "job-1"), ("fifo", "job-1~2")),
    ]
    assert (folder / "page.html").read_text().count("data-chart=") == 4


def test_quotas_are_the_schedulers_or_others(folder: Path) -> None:
    (folder / "teams.yaml").write_text(TEAMS)
    actual, plain = rows(folder, "--policy", "fifo")
    assert "teams" not in plain
    actual, other = rows(folder, "--policy", "fifo", "--teams", "teams.yaml")
    assert actual["agreement"] is None
    with Store(folder / "state" / "pipollux.db") as store:
        store.teams.set_spec(load_teams(folder / "teams.yaml").model_dump(mode="json"))
    actual, own = rows(folder, "--policy", "fifo")
    assert {key: own[key] for key in own if "policy_sec" not in key} == {
        key: other[key] for key in other if "policy_sec" not in key
    }
    for row in (actual, own):
        text, vision = row["teams"]
        assert (text["team"], text["jobs"], vision["team"], vision["jobs"]) == (
            *("text", 2),
            *("vision", 2),
        )
        average = (text["avg_jct_s"] + vision["avg_jct_s"]) / 2
        assert row["avg_jct_s"] == pytest.approx(average)
        assert row["gpu_hours"] == pytest.approx(text["slot_hours"] + vision["slot_hours"])
    done = pipollux("simulate", "--from-state", "state", "-p", "fifo", cwd=folder)
    assert "│ state    │ fifo   │ vision │    2 │" in done.stdout


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--from-state", "nowhere"], "--from-state: {}/nowhere holds no scheduler's store; give"),
        (["--from-state", "new"], "--from-state: {}/new has no nodes, because no scheduler has"),
        (["--from-state", "broken"], "--from-state: {}/broken/pipollux.db"),
        (["--from-state", "idle"], "idle: none of its 1 jobs can be replayed (late never started"),
        (
            ["--from-state", "state", "--generate", "mixed"],
            "--from-state and --generate mixed both",
        ),
        (["--from-state", "state", "w.csv"], "--from-state and w.csv both define the jobs"),
        (["--from-state", "state", "--traces", "t"], "--traces: jobs of a history use their own"),
        (
            ["--generate", "mixed", "--add-nodes", "1"],
            "--add-nodes: adds to the nodes of a history",
        ),
        (
            ["--from-state", "state", "--nodes", "3", "--add-nodes", "1"],
            "--add-nodes: adds to the nodes of a history; give --from-state, and neither --nodes",
        ),
    ],
)
def test_an_admins_mistake_is_one_sentence(folder: Path, args: list[str], expected: str) -> None:
    for name in ("new", "broken", "idle"):
        (folder / name).mkdir()
    (folder / "broken" / "pipollux.db").write_text("no database at all, " * 100)
    for name in ("new", "idle"):
        with Store(folder / name / "pipollux.db", create=True) as store:
            if name == "idle":
                write_settings(store, "ExactPolicy")
                store.submit("late", spec_of("late").model_dump(mode="json"), "token", 3)
    said = complaint(pipollux("simulate", *args, cwd=folder), 2)
    assert said.startswith(expected.format(folder))


@pytest.mark.exhaustive
def test_the_replay_of_a_real_scheduler(cli: Cli) -> None:
    """Beside the replay stands what the processes did; how near it comes depends on the machine.

    The scheduler serves meanwhile, and is not disturbed.
    """
    cli.program = LIGHT
    (cli.folder / "hints.json").write_text(json.dumps(HINTS))
    cli.serve("--interval", "2")
    for number, samples in enumerate((3000, 3000, 1600, 5000, 1200, 4000)):
        entry = (
            f"name: job-{number}, script: {PACED}, max_replicas: 4, args: [hints.json, '{samples}']"
        )
        (cli.folder / "job.yaml").write_text(f"jobs:\n  - {{{entry}}}\n")
        assert cli("submit", "job.yaml").returncode == 0
    wait_until(lambda: all(job["phase"] == "Complete" for job in cli.jobs().values()))
    with Store(cli.state_dir / "pipollux.db") as store:
        last = store.last_event()
        actual, exact, _ = rows(cli.folder, "--policy", "exact,fifo")
        _, more = rows(cli.folder, "--policy", "exact", "--add-nodes", "2")
        assert store.last_event() == last
        lives = [(job.submitted_at, job.ended_at or 0.0) for job in store.jobs()]
    assert (actual["jobs"], actual["left_out"], actual["cut_short"]) == (len(lives), [], {})
    assert actual["avg_jct_s"] == pytest.approx(sum(e - b for b, e in lives) / len(lives), abs=0.05)
    begin, end = min(b for b, _ in lives), max(e for _, e in lives)
    assert actual["makespan_s"] == pytest.approx(end - begin, abs=0.05)
    found = actual["agreement"]
    assert found["avg_jct_ratio"] == pytest.approx(exact["avg_jct_s"] / actual["avg_jct_s"])
    assert found["makespan_ratio"] == pytest.approx(exact["makespan_s"] / actual["makespan_s"])
    assert more["gpus"] == 2 * exact["gpus"]  # two nodes beside two like them
