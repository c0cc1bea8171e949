"""Jobs that run as another user of the machine than the scheduler: real users, real processes."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pydantic
import pytest

import pipollux_protocol
from pipollux_sched.backend import Generations, ReplicaProgram
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.backend.replica import command
from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.spec.job import ClusterSpec, JobSpec, SpecError
from pipollux_sched.store import StateDir
from tests.sched.backends import LaunchFiles, cpu_nodes
from tests.sched.scripts import LIGHT_AGENT
from tests.services import service_missing
from tests.waiting import until

USER = "nobody"
SEEN_BY_ALL = {
    "python": Path(sys.base_prefix),
    "packages": Path(pydantic.__file__).parents[1],
    "ours": Path(pipollux_protocol.__file__).parents[1],
}
"""Folders that everybody may enter, and what stands in them."""
PEEKS = """
import json, os, signal, sys, time
from pathlib import Path

stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
state = Path(os.environ["PIPOLLUX_STATE_DIR"])
seen = []
for path in (state, state / "admin.token", state / "jobs"):
    try:
        os.listdir(path) if path.is_dir() else path.read_bytes()
        seen.append(path.name)
    except OSError:
        pass
saved = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"], "checkpoint")
saved.write_text("1")
print(json.dumps({
    "ids": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()],
    "names": [os.environ[name] for name in ("HOME", "USER", "LOGNAME")],
    "folder": os.getcwd(),
    "seen": seen,
}), flush=True)
if "fail" in sys.argv:
    raise RuntimeError("it went wrong")
while not stopped:
    time.sleep(0.01)
generation = int(os.environ["PIPOLLUX_GENERATION"])
stop = {"generation": generation, "step": 7, "reason": "signal"}
saved.with_name("stopped.json").write_text(json.dumps(stop))
sys.exit(143)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everybody may enter, with a Python that everybody may run."""
    if os.geteuid() != 0:
        service_missing("only root can start processes of another user", "run pytest as root")
    folder = Path(tempfile.mkdtemp(prefix="run-as-", dir="/var/tmp"))
    folder.chmod(0o755)
    with ExitStack() as mounts:
        for name, source in SEEN_BY_ALL.items():
            place = folder / name
            place.mkdir()
            mount = ["mount", "--bind", str(source), str(place)]
            if subprocess.run(mount, capture_output=True, check=False).returncode:
                service_missing("a folder cannot be mounted elsewhere", "run pytest as root")
            mounts.callback(subprocess.run, ["umount", str(place)], check=True)
        monkeypatch.setattr(sys, "executable", str(folder / "python" / "bin" / "python3"))
        monkeypatch.setattr(command, "_AGENT", LIGHT_AGENT)
        yield folder
    shutil.rmtree(folder)


class Case:
    """A scheduler's backend, and a job whose script looks around."""

    def __init__(self, folder: Path) -> None:
        self.account = pwd.getpwnam(USER)
        self.folder = folder
        self.state_dir = StateDir(folder / "state")
        self.state_dir.create()
        self.state_dir.admin_token()
        self.saved = folder / "saved"
        self.saved.mkdir()
        os.chown(self.saved, self.account.pw_uid, self.account.pw_gid)
        self.script = folder / "peeks.py"
        self.script.write_text(PEEKS)
        nodes = ClusterSpec(nodes=tuple(cpu_nodes(n1=1)))
        self.engine = LocalEngine(nodes, self.state_dir)
        launches = LaunchFiles(self.state_dir)
        self.generations = Generations(self.engine, launches, self.state_dir, grace=60.0)

    def start(self, *args: str) -> None:
        program = ReplicaProgram(
            job="peeks",
            script=self.script,
            args=args,
            run_as=USER,
            environment={"PYTHONPATH": f"{self.folder / 'packages'}:{self.folder / 'ours'}"},
            directory=self.folder,
            checkpoints=self.saved / "mine",
        )
        self.generations.poll()
        self.generations.apply(program, 1, ["n1"])

    def exited(self) -> Exited:
        def look() -> Exited | None:
            events = [report.event for report in self.generations.poll()]
            return next((event for event in events if isinstance(event, Exited)), None)

        return until(look, "it has ended")

    @property
    def log(self) -> Path:
        return self.state_dir.log("peeks", 1, 0)

    def said(self) -> dict[str, object]:
        def look() -> str:
            self.generations.poll()
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            return next((line for line in lines if line.startswith("{")), "")

        found: dict[str, object] = json.loads(until(look, "it has looked around"))
        return found


def test_a_job_runs_as_its_user_and_sees_nothing_of_the_scheduler(folder: Path) -> None:
    """It saves and stops as others do, and how it stopped is known."""
    case = Case(folder)
    case.start()
    said, account = case.said(), case.account
    ids = [account.pw_uid, account.pw_uid, account.pw_gid]
    assert said["ids"] == [*ids, os.getgrouplist(USER, account.pw_gid)]
    assert said["names"] == [account.pw_dir, USER, USER]
    assert said["folder"] == str(folder)
    assert said["seen"] == []
    assert case.saved.joinpath("mine", "checkpoint").stat().st_uid == account.pw_uid
    case.generations.stop("peeks", 60.0)
    assert case.exited() == Exited(1, Outcome.STOPPED, 7)
    for path in case.state_dir.path.rglob("*"):
        mode = path.stat().st_mode & 0o777
        assert mode in ((0o700, 0o755) if path.is_dir() else (0o600, 0o644)), path
    assert case.state_dir.path.stat().st_mode & 0o777 == 0o700


def test_why_such_a_job_failed_is_known(folder: Path) -> None:
    """Its agent leaves that where its user may not go."""
    case = Case(folder)
    case.start("fail")
    exited = case.exited()
    assert exited.outcome is Outcome.FAILED
    assert "ended with exit status 1: RuntimeError: it went wrong" in exited.message


def test_a_folder_that_its_user_may_not_enter(folder: Path) -> None:
    case = Case(folder)
    folder.joinpath("private").mkdir(mode=0o700)
    case.folder = folder / "private"
    case.start()
    message = case.exited().message
    assert f"user '{USER}' cannot run the job: [Errno 13] Permission denied" in message
    assert str(case.folder) in message


def test_a_user_that_there_is_not(folder: Path) -> None:
    case = Case(folder)
    spec = JobSpec(name="peeks", script=str(case.script), run_as="no-such-user")
    with pytest.raises(SpecError, match="run_as: this machine has no user 'no-such-user'"):
        case.engine.check(spec)
