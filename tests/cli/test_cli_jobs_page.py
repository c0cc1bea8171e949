"""The job files and commands of the page about jobs do what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from .runner import LIGHT, Cli, wait_until

TRAIN = "import os, sys\nprint(os.environ.get('SIZE'), *sys.argv[1:])\n"


def block_of(repository: Path, page: str, name: str) -> str:
    """The block of a page that follows the comment with a name."""
    text = (repository / "docs" / "howto" / page).read_text()
    found = re.search(rf"<!-- test: {name} -->\n```[a-z]+\n(.*?)```", text, re.DOTALL)
    assert found is not None, name
    return found[1]


def commands_of(block: str) -> list[list[str]]:
    """The command lines of a console block, without `pipollux`."""
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_page_about_jobs(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    cli.serve()
    text = block_of(repository, "jobs.md", "order")
    for job in yaml.safe_load(text)["jobs"]:
        (cli.folder / job["script"]).write_text(TRAIN)
    (cli.folder / "train.py").write_text("this is no Python")  # not tried again
    done = cli("submit", "-", "--wait", stdin=text)
    assert done.returncode == 1, done.stderr
    phases = {name: job["phase"] for name, job in cli.jobs().items()}
    assert phases == {"prepare": "Complete", "train": "Failed", "clean-up": "Complete"}
    told = [line.split(" ", 1)[1] for line in done.stdout.splitlines()[3:]]
    assert told.index("prepare: complete") < told.index(
        "train: the jobs that it waited for have ended"
    )

    (cli.folder / "train.py").write_text(TRAIN)
    followed, detached = commands_of(block_of(repository, "jobs.md", "run"))
    ran = cli(*followed)
    assert (ran.returncode, ran.stdout) == (0, "3 --epochs 2\n"), ran.stderr
    assert ran.stderr.startswith("train-1: ")
    assert cli(*detached).stdout == "train-again\n"
    wait_until(lambda: cli.jobs()["train-again"]["phase"] == "Complete")
