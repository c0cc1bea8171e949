"""A job that runs as another user of the machine and looks around, on any engine."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pydantic

import pipollux_protocol
from pipollux_sched.backend import ReplicaGroupManager, ReplicaProgram
from pipollux_sched.backend.base import Engine
from pipollux_sched.lifecycle import Exited
from pipollux_sched.store import StateDir
from tests.sched.backends import LaunchFiles
from tests.services import service_missing
from tests.waiting import until

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
state = Path(sys.argv[1])
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
    "step": os.environ.get("SLURM_STEP_ID"),
}), flush=True)
for name in ("/dev/stdout", "/dev/stderr"):
    with open(name, "a") as stream:
        print(name, "can be opened", file=stream)
if "fail" in sys.argv:
    raise RuntimeError("it went wrong")
while not stopped:
    time.sleep(0.01)
attempt = int(os.environ["PIPOLLUX_ATTEMPT"])
stop = {"attempt": attempt, "step": 7, "reason": "signal"}
saved.with_name("stopped.json").write_text(json.dumps(stop))
sys.exit(143)
"""


@contextmanager
def open_folder() -> Iterator[tuple[Path, str]]:
    """Make a folder that everybody may enter, with a Python that everybody may run.

    Yields:
        the folder, and that Python.
    """
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
        yield folder, str(folder / "python" / "bin" / "python3")
    shutil.rmtree(folder)


class Case:
    """A backend, and jobs whose script looks around.

    Args:
        folder: one that everybody may enter.
        engine: where they run.
        state_dir: the engine's.
        node: on which.
    """

    def __init__(self, folder: Path, engine: Engine, state_dir: StateDir, node: str) -> None:
        self.folder, self.engine, self.state_dir, self.node = folder, engine, state_dir, node
        state_dir.admin_token()
        self.script = folder / "peeks.py"
        self.script.write_text(PEEKS)
        launches = LaunchFiles(state_dir)
        self.attempts = ReplicaGroupManager(engine, launches, state_dir, grace=60.0)

    def saved(self, user: str) -> Path:
        """Return the folder that a user's job saves in."""
        folder = self.folder / f"saved-{user}"
        if not folder.exists():
            folder.mkdir()
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        return folder / "mine"

    def start(self, user: str, *args: str, directory: Path | None = None) -> None:
        """Start a user's job, which has the user's name."""
        program = ReplicaProgram(
            job=user,
            script=self.script,
            args=(str(self.state_dir.path), *args),
            run_as=user,
            environment={"PYTHONPATH": f"{self.folder / 'packages'}:{self.folder / 'ours'}"},
            directory=directory or self.folder,
            checkpoints=self.saved(user),
        )
        self.attempts.poll()
        self.attempts.apply(program, 1, [self.node])

    def exited(self, user: str) -> Exited:
        """Wait until a user's job has ended, and return how."""

        def look() -> Exited | None:
            events = [each.event for each in self.attempts.poll() if each.job == user]
            return next((event for event in events if isinstance(event, Exited)), None)

        return until(look, "it has ended")

    def log(self, user: str) -> str:
        """Return what a user's job has printed."""
        path = self.state_dir.log(user, 1, 0)
        return path.read_text() if path.exists() else ""

    def said(self, user: str) -> dict[str, object]:
        """Wait until a user's job has looked around, and return what it has seen."""

        def look() -> str:
            ends = [each for each in self.attempts.poll() if isinstance(each.event, Exited)]
            assert not ends, self.log(user)
            lines = self.log(user).splitlines()
            return next((line for line in lines if line.startswith("{")), "")

        found: dict[str, object] = json.loads(until(look, "it has looked around"))
        return found
