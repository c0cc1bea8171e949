"""Jobs whose files, arguments, output and ends are odd, run by `pipollux serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from .runner import CLUSTER, LIGHT, PIPOLLUX, TOY, Cli, one_sentence, wait_until

ARGS = ["{'a': {'b': 1}}", "a;b `c` $(d) $HOME", "one\ntwo", '"', "", "ünï→日本", "--", "--help"]
VARIABLES = {"ODD_LINES": "a\nb", "ODD_QUOTES": "q\"'$HOME", "ODD_LETTERS": "日本", "ODD_EMPTY": ""}
SHOWS = """
import json, os, sys
odd = {name: value for name, value in os.environ.items() if name.startswith("ODD_")}
print(json.dumps([sys.argv[1:], odd, os.getcwd()]))
"""
SCRIPTS = {
    "shows": SHOWS.encode(),
    "crlf": b'import sys\r\nprint("fine")\r\nsys.exit(0)\r\n',
    "mark": b'\xef\xbb\xbfprint("fine")\n',
    "binary": rb'import sys; sys.stdout.buffer.write(b"before\n\x80\x00\xff\nafter\n")',
    "endless": b'import sys; sys.stdout.write("x" * 3_000_000 + "END")',
    "closes": b"import os\nfor file in range(3): os.close(file)\n",
    "shell": b'#!/bin/sh\necho "$1 hello"\n',
    "unknown": b"import sys; sys.exit(255)",
    "term": b"import sys; sys.exit(143)",
    "late": b"import time; time.sleep(300)",
}
ENDS = {
    "shell": "ended with exit status 1: SyntaxError: invalid syntax",
    "unknown": "ended with exit status 255",
    "term": "ended with exit status 143",
    "late": "+00:00, has passed; submit the job again to let it go on.",
}


def odd_jobs(folder: Path) -> str:
    """Write the scripts and the file of their jobs; return its name."""
    (folder / "elsewhere").mkdir()
    (folder / "link").symlink_to("elsewhere")
    jobs = []
    for name, text in SCRIPTS.items():
        (folder / "elsewhere" / f"{name}.py").write_bytes(text)
        jobs.append({"name": name, "script": f"link/{name}.py", "max_restarts": 0})
    jobs[-1]["deadline"] = "1s"
    jobs[0] |= {"args": ARGS, "environment": VARIABLES, "working_dir": "link"}
    (folder / "odd.yaml").write_text(yaml.safe_dump({"jobs": jobs}, allow_unicode=True))
    return "odd.yaml"


@pytest.mark.exhaustive
def test_odd_jobs_get_what_was_written_and_end_as_they_did(cli: Cli) -> None:
    cli.program = LIGHT
    cli.serve("--interval", "0.5")
    assert cli("submit", odd_jobs(cli.folder)).returncode == 0
    wait_until(lambda: {job["phase"] for job in cli.jobs().values()} <= {"Complete", "Failed"})
    jobs = cli.jobs()
    failed = {name: job["message"] for name, job in jobs.items() if job["phase"] == "Failed"}
    assert failed.keys() == ENDS.keys()
    for name, end in ENDS.items():
        assert end in failed[name]
    given = json.loads(cli("logs", "shows").stdout)
    assert given == [ARGS, VARIABLES, str(cli.folder / "elsewhere")]
    assert cli("logs", "mark").stdout == cli("logs", "crlf").stdout == "fine\n"
    assert cli("logs", "endless").stdout.strip() == "x" * 3_000_000 + "END"
    bytes_ = subprocess.check_output([PIPOLLUX, "logs", "binary"], env=cli.environment)
    assert bytes_ == b"before\n\x80\x00\xff\nafter\n"


def cluster(cli: Cli, *slots: int) -> None:
    nodes = "".join(f"- {{name: node-{n}, slots: {n}, kind: cpu}}\n" for n in slots)
    (cli.folder / "cluster.yaml").write_text(f"nodes:\n{nodes}")


@pytest.mark.exhaustive
def test_a_job_that_the_cluster_of_a_restarted_scheduler_never_holds(cli: Cli) -> None:
    """And no name leads a command to another path of the scheduler than a job's."""
    cli.program = LIGHT
    cluster(cli, 1, 3)
    (cli.folder / "wide.yaml").write_text(
        f"jobs:\n  - {{name: wide, script: {TOY}, num_stages: 3}}\n"
    )
    server = cli.serve("--interval", "0.5")
    assert cli("submit", "wide.yaml").returncode == 0
    wait_until(lambda: cli.jobs()["wide"]["phase"] == "Running")
    server.send_signal(signal.SIGKILL)
    server.wait()
    left = cli.state_dir / "server.json"  # and its process id is another process's by now
    left.write_text(json.dumps(json.loads(left.read_text()) | {"pid": os.getpid()}))
    assert "no scheduler serves " in one_sentence(cli("cancel", "wide"), 1)
    (cli.folder / "cluster.yaml").write_text(CLUSTER)
    cli.serve("--interval", "0.5")
    wait_until(lambda: cli.jobs()["wide"]["phase"] == "Queued")
    told = cli("explain", "wide").stdout
    assert "fits no node: one replica needs 3 slots on one node, and the largest node, " in told
    for name in ("", "..", "a/b"):
        said = one_sentence(cli("cancel", name), 1)
        assert said == f"Error: no job is named {name!r}; give the name of one\n"
    huge = "jobs:\n  - {name: huge, script: toy.py, num_stages: 12345}\n"
    (cli.folder / "huge.yaml").write_text(huge)
    (cli.folder / "toy.py").touch()
    assert "needs 12\u202f345 slots" in one_sentence(cli("submit", "huge.yaml"), 1)
