"""`describe`, `explain` and `events` of a job whose replicas join and leave while others train."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_sched.cli import main
from pipollux_sched.lifecycle import Allocate, ElasticReady, Switched, WaitingToJoin
from pipollux_sched.store import StateDir, Store
from tests.sched.resize_events import GROWS, JOB, begin
from tests.sched.store.stores import Clock

Say = Callable[..., str]
Let = Callable[..., None]


@pytest.fixture
def let(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Let]:
    """A job that trains on node-a; let more happen to it."""
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(tmp_path / "state"))
    directory = StateDir(tmp_path / "state")
    directory.create()
    clock = Clock()
    with Store(directory.database, create=True, clock=clock) as store:
        yield begin(store, clock)


@pytest.fixture
def say(let: Let, capsys: pytest.CaptureFixture[str]) -> Say:
    def run(*command: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(command)
        said = capsys.readouterr()
        assert not ended.value.code, said
        return " ".join(said.out.split())  # as if no line had been wrapped

    return run


def data(say: Say, command: str) -> Any:
    return json.loads(say(command, JOB, "--output", "json"))


def test_a_change_that_is_under_way(let: Let, say: Say) -> None:
    assert "Changing" not in say("describe", JOB)
    let(1020.0, Allocate(["node-a", "node-b", "node-b"], "grows from 1 to 3 replicas"))
    on_its_way = "replica 2 on node-b is on its way"
    let(1021.0, WaitingToJoin(1, (1,)))
    told = f"from 1 to 3 replicas; replica 1 on node-b waits to join; {on_its_way}"
    described = say("describe", JOB)
    assert "Allocation 3 replicas of 1 stage on node-a, node-b ×2 Trains on 1 replica" in described
    assert f"Changing {told} " in described
    assert "resizes: replicas 1 on node-b and 2 on node-b are to join" in described
    assert f"Changing: {told}." in say("explain", JOB)
    assert data(say, "describe")["changing"] == told
    assert data(say, "explain")["changing"] == told
    let(1022.0, WaitingToJoin(1, (2,)))
    told = "replica 1 on node-b is about to join; replica 2 on node-b is about to join"
    assert f"Changing from 1 to 3 replicas; {told} " in say("describe", JOB)
    let(1023.0, Switched(1, 2, step=20, seconds=0.25), Allocate(["node-b"], "leaves node-a"))
    assert (
        "Changing from 3 to 1 replica; replica 0 on node-a is to leave; replica 2 on node-b is to "
        "leave "
    ) in say("describe", JOB)


def test_memberships_are_listed_with_their_pauses(let: Let, say: Say) -> None:
    let(1020.0, Allocate(["node-a", "node-b"], GROWS), WaitingToJoin(1, (1,)))
    let(1023.0, Switched(1, 2, step=20, seconds=0.25), Allocate(["node-b"], "leaves node-a"))
    let(1030.0, Switched(1, 3, step=30, seconds=0.05))
    text = say("describe", JOB)
    assert re.search(r"1 1 1 replica of 1 stage on node-a \S+ \S+ – – 1 changed ", text)
    assert re.search(r"1 2 2 replicas of 1 stage on .* – 250 ms 20 changed ", text)
    assert re.search(r"1 3 1 replica of 1 stage on node-b \S+ \S+ – 50\.0 ms 30 runs ", text)
    assert "Replicas 1 on node-b " in text
    found = data(say, "describe")
    assert (found["num_restarts"], found["num_resizes"], found["changing"]) == (0, 2, None)
    assert "resized: 1 replica on node-b trains since step 30" in say("events", "--job", JOB)


def test_explain_tells_whether_a_change_would_be_elastic(let: Let, say: Say) -> None:
    assert "A change would be an elastic resize: replicas join and leave while" in say(
        "explain", JOB
    )
    assert data(say, "explain")["next_change"] == {"elastic": True, "why_restart": None}
    let(
        1020.0,
        Allocate(["node-a", "node-b"], GROWS),
        WaitingToJoin(1, (1,)),
        Switched(1, 2, 20, 0.25),
    )
    assert "An elastic resize: the others train while replicas join or leave." in say(
        "explain", JOB
    )
    why = "the state 'mine' says elastic = False"
    let(1021.0, ElasticReady(1, why))
    assert f"A change would be a restart: {why}." in say("explain", JOB)
    assert data(say, "explain")["next_change"] == {"elastic": False, "why_restart": why}
    let(1030.0, Allocate(["node-a"], "shrinks from 2 to 1 replica"))
    explained = say("explain", JOB)
    assert f"shrinks from 2 to 1 replica A restart: {why}." in explained
    assert "A change would be" not in explained, "it is being stopped"
    assert data(say, "explain")["last_decision"]["why_restart"] == why
    assert f"shrinks from 2 to 1 replica; a restart, as {why}" in say("events", "--job", JOB)
