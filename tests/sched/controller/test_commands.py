"""What users ask of a running scheduler: suspend, resume, drain, and a node that dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.allocator.job_infos import replica_resources
from pipollux_sched.lifecycle import Phase
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.job import ResourceSpec, SpecError
from pipollux_sched.store import NodeCondition, UnknownJobError, UnknownNodeError
from tests.sched.processes import processes_of
from tests.sched.test_scheduler import CLUSTER, scheduler_on, toy, training, types

pytestmark = pytest.mark.usefixtures("light_agent")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    assert processes_of(tmp_path / "state") == []


@pytest.mark.exhaustive
def test_a_suspended_job_holds_nothing_until_it_is_resumed(directory: Path) -> None:
    with scheduler_on(directory) as scheduler:
        scheduler.submit(toy("toy"))
        assert scheduler.wait(training("toy"), timeout=240)
        scheduler.control.suspend("toy")
        assert scheduler.wait(lambda jobs: jobs["toy"].phase is Phase.SUSPENDED, timeout=240)
        assert scheduler.jobs()["toy"].state.reason == "SuspendedByUser"
        assert processes_of(directory) == []
        # Room there is, but it is not given any: another job is decided on meanwhile.
        scheduler.submit(toy("other", "--steps", "3"))
        assert scheduler.wait(lambda jobs: jobs["other"].phase.ended, timeout=240)
        assert scheduler.jobs()["toy"].phase is Phase.SUSPENDED
        scheduler.control.resume("toy")
        assert scheduler.wait(training("toy"), timeout=240)
        told = [kind for kind in types(scheduler.store.events(), "toy") if kind != "started"]
        assert told == [
            *("submitted", "allocated", "first_step", "suspended", "stopping", "stopped"),
            *("resumed", "allocated", "first_step"),
        ]
        with pytest.raises(UnknownJobError):
            scheduler.control.suspend("nobody")


@pytest.mark.exhaustive
def test_jobs_leave_a_node_that_drains_and_one_that_is_dead(directory: Path) -> None:
    """A drained one is left when it has saved, a dead one at once; neither counts as a failure."""
    with Scheduler(directory, CLUSTER, interval=0.3) as scheduler:
        scheduler.submit(toy("toy", num_stages=2, max_replicas=1))
        assert scheduler.wait(training("toy"), timeout=240)
        first = scheduler.jobs()["toy"].state.running_on[0]
        other = {"node-a": "node-b", "node-b": "node-a"}[first]
        scheduler.control.set_node(first, NodeCondition.DRAINING, "new disk")
        assert scheduler.wait(
            lambda jobs: jobs["toy"].state.running_on == (other,) and training("toy")(jobs), 60
        )
        scheduler.control.set_node(first, NodeCondition.READY)
        scheduler.control.set_node(other, NodeCondition.DEAD, "no power")
        assert scheduler.wait(
            lambda jobs: jobs["toy"].state.running_on == (first,) and training("toy")(jobs), 60
        )
        toy_now = scheduler.jobs()["toy"]
        assert (toy_now.state.failures, toy_now.state.attempt) == (0, 3)
        stops = [e["why"] for e in scheduler.store.events() if e["type"] == "stopping"]
        assert stops[-1] == f"Node {other} is dead: no power."
        nodes = scheduler.store.nodes()
        assert (nodes[other].condition, nodes[first].condition) == ("dead", "ready")
        with pytest.raises(UnknownNodeError, match="no node is named 'node-z'"):
            scheduler.control.set_node("node-z", NodeCondition.READY)


def test_where_a_job_saves_and_what_its_stages_need(directory: Path, tmp_path: Path) -> None:
    """Its own folder, for it alone; and what each stage needs is asked of one node."""
    with scheduler_on(directory) as scheduler:
        scheduler.submit(toy("toy", "--steps", "3", checkpoint_dir=str(tmp_path / "kept")))
        with pytest.raises(SpecError, match="is job 'toy''s; give each job its own folder"):
            scheduler.submit(toy("other", checkpoint_dir=str(tmp_path / "kept")))
        assert scheduler.wait(lambda jobs: jobs["toy"].phase.ended, timeout=240)
        log = scheduler.state_dir.log("toy", 1, 0).read_text()
        assert json.loads(log.splitlines()[0])["PIPOLLUX_CHECKPOINT_DIR"] == str(tmp_path / "kept")
    wide = toy(
        "wide",
        num_stages=2,
        resources=ResourceSpec(cpus=1),
        resources_per_stage=ResourceSpec(cpus=2, memory=8),
    )
    assert replica_resources(wide) == {"slots": 2, "cpus": 5, "memory": 16}
    assert replica_resources(wide, 4) == {"slots": 4, "cpus": 9, "memory": 32}


def test_the_admin_token_lasts(directory: Path) -> None:
    """A page that is open, or a script, need not be told it again; removed, there is another."""
    tokens = []
    for _ in range(2):
        with scheduler_on(directory) as scheduler:
            tokens.append(scheduler.admin_token)
    kept = directory / "admin.token"
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.unlink()
    with scheduler_on(directory) as scheduler:
        tokens.append(scheduler.admin_token)
    assert tokens[0] == tokens[1] != tokens[2]
    assert min(map(len, tokens)) >= 40
