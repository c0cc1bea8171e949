"""The job files of the page about programs and limits do what it says."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.sched.scripts import TOY

from .runner import LIGHT, Cli, one_sentence, wait_until
from .test_cli_jobs_page import block_of

MODULE = """
import os, sys
from . import words
print(words.HELLO, __package__, __name__, os.path.basename(sys.argv[0]), *sys.argv[1:])
"""
SCRIPT = "import sys\nprint('trained', sys.prefix, *sys.argv[1:])\n"
HUNGRY = """
import sys, time
kept = b"x" * (int(sys.argv[1]) * 2**20)
time.sleep(240)
"""
PREPARE = "#!/bin/sh\necho prepared rank $RANK of $WORLD_SIZE\n"


def log_of(cli: Cli, job: str) -> str:
    return cli("logs", job).stdout


def make_venv(folder: Path, *, whole: bool) -> None:
    """A virtual environment; `whole`: with all packages of this one."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=240)
    if whole:
        (packages,) = folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        (packages / "whole.pth").write_text("".join(lines))


def test_the_page_about_programs(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    cli.serve()
    package = cli.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text("HELLO = 'hello'\n")
    (package / "train.py").write_text(MODULE)
    (cli.folder / "train.py").write_text(SCRIPT)
    (cli.folder / "prepare.sh").write_text(PREPARE)
    (cli.folder / "prepare.sh").chmod(0o755)
    done = cli("submit", "-", "--wait", stdin=block_of(repository, "programs.md", "programs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hello package __main__ train.py --epochs 2" in log_of(cli, "from-module")
    printed = log_of(cli, "from-command")
    assert "prepared rank 0 of 1" in printed
    assert f"trained {sys.prefix} --size 3" in printed
    ran = cli("run", "--", "python", "-m", "package.train", "--fast")
    assert (ran.returncode, ran.stdout) == (0, "hello package __main__ train.py --fast\n")

    wrong = "jobs: [{name: wrong, module: package.rain}]"
    refused = one_sentence(cli("submit", "-", stdin=wrong), 1)
    assert "module: there is no module 'package.rain' in" in refused
    refused = one_sentence(cli("submit", "-", stdin="jobs: [{name: x, module: package}]"), 1)
    assert "'package' is a package without a module '__main__'" in refused


@pytest.mark.exhaustive
def test_interpreters_and_limits_of_the_page(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    cli.serve()
    (cli.folder / "train.py").write_text(SCRIPT)
    text = block_of(repository, "programs.md", "python")
    assert "there is no interpreter" in one_sentence(cli("submit", "-", stdin=text), 2)
    make_venv(cli.folder / "env", whole=False)
    refused = one_sentence(cli("submit", "-", stdin=text), 1)
    assert f"python: {cli.folder}/env/bin/python lacks torch" in refused
    shutil.rmtree(cli.folder / "env")
    make_venv(cli.folder / "env", whole=True)
    done = cli("submit", "-", "--wait", stdin=text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trained {cli.folder}/env\n" in log_of(cli, "own-environment")

    jobs = yaml.safe_load(block_of(repository, "programs.md", "limits"))["jobs"]
    (cli.folder / "train.py").write_text("raise SystemExit(64)\n")
    assert cli("submit", "-", "--wait", stdin=yaml.dump({"jobs": jobs})).returncode == 1
    bounded = cli.jobs()["bounded"]
    assert bounded["reason"] == "ExitCode"
    assert bounded["message"].startswith("Not restarted after exit status 64 (exit_codes).")


@pytest.mark.exhaustive
def test_a_replica_that_uses_too_much_memory(cli: Cli) -> None:
    """Beside it, one that uses less goes on, and one that runs for too long is ended."""
    cli.program = LIGHT
    server = cli.serve("--grace", "5")
    (cli.folder / "hungry.py").write_text(HUNGRY)
    body = {"script": "hungry.py", "memory_limit": "150MiB", "max_restarts": 0, "max_replicas": 1}
    jobs = [
        {"name": "hungry", "args": ["300"], **body},
        {"name": "modest", "args": ["20"], **body},
        {"name": "long", "script": str(TOY), "max_run_time": "2s", "max_replicas": 1},
    ]
    assert cli("submit", "-", stdin=yaml.dump({"jobs": jobs})).returncode == 0
    wait_until(lambda: {cli.jobs()[name]["phase"] for name in ("hungry", "long")} == {"Failed"})
    found = cli.jobs()
    assert found["modest"]["phase"] == "Running"
    message = found["hungry"]["message"]
    told = re.search(r"out of memory: limit 0.15 GiB, used (0\.\d+) GiB", message)
    assert told is not None, message
    kernel = "memory_limit is enforced by the kernel" in server.output
    # The kernel lets it use its limit, 0.1465 GiB, and no more.
    assert told[1] == "0.15" if kernel else float(told[1]) > 0.15
    assert found["long"]["reason"] == "RunTimeExceeded"
    assert found["long"]["message"].startswith("It ran for ")
    assert "max_run_time is 2 s" in found["long"]["message"]
    assert cli("cancel", "modest").returncode == 0
    wait_until(lambda: cli.jobs()["modest"]["phase"] == "Failed")
