"""A replica on another host joins a job that was started by hand, and goes on with it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.harness.hosts import Hosts
from tests.hosts.job import torchrun
from tests.hybrid.live.changing_job import SCRIPT, ChangingJob
from tests.services import require_hosts

pytestmark = pytest.mark.exhaustive


def test_another_host_joins_and_the_first_leaves(tmp_path: Path, repository: Path) -> None:
    require_hosts()
    with Hosts(2) as hosts, ChangingJob(tmp_path / "job", repository, CHANGES="5,12") as job:
        with torchrun(hosts, ["n1"], SCRIPT, tmp_path, job.environment) as first:
            job.wait_until_at(5)
            with torchrun(hosts, ["n2"], SCRIPT, tmp_path, job.environment) as second:
                job.wait_until_at(12)
                job.ask_to_leave(0, 2)
                assert first.wait() == {"n1": 0}, first.logs
                assert second.wait() == {"n2": 0}, second.logs
        assert job.check() == [(1, 1), (8, 2), (15, 1)]
