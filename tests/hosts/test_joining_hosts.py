"""A replica on another host joins a job that was started by hand, and goes on with it alone."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.hosts.harness.hosts import Hosts
from tests.hosts.job import torchrun
from tests.hybrid.resize.changing_job import SCRIPT, ChangingJob
from tests.hybrid.resize.over import over_both
from tests.hybrid.resize.test_unplanned_death import SCRIPT as DYING
from tests.hybrid.resize.test_unplanned_death import DyingJob
from tests.services import require_hosts

pytestmark = pytest.mark.exhaustive


@over_both
@pytest.mark.parametrize("processes", [1, 2])
def test_another_host_joins_and_the_first_leaves(
    tmp_path: Path, repository: Path, processes: int, over: dict[str, str]
) -> None:
    """A replica of one process, or of one for each stage."""
    require_hosts()
    settings = {"CHANGES": "5,12", "PROCESSES": str(processes), **over}
    with Hosts(2) as hosts, ChangingJob(tmp_path / "job", repository, **settings) as job:
        run = partial(torchrun, hosts, processes=processes)
        with run(["n1"], SCRIPT, tmp_path, job.environment) as first:
            job.wait_until_at(5)
            with run(["n2"], SCRIPT, tmp_path, job.environment) as second:
                job.wait_until_at(12)
                job.ask_to_leave(0, 2)
                assert first.wait() == {"n1": 0}, first.logs
                assert second.wait() == {"n2": 0}, second.logs
        assert job.check() == [(1, 1), (8, 2), (15, 1)]


@over_both
@pytest.mark.parametrize("lost", ["n3", "n1"])
def test_those_on_other_hosts_go_on_without_a_lost_one(
    tmp_path: Path, repository: Path, lost: str, over: dict[str, str]
) -> None:
    """It still sees the folder, and finds itself left out."""
    require_hosts()
    settings = {"CHANGES": "5,9", "PIPOLLUX_HOST_TIMEOUT": "4", **over}
    with (
        Hosts(3) as hosts,
        DyingJob(tmp_path / "job", repository, **settings) as job,
        ExitStack() as started,
    ):
        gate = job.results / "hold-15"
        gate.touch()
        agents = {}
        for host, step in zip(hosts.names, (5, 9, None), strict=True):
            run = torchrun(hosts, [host], DYING, tmp_path, job.environment)
            agents[host] = started.enter_context(run)
            if step is not None:
                job.wait_until_at(step)
        job.wait_for(lambda: len(list(job.results.glob("reached-15-*"))) == 3, "step 15")
        hosts.link_down(lost)
        gate.unlink()
        codes = {host: agent.wait()[host] for host, agent in agents.items()}
        logs = {host: agent.log(host) for host, agent in agents.items()}
        assert codes == {host: int(host == lost) for host in hosts.names}, logs
        assert "have continued without this one" in logs[lost]
        assert job.check_done() == [(1, 1), (8, 2), (12, 3), (16, 2)]
