"""Jobs of several users under one scheduler of root's, as steps of a real Slurm."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.backend.replica import command
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.store import StateDir
from tests.hosts.harness.hosts import Hosts
from tests.sched.backend.run_as_case import Case, open_folder
from tests.sched.scripts import LIGHT_AGENT
from tests.services import require_slurm

USERS = ("nobody", "daemon")


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Path, str]]:
    """A folder and a Python for everybody, there before the hosts are, which else do not see it."""
    require_slurm()
    with open_folder() as made:
        yield made


@pytest.fixture(scope="module")
def hosts(place: tuple[Path, str]) -> Iterator[Hosts]:  # they see it
    with Hosts(3) as made:
        yield made


@pytest.fixture
def _light(place: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", place[1])
    monkeypatch.setattr(command, "_AGENT", LIGHT_AGENT)


@pytest.fixture
def case(place: tuple[Path, str], _light: None, engine: SlurmEngine, state_dir: StateDir) -> Case:
    return Case(place[0], engine, state_dir, "n1")


def test_each_job_runs_as_its_user_and_sees_nothing_of_the_scheduler(case: Case) -> None:
    """They save and stop as others do, and where they stopped is known."""
    for user in USERS:
        case.start(user)
    for user in USERS:
        said, account = case.said(user), pwd.getpwnam(user)
        ids = [account.pw_uid, account.pw_uid, account.pw_gid]
        assert said["ids"] == [*ids, os.getgrouplist(user, account.pw_gid)]
        assert said["names"] == [account.pw_dir, user, user]
        assert said["folder"] == str(case.folder)
        assert said["step"] is not None
        assert said["seen"] == []
        assert case.saved(user).joinpath("checkpoint").stat().st_uid == account.pw_uid
    for user in USERS:
        case.attempts.stop(user, 60.0)
        assert case.exited(user) == Exited(1, Outcome.STOPPED, 7)
        assert "/dev/stdout can be opened" in case.log(user)
    assert case.state_dir.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.exhaustive
def test_what_becomes_of_those_that_fail_is_said_in_one_line(case: Case, hosts: Hosts) -> None:
    """A script's own error, a folder that its user may not enter, a user that a node lacks."""
    user, other = USERS
    case.start(user, "fail")
    assert "status 1: RuntimeError: it went wrong" in case.exited(user).message.splitlines()[0]
    private = case.folder / "private"
    private.mkdir(mode=0o700)
    case.attempts.forget(user, 1)
    case.start(user, directory=private)
    said = case.exited(user).message.splitlines()[0]
    assert f"exit status 126: working_dir: user '{user}', as whom the job runs, cannot" in said
    assert f"enter {private} on node n1 (Permission denied)" in said
    known = [x for x in Path("/etc/passwd").read_text().splitlines() if not x.startswith(other)]
    passwd = case.folder / "passwd"
    passwd.write_text("\n".join(known) + "\n")
    hosts.call("n1", "mount", "--bind", str(passwd), "/etc/passwd")
    try:
        case.start(other)
        said = case.exited(other).message.splitlines()[0]
    finally:
        hosts.call("n1", "umount", "/etc/passwd")
    assert f"exit status 126: run_as: node n1 has no user '{other}', as whom the job runs" in said
