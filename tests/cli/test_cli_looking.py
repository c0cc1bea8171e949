"""`pipollux jobs`, `nodes`, `describe`, `explain` and `events` on what a scheduler has left."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from pipollux_sched.cli import main
from pipollux_sched.cli.jobs import job_table
from pipollux_sched.lifecycle import CANCELLED, Phase, SweepProgress
from pipollux_sched.store import ListedPhase, StateDir, Store
from pipollux_sched.views.jobs import list_jobs
from tests.programs import run_pipollux
from tests.sched.report import synthetic_log as synthetic

from .kept import Clock, kept, spec

Say = Callable[..., str]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Clock]:
    """What a scheduler has left, and when it did."""
    folder, clock = tmp_path_factory.mktemp("left") / "state", Clock()
    with kept(folder, clock):
        return folder, clock


@pytest.fixture
def store(
    left: tuple[Path, Clock], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """A copy of it."""
    state_dir = StateDir(tmp_path / "state")
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(state_dir.path))
    shutil.copytree(left[0], state_dir.path)
    with Store(state_dir.database, clock=Clock(left[1].now)) as store:
        yield store


@pytest.fixture
def say(store: Store, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command that ends well, within this process; return what it printed."""

    def run(*command: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(command)
        said = capsys.readouterr()
        assert int(ended.value.code or 0) == code, said
        if code:
            assert said.out == ""
            assert re.fullmatch(r"Error: .+\n", said.err), said.err
            return said.err
        return said.out

    return run


def data(say: Say, *command: str) -> Any:
    """What a command prints as JSON; the YAML has to say the same."""
    found = json.loads(say(*command, "--output", "json"))
    assert yaml.safe_load(say(*command, "--output", "yaml")) == found
    return found


def test_jobs_of_a_phase(say: Say) -> None:
    lines = say("jobs").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["grown", "Running"],
        ["wide", "Running"],
        ["waiting", "Queued"],
        ["held", "Suspended"],
        ["broken", "Failed"],
        ["gone", "Cancelled"],
    ]
    assert not any(line.endswith(" ") for line in lines)
    assert "\x1b" not in say("jobs")
    chosen = say("jobs", "--phase", "Queued", "--phase", "Suspended").splitlines()[1:]
    assert [line.split()[0] for line in chosen] == ["waiting", "held"]
    for phase, name in (("Cancelled", "gone"), ("cancelled", "gone"), ("FAILED", "broken")):
        (found,) = data(say, "jobs", "--phase", phase)
        assert (found["name"], found["phase"]) == (name, "Failed")
    assert {phase.value for phase in ListedPhase} == {*map(str, Phase), CANCELLED, "Stopping"}
    assert say("jobs", "--phase", "Complete") == "No job is in that phase.\n"
    assert data(say, "jobs", "--phase", "Complete") == []
    first = data(say, "jobs")[0]
    assert (first["name"], first["num_attempts"], first["progress"]["step"]) == ("grown", 2, 21)
    assert "pipollux events --follow" in say("jobs", "--watch", code=2)


def test_a_narrow_terminal_does_without_some_columns(store: Store) -> None:
    jobs, _ = list_jobs(store)
    shown = {}
    for width in (160, 80, 40, 30):
        console = Console(width=width, file=StringIO())
        console.print(job_table(jobs, console))
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]  # a StringIO
        assert max(map(len, lines)) <= width
        assert len(lines) == 1 + len(jobs)
        shown[width] = lines[0].split()
    assert shown[160][-1] == "Message"
    assert shown[80] == [
        *("Job", "Phase", "Stages", "Replicas", "Nodes", "Step", "Loss", "Samples/s", "Age")
    ]
    assert shown[40] == ["Job", "Phase", "Replicas", "Step", "Loss"]
    assert shown[30] == ["Job", "Phase", "Replicas"]  # no number is cut


@pytest.mark.parametrize(
    "command",
    [["describe", "grown"], ["explain", "grown"], ["sweeps"], ["jobs"], ["nodes"]],
    ids=lambda command: command[0],
)
def test_what_nobody_serves_is_not_live(
    store: Store, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command)
    where = re.escape(os.environ["PIPOLLUX_STATE_DIR"])
    told = f"No scheduler serves {where}: this is the last recorded state.\n"
    assert re.fullmatch(told, capsys.readouterr().err)


@pytest.mark.parametrize("command", [["logs", "grown"], ["events"]], ids=lambda command: command[0])
def test_who_follows_what_nobody_serves_is_told(
    store: Store,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--follow"])
    assert ended.value.code == 130
    told = capsys.readouterr().err
    assert told.startswith(f"No scheduler serves {os.environ['PIPOLLUX_STATE_DIR']}: new output ")


def test_version(say: Say) -> None:
    assert say("version") == f"pipollux {data(say, 'version')['version']}\n"


def test_nodes(say: Say) -> None:
    lines = say("nodes").splitlines()
    assert lines[0].split() == [
        *("Node", "Kind", "Slots", "Free", "Used", "by", "Condition", "Since", "Reason")
    ]
    assert re.fullmatch(r"node-a +cpu +2 +0 +grown \(2\) +ready +\S+ ago +–", lines[1])
    assert re.fullmatch(r"node-b +cpu +2 +0 +wide \(2\) +ready +\S+ ago +–", lines[2])
    assert re.fullmatch(r"node-c +cpu +2 +2 +– +draining +\S+ ago +new fans", lines[3])
    assert lines[4] == "3 nodes, 4 of 6 slots used."
    found = data(say, "nodes")
    assert [node["jobs"] for node in found] == [{"grown": 2}, {"wide": 2}, {}]
    assert (found[2]["condition"], found[2]["free"]) == ("draining", 2)


def test_describe(say: Say) -> None:
    text = say("describe", "grown")
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        *("grown", "Conditions", "Spec", "Progress", "Hints", "Attempts", "Last events")
    ]
    assert re.search(r"Allocation +2 replicas of 1 stage on node-a ×2\n", text)
    assert re.search(r"Step +21, 672 samples, epochs done: 1 of 4\n", text)
    assert re.search(r"1 +1 replica of 1 stage on node-a .* stopped \(move\)\n", text)
    assert re.search(r"2 +2 replicas of 1 stage on node-a ×2 .* 6\.00 s +21 +runs\n", text)
    assert re.search(r"Step time +100 ms, predicted 110 ms\n", text)
    assert "perfParams" in text
    assert re.search(r"Pipeline +\d+ stages?, \d+ micro-batch(es)?, gpipe", text)
    assert "none yet" in say("describe", "waiting")
    broken = say("describe", "broken")
    assert "\x1b" not in broken
    assert "Traceback" not in broken
    found = data(say, "describe", "grown")
    assert "token" not in found
    assert [entry["outcome"] for entry in found["attempts"]] == ["stopped", None]
    assert found["hints"]["maxProfiledReplicas"] == 2
    assert found["events"][0]["type"] == "submitted"


def test_explain_a_job_that_runs(say: Say) -> None:
    text = say("explain", "grown")
    assert text.startswith("grown has 2 replicas of 1 stage on node-a ×2.\nRunning: Training")
    assert "grows from 1 to 2 replicas\n" in text
    assert "Predicted speedup 1.89, 1.00 before, at a batch size of 76." in text
    assert re.search(r"one fewer +1 +node-a +1\.00 +32\n", text)
    assert re.search(r"it has +2 +node-a ×2 +1\.89 +76\n", text)
    assert re.search(r"one more +3 +node-a ×2, node-b +2\.\d\d +\d+ +no room now\n", text)
    assert "There is no room for one replica more." in text
    found = data(say, "explain", "grown")
    assert found["last_decision"]["previous_speedup"] == 1.0
    assert found["fewer"] == {
        "nodes": ["node-a"],
        "num_replicas": 1,
        "speedup": 1.0,
        "batch_size": 32,
        "fits": True,
    }
    assert [limit["kind"] for limit in found["limits"]] == ["no_room"]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("wide", "It is not preemptible: what it runs on stays as it is."),
        ("waiting", "needs 2 slots on one node 3 times, there is room for 0"),
        ("held", "its user: pipollux resume held"),
        ("broken", "Failed: Failed once, max_restarts is 0: it �[31mbroke\n"),
        ("gone", "Failed: The job was cancelled."),
    ],
)
def test_explain_the_others(say: Say, job: str, says: str) -> None:
    assert says in say("explain", job)
    assert data(say, "explain", job)["name"] == job


def test_explain_a_sweep_that_runs(say: Say, store: Store) -> None:
    job = spec("rates", sweep={"grid": {"lr": [1, 2]}})
    store.submit(job.name, job.model_dump(mode="json"), "token", 3)
    store.transition("rates", SweepProgress("0 of 2 trials ended, 2 in progress."))
    assert say("explain", "rates").startswith("rates is a sweep: only its trials hold slots.\n")


def test_events(say: Say, store: Store) -> None:
    lines = say("events").splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d grown: submitted", lines[0])
    assert any("node node-c is draining: new fans" in line for line in lines)
    assert len(say("events", "--last", "2").splitlines()) == 2
    assert say("events", "--last", "0") == ""
    of_one = say("events", "--job", "grown", "--type", "allocated", "--type", "hints")
    assert [line.split(" ", 2)[2] for line in of_one.splitlines()] == [
        "grown: starts on 1 replica on node-a",
        "grown: sent hints",
        "grown: grows from 1 to 2 replicas; a restart, as its replicas have not reported that "
        "they can be resized",
        "grown: sent hints",
    ]
    objects = [json.loads(line) for line in say("events", "-o", "json").splitlines()]
    assert [event["id"] for event in objects] == sorted(event["id"] for event in objects)
    later = say("events", "--since", str(objects[-3]["id"]), "-o", "json").splitlines()
    assert [json.loads(line) for line in later] == objects[-2:]
    assert say("events", "--since", "10m") == ""  # the store's clock is that of long ago
    assert say("events", "--since", "36500d").splitlines() == lines


def test_events_of_so_long_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--since 1h` begins at the first event of the last hour, wherever that is among many."""
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(tmp_path))
    clock = Clock()
    with Store(tmp_path / "pipollux.db", create=True, clock=clock) as store:
        for age in (90, 80, 70, 61, 59, 30, 1):
            clock.now = 1_700_000_000.0 - 60 * age
            store.add_event("node", {"node": f"n{age}", "condition": "dead", "reason": ""})
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    with pytest.raises(SystemExit):
        main(["events", "--since", "1h", "--output", "json"])
    found = [json.loads(line)["node"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["n59", "n30", "n1"]


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["describe", "nobody"], 1, "no job is named 'nobody'; there are"),
        (["explain", "nobody"], 1, "no job is named 'nobody'"),
        (["events", "--job", "nobody"], 1, "no job is named 'nobody'"),
        (["events", "--type", "nothing"], 2, "no events of type 'nothing'; give one of: adopted"),
        (["events", "--since", "yesterday"], 2, "--since: 'yesterday' is not a duration"),
        (["jobs", "--phase", "Asleep"], 2, "'Asleep' is not one of"),
        (["drain", "node-a", "--dead", "--undo"], 2, "contradict"),
        (["drain", "node-a", "--undo", "--wait"], 2, "--undo has nothing to --wait for"),
        (["drain", "node-a", "--timeout", "5m"], 2, "--timeout is for --wait"),
        (["drain", "node-a", "--wait", "--timeout", "soon"], 2, "--timeout: 'soon' is not a dur"),
        (["drain", "node-a"], 1, "no scheduler serves"),
        (["suspend", "grown"], 1, "no scheduler serves"),
        (["resume"], 2, "NAME"),
        (["rerun", "gone"], 1, "no scheduler serves"),
        (["update", "gone"], 2, "give a team with --team NAME"),
        (["update", "gone", "--team", "text"], 1, "no scheduler serves"),
        (["delete", "gone", "--yes"], 1, "no scheduler serves"),
        (["delete", "gone"], 2, "cannot ask for confirmation: give --yes"),
        (["delete", "gone", "--output", "json"], 2, "cannot ask for confirmation: give --yes"),
    ],
)
def test_mistakes(say: Say, command: list[str], code: int, says: str) -> None:
    assert says in say(*command, code=code)


def test_what_has_ended_had_what_it_had(say: Say) -> None:
    assert say("explain", "broken").startswith(
        "broken had 1 replica of 1 stage on node-c when it ended."
    )
    assert say("explain", "gone").startswith("gone held no slots when it ended.")


def test_a_report_of_what_a_scheduler_has_kept(say: Say, store: Store, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert data(say, "report", "--save", str(page)) == {"report": str(page)}
    whole = page.read_text()
    assert all(name in whole for name in ("grown", "wide", "broken", "ExactPolicy"))
    say("report", "--job", "grown", "--save", str(page))
    one = page.read_text()
    assert "grown" in one
    assert ">broken<" in whole
    assert ">broken<" not in one
    assert "no job is named 'nobody'" in say("report", "--job", "nobody", code=1)
    ended = ("report", "--job", "gone", "--since", "1h", "--save", str(page))
    assert "nothing to report" in say(*ended, code=1)
    assert "--since: 'soon' is not a duration" in say("report", "--since", "soon", code=2)


def test_what_a_report_was_written_to(tmp_path: Path) -> None:
    log = synthetic.write_log(tmp_path / "events.jsonl", synthetic.synthetic_log()[:200])
    output = tmp_path / "report.html"
    for form, says in (("json", {"report": str(output)}), ("table", f"Wrote {output}\n")):
        done = run_pipollux("report", log, "--save", output, "--output", form)
        assert done.returncode == 0, done.stderr
        assert (json.loads(done.stdout) if form == "json" else done.stdout) == says
    assert "<html" in output.read_text()
