"""Jobs that run as another user of the machine than the scheduler: real users, real processes."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.backend.replica import command
from pipollux_sched.backend.run_as import check_access
from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import StateDir
from tests.sched.backend.run_as_case import Case, open_folder
from tests.sched.backends import cpu_nodes
from tests.sched.scripts import LIGHT_AGENT

USER = "nobody"


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """A scheduler's backend on this machine."""
    with open_folder() as (folder, python):
        monkeypatch.setattr(sys, "executable", python)
        monkeypatch.setattr(command, "_AGENT", LIGHT_AGENT)
        state_dir = StateDir(folder / "state")
        state_dir.create()
        engine = LocalEngine(ClusterSpec(nodes=tuple(cpu_nodes(n1=1))), state_dir)
        yield Case(folder, engine, state_dir, "n1")


def test_a_job_runs_as_its_user_and_sees_nothing_of_the_scheduler(case: Case) -> None:
    """It saves and stops as others do, and how it stopped is known."""
    case.start(USER)
    said, account = case.said(USER), pwd.getpwnam(USER)
    ids = [account.pw_uid, account.pw_uid, account.pw_gid]
    assert said["ids"] == [*ids, os.getgrouplist(USER, account.pw_gid)]
    assert said["names"] == [account.pw_dir, USER, USER]
    assert said["folder"] == str(case.folder)
    assert said["seen"] == []
    assert case.saved(USER).joinpath("checkpoint").stat().st_uid == account.pw_uid
    case.attempts.stop(USER, 60.0)
    assert case.exited(USER) == Exited(1, Outcome.STOPPED, 7)
    assert "/dev/stderr can be opened" in case.log(USER)
    for path in case.state_dir.path.rglob("*"):
        mode = path.stat().st_mode & 0o777
        assert mode in ((0o700, 0o755) if path.is_dir() else (0o600, 0o644)), path
    assert case.state_dir.path.stat().st_mode & 0o777 == 0o700


def test_why_such_a_job_failed_is_known(case: Case) -> None:
    """Its agent leaves that where its user may not go."""
    case.start(USER, "fail")
    exited = case.exited(USER)
    assert exited.outcome is Outcome.FAILED
    assert "ended with exit status 1: RuntimeError: it went wrong" in exited.message


def test_a_folder_that_its_user_may_not_enter(case: Case) -> None:
    private = case.folder / "private"
    private.mkdir(mode=0o700)
    case.start(USER, directory=private)
    said = case.exited(USER).message.splitlines()[0]
    assert f"exit status 126: working_dir: user '{USER}', as whom the job runs, cannot" in said
    assert f"enter {private} on node " in said


def test_what_its_user_may_not_read_is_refused_when_it_is_submitted(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(script: Path, directory: Path) -> None:
        fields = {"script": str(script), "working_dir": str(directory), "run_as": USER}
        check_access(JobSpec.model_validate({"name": "peeks", **fields}))

    check(case.script, case.folder)
    private = case.folder / "private"
    private.mkdir(mode=0o700)
    hidden = case.folder / "hidden.py"
    hidden.touch(mode=0o600)
    with pytest.raises(SpecError, match=f"working_dir: user '{USER}'.* cannot enter {private};"):
        check(case.script, private)
    with pytest.raises(SpecError, match=f"script: user '{USER}'.* cannot read {hidden};"):
        check(hidden, case.folder)
    monkeypatch.setattr(sys, "executable", str(hidden))
    with pytest.raises(SpecError, match=f"run_as: user '{USER}' cannot run {hidden} or cannot"):
        check(case.script, case.folder)


def test_a_user_that_there_is_not(case: Case) -> None:
    spec = JobSpec(name="peeks", script=str(case.script), run_as="no-such-user")
    with pytest.raises(SpecError, match="run_as: this machine has no user 'no-such-user'"):
        case.engine.check(spec)
