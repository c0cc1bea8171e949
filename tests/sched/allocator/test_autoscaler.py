"""The autoscaler: what it marks and asks for, and real jobs that have to move."""

from __future__ import annotations

import logging
import queue
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipollux_policies import (
    AutoscalingRules,
    ExactPolicy,
    FairSpeedup,
    JobInfo,
    NodeInfo,
    NodePlan,
)
from pipollux_policies.teams.team import Team, Teams
from pipollux_sched.allocator.autoscaler import Autoscaler
from pipollux_sched.allocator.expander import CommandExpander, ExpanderError
from pipollux_sched.allocator.job_infos import linear_speedup
from pipollux_sched.report.event_text import event_line
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.spec.job import JobSpec
from tests.sched.processes import processes_of
from tests.sched.scripts import TOY

NODES = {name: NodeInfo({"slots": 2}) for name in "abc"}
JOB = JobInfo({"slots": 1}, linear_speedup, 0.0, 1, 2)


class Cloud:
    """Notes what it is asked for, and may refuse."""

    def __init__(self) -> None:
        self.asked: queue.Queue[tuple[int, tuple[str, ...]]] = queue.Queue()
        self.refuses: Exception | None = None

    def num_nodes(self) -> int:
        return len(NODES)

    def request(self, desired_nodes: int, release: Sequence[str] = ()) -> None:
        self.asked.put((desired_nodes, tuple(release)))
        if self.refuses is not None:
            refusal, self.refuses = self.refuses, None
            raise refusal


def autoscaler(cloud: Cloud, heard: list[NodePlan], **rules: int) -> Autoscaler:
    policy = ExactPolicy(FairSpeedup())
    return Autoscaler(AutoscalingRules(**rules), cloud, policy, on_change=heard.append)


def test_nodes_are_drained_before_they_are_given_back() -> None:
    """One job on two slots of six: the others are idle, but one of them is still being left."""
    cloud, heard = Cloud(), list[NodePlan]()
    scaler = autoscaler(cloud, heard, max_nodes=4, window=2)
    held = {"job": ["a", "a"]}
    assert scaler.round({"job": JOB}, NODES, held, {"a"}) == ()
    drain = scaler.round({"job": JOB}, NODES, held, {"a", "b"})
    assert len(drain) == 1, "two nodes, half used, are in the middle of the band"
    marked = {name: replace(node, draining=name in drain) for name, node in NODES.items()}
    again = scaler.round({"job": JOB}, marked, held, {"a", *drain})
    assert again == drain
    assert heard[-1] == NodePlan(drain, (), 3), "something still runs there"
    assert scaler.round({"job": JOB}, marked, held, {"a"}) == drain
    assert heard[-1] == NodePlan(drain, drain, 2)
    scaler.start()
    assert cloud.asked.get(timeout=240) == (2, drain)
    # More jobs than two nodes hold in comfort: what drained is needed again.
    jobs = {str(number): JOB for number in range(6)}
    full = {name: ["ab"[int(name) % 2]] for name in "0123"}
    left = [scaler.round(jobs, marked, full, {"a", "b"}) for _ in range(3)]
    assert left[-1] == ()
    assert cloud.asked.get(timeout=240)[0] >= 3
    scaler.stop()


def test_only_news_is_told_and_what_is_right_is_not_asked_for() -> None:
    cloud, heard = Cloud(), list[NodePlan]()
    scaler = autoscaler(cloud, heard, min_nodes=3, max_nodes=3)
    for _ in range(3):
        assert scaler.round({"job": JOB}, NODES, {}, ()) == ()
    scaler.start()
    scaler.stop()
    assert heard == [NodePlan((), (), 3)]
    assert cloud.asked.empty()


@pytest.mark.parametrize(
    ("quota", "desired"), [(2, 3), (12, 6)], ids=["loans rent no node", "quotas do"]
)
def test_nodes_are_rented_for_quotas_alone(quota: int, desired: int) -> None:
    """Six jobs fill three nodes and would fill more; the quota is less than that, or more."""
    cloud, heard = Cloud(), list[NodePlan]()
    scaler = autoscaler(cloud, heard, max_nodes=6, window=1)
    of = Teams({"text": Team("text", quota=quota)})
    jobs = {f"t{n}": replace(JOB, team="text") for n in range(6)}
    # Those of a team without a quota do not count, however many nodes one needs to run at all.
    jobs["wide"] = replace(JOB, resources={"slots": 2}, min_replicas=5, max_replicas=5)
    held = {f"t{n}": ["abc"[n // 2]] for n in range(6)}
    scaler.round(jobs, NODES, held, {"a", "b", "c"}, of)
    assert heard[-1] == NodePlan((), (), desired)


@pytest.mark.parametrize("refusal", [ExpanderError("the cloud is full"), OSError("no network")])
def test_a_refusal_is_said_and_asked_again(
    refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = Cloud()
    cloud.refuses = refusal
    scaler = autoscaler(cloud, [], min_nodes=5, max_nodes=5)
    scaler.start()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scaler.round({}, NODES, {}, ())
            assert cloud.asked.get(timeout=240) == (5, ())
        scaler.stop()
    assert str(refusal) in caplog.text


@pytest.mark.usefixtures("light_agent")
@pytest.mark.exhaustive
def test_real_jobs_leave_the_node_that_is_given_back(tmp_path: Path) -> None:
    """Two jobs fill a node each by half; one node is allowed."""
    names = ("node-a", "node-b")
    cluster = ClusterSpec(nodes=tuple(NodeSpec(name=n, slots=2, kind="cpu") for n in names))
    told = tmp_path / "told.txt"
    write = f"import sys; open({str(told)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
    command = f'{sys.executable} -c "{write}" {{desired}} of {{current}} {{release}}'
    scheduler = Scheduler(
        tmp_path / "state",
        cluster,
        ExactPolicy(),
        interval=0.5,
        autoscaling=AutoscalingRules(min_nodes=1, max_nodes=1),
        expander=CommandExpander(command, count=lambda: len(names)),
    )
    with scheduler:
        for name in ("one", "two"):
            scheduler.submit(JobSpec(name=name, script=str(TOY), max_replicas=1))

        def given_back(_: object) -> bool:
            return told.exists() and any("node-" in line for line in told.read_text().splitlines())

        assert scheduler.wait(given_back, timeout=240)
        first = next(line for line in told.read_text().splitlines() if "node-" in line)
        (gone,) = first.removeprefix("1 of 2 ").split(",")
        (stays,) = set(names) - {gone}

        def together(jobs: object) -> bool:
            states = [job.state for job in scheduler.jobs().values()]
            return all(s.running_on == (stays,) and s.reason == "Training" for s in states)

        assert scheduler.wait(together, timeout=240)
        events = scheduler.store.events(types=["autoscaling"])
    lines = [event_line(event) for event in events]
    assert lines[-1] is not None
    assert lines[-1][9:] == f"wants 1 node; {gone} to drain; {gone} to release"
    assert processes_of(tmp_path / "state") == []
