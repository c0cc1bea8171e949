"""Every command of docs/reference/rest.md is run, in its order, against a real supervisor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from pipollux_sched.lifecycle import Allocate, Intent, Phase
from pipollux_sched.server import Limits
from pipollux_sched.server.connections import MOST_CONNECTIONS
from pipollux_sched.server.limits import REPLICAS_OF_A_RATE
from pipollux_sched.server.request_bodies import BODY_LIMIT, MAX_DEPTH
from pipollux_sched.store import ServerInfo
from tests.sched.supervised import ADMIN, Service
from tests.services import service_missing

# A refusal fails a command, and streams are listened to for a second.
CURL = """
curl() {
  case "$*" in
    */events/stream*) command curl --fail-with-body -sS --max-time 1 "$@" || [ $? = 28 ] ;;
    *) command curl --fail-with-body -sS --max-time 20 "$@" ;;
  esac
}
"""


def test_every_command(repository: Path, tmp_path: Path) -> None:
    if not (shutil.which("curl") and shutil.which("jq")):
        service_missing("the page asks with curl and jq")
    text = (repository / "docs/reference/rest.md").read_text()
    setup, *blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    assert sum(block.count("curl ") for block in blocks) == 43
    with Service(tmp_path / "state") as service:
        info = ServerInfo(service.server.url, os.getpid(), ADMIN)
        service.state_dir.write_server(info)
        (service.state_dir.path / "admin.token").write_text(f"{ADMIN}\n")
        environment = {**os.environ, "PIPOLLUX_STATE_DIR": str(service.state_dir.path)}
        said = ""
        for block in blocks:
            jobs = service.store.jobs()
            if jobs:
                environment["PIPOLLUX_TOKEN"] = jobs[0].token
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", CURL + setup + block],
                env=environment,
                cwd=repository,
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, (block, done.stdout, done.stderr)
            said += done.stdout
            if not jobs:
                service.store.transition("char-lm", Allocate(["node-a"], "it is free"))
        job = service.store.job("char-lm")
        assert job.phase is Phase.RUNNING
        assert job.state.intent is Intent.CANCEL
        assert service.store.last_points()["char-lm"].step == 7
    assert '"complete":true' in said
    assert "id: 4\ndata: " in said
    assert "pipollux_policy_seconds_count" in said


def test_the_limits_are_those_that_the_page_tells(repository: Path) -> None:
    text = " ".join((repository / "docs/reference/rest.md").read_text().split())
    limits = {name: f"{value:g}" for name, value in vars(Limits()).items()}
    shown = dict(re.findall(r"\| `(\w+)` \| ([\d.]+) \|", text))
    assert {name: shown[name] for name in limits} == limits
    for words in (
        f"for each {REPLICAS_OF_A_RATE} replicas of the job",
        f"at most {BODY_LIMIT // 2**20} MiB and {MAX_DEPTH} levels",
        f"at most {MOST_CONNECTIONS};",
    ):
        assert words in text
