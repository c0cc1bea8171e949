"""`pipollux plan` and `apply` without files: what the scheduler would change, and letting it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_policies import POLICIES, ExactPolicy, make_policy
from pipollux_sched.allocator.allocator import Allocator
from pipollux_sched.allocator.snapshot import Snapshot, SnapshotReader
from pipollux_sched.allocator.strategy import PolicyStrategy
from pipollux_sched.cli import main
from pipollux_sched.planning.dry_run import plan_live
from pipollux_sched.store import NodeCondition, Store
from pipollux_sched.views.cluster import serving_policy

from .kept import HINTS, Clock, kept, spec
from .runner import TOY, Cli, one_sentence, wait_until


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """What `kept` leaves, with a node free again and a job that has just come."""
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(tmp_path / "state"))
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    with kept(tmp_path / "state", clock) as store:
        store.set_node_condition("node-c", NodeCondition.READY)
        job = spec("new")
        store.submit(job.name, job.model_dump(mode="json"), "token", 3)
        clock.now += 600
        yield store


def contents(store: Store) -> tuple[Any, ...]:
    return store.jobs(), store.last_event(), store.nodes()


def test_the_plan_is_what_the_allocator_then_does(store: Store) -> None:
    before = contents(store)
    state = Snapshot.read(store)
    planned = {
        change.job: (change.nodes, change.num_stages, change.why)
        for change in plan_live(state, PolicyStrategy(ExactPolicy()))
        if change.changes
    }
    assert contents(store) == before
    assert set(planned) >= {"new"}

    reader, strategy = SnapshotReader(store, restart_seconds=30.0), PolicyStrategy(ExactPolicy())
    allocator = Allocator(reader, strategy, carry_out=store.transition_all)
    done = {one.job: (one.nodes, one.num_stages, one.why) for one in allocator.run_once()}
    assert done == planned


def test_dead_nodes_are_not_planned_with(store: Store) -> None:
    store.set_node_condition("node-c", NodeCondition.DEAD)
    store.set_node_condition("node-b", NodeCondition.DRAINING)
    nodes = Snapshot.read(store).nodes
    assert {name: node.draining for name, node in nodes.items()} == {
        "node-a": False,
        "node-b": True,
    }


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_found_by_what_events_call_them(store: Store, name: str) -> None:
    store.add_event("cluster", {"nodes": {}, "policy": type(make_policy(name)).__name__})
    assert serving_policy(store) == name


def say(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "this is the last recorded state" in said.err
    return said.out


def test_plan_without_files(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    text = say(capsys, "plan")
    assert re.search(r"~ +new +– +1×1 on node-c +.* starts on 1 replica on node-c", text)
    assert re.search(r"\n +wide +1×2 on node-b +1×2 on node-b +– +– +stays on .*not preempt", text)
    assert re.search(r"\n +waiting +– +– +– +– +waits: needs 2 slots on one node 3 times", text)
    assert re.search(r"\d changes? to 4 jobs by the policy exact, if it decided now\.\n$", text)
    everything = json.loads(say(capsys, "plan", "--output", "json"))
    assert [one["job"] for one in everything] == ["grown", "wide", "waiting", "new"]
    assert everything[0]["previous_speedup"] == pytest.approx(1.89, abs=0.01)
    changes = json.loads(say(capsys, "plan", "--diff", "--output", "json"))
    assert changes == [one for one in everything if one["changes"]]
    assert "by the policy fifo" in say(capsys, "plan", "--diff", "--policy", "fifo")


@pytest.mark.exhaustive
def test_apply_asks_and_lets_the_scheduler_do_it(cli: Cli) -> None:
    hints = cli.folder / "hints.json"
    hints.write_text(json.dumps(HINTS))
    (cli.folder / "jobs.yaml").write_text(
        f'jobs:\n  - {{name: toy, script: {TOY}, args: [--hints, "{hints}"], max_replicas: 2}}\n'
    )
    assert "no scheduler has kept a store there yet" in one_sentence(cli("plan"), 1)
    assert "no scheduler serves" in one_sentence(cli("apply"), 1)
    cli.serve("--interval", "10000")
    assert cli("submit", "jobs.yaml").returncode == 0

    def would_grow() -> bool:
        with Store(cli.state_dir / "pipollux.db") as store:
            planned = plan_live(Snapshot.read(store), PolicyStrategy(ExactPolicy()))
            return [len(one.nodes) for one in planned if one.changes] == [2]

    wait_until(would_grow)
    refused = cli("apply", stdin="n\n")
    assert refused.returncode == 1
    assert "Carry this out?" in refused.stdout
    assert refused.stderr == "Error: nothing was changed\n"
    assert "cannot ask for confirmation: give --yes" in one_sentence(cli("apply", stdin=""), 2)
    assert len(cli.jobs()["toy"]["assigned"]) == 1
    applied = cli("apply", "--yes")
    assert applied.returncode == 0, applied.stderr
    assert re.search(r"~ +toy +1×1 on node-a +2×1 on .* 1\.00 → 1\.\d\d ", applied.stdout)
    wait_until(lambda: len(cli.jobs()["toy"]["running_on"]) == 2)
    wait_until(lambda: cli.jobs()["toy"]["reason"] == "Training")
    again = cli("apply", "--yes")
    assert again.stdout == "0 changes to 1 job by the policy exact, if it decided now.\n"
    told = cli("apply", "--yes", "--output", "json")
    assert (told.returncode, json.loads(told.stdout)) == (0, [])
