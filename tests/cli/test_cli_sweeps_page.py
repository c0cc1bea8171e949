"""The page about sweeps: its script, its job files and its commands."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import pipollux
from pipollux_hybrid.job import context as contexts
from pipollux_sched.cli.console import CommandError
from pipollux_sched.cli.waiting import detached, exit_for
from pipollux_sched.lifecycle import SweepEnded
from pipollux_sched.store import Submission
from pipollux_sched.views.models import JobView
from tests.sched.scripts import TRIAL

from .kept import Clock, kept, spec
from .runner import LIGHT, Cli, one_sentence
from .test_cli_jobs_page import block_of, commands_of


@pytest.mark.exhaustive
def test_the_script_of_the_page(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (repository / "docs" / "howto" / "sweeps.md").read_text()
    found = re.search(r"<!-- file: train.py -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(found[1])
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(pipollux, "report_metric", lambda **values: told.append(values))
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "0.1", "--width=8"])
    monkeypatch.setenv("PIPOLLUX_PROGRESS", "0")
    contexts.reset()
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        pipollux.destroy_process_group()
        contexts.reset()
    assert [list(values) for values in told] == [["error"]] * 3
    assert told[2]["error"] < told[0]["error"]


def test_a_message_about_a_sweep_names_its_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep has no log."""
    with kept(tmp_path / "state", Clock()) as store:
        rates = spec("rates", sweep={"grid": {"lr": [1, 2]}})
        store.submit_all([Submission("rates", rates.model_dump(mode="json"), "token", 0)])
        assert detached([JobView.of(store.job("rates"))]).exit_code == 130
        assert "Follow it with: pipollux sweeps rates; end it" in capsys.readouterr().err
        store.transition("rates", SweepEnded(complete=False, message="All trials failed."))
        with pytest.raises(CommandError, match=r"^rates failed; see: pipollux sweeps rates$"):
            exit_for([JobView.of(store.job("rates"))])


def test_the_commands_of_the_page(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    cli.serve()
    shutil.copy(TRIAL, cli.folder / "train.py")
    (cli.folder / "sweep.yaml").write_text(block_of(repository, "sweeps.md", "grid"))
    submit, *looks = commands_of(block_of(repository, "sweeps.md", "commands"))
    waited = cli(*submit)
    assert waited.returncode == 0, waited.stderr
    assert waited.stdout.splitlines()[0] == "rates: The job was submitted."
    assert waited.stdout.splitlines()[-1].endswith("rates: complete")
    sweeps, trials, described, logs = [cli(*look) for look in looks]
    assert all(done.returncode == 0 for done in (sweeps, trials, described, logs)), trials.stderr
    head, line = sweeps.stdout.splitlines()
    assert head.split()[:4] == ["Sweep", "Phase", "Trials", "Ended"]
    assert line.split()[:4] == ["rates", "Complete", "4", "4"]
    first, head, *rows = trials.stdout.splitlines()
    assert first.startswith("All 4 trials have ended (4 complete); the best is trial 0 with error")
    assert head.split() == ["Trial", "Job", "State", "lr", "width", "error"]
    assert [row.split() for row in rows] == [
        ["0", "rates-0", "Complete", "0.1", "8", "1.5000"],
        ["1", "rates-1", "Complete", "0.1", "16", "1.5000"],
        ["2", "rates-2", "Complete", "0.001", "8", "1.5000"],
        ["3", "rates-3", "Complete", "0.001", "16", "1.5000"],
    ]
    assert "Best trials" in described.stdout or "Trials" in described.stdout
    assert "all trials: pipollux sweeps rates" in described.stdout
    assert '"PIPOLLUX_TRIAL": "3"' in logs.stdout
    assert [job["name"] for job in json.loads(cli("jobs", "-o", "json").stdout)] == ["rates"]
    shown = json.loads(cli("jobs", "--trials", "-o", "json").stdout)
    assert [job["trial"] for job in shown] == [None, 0, 1, 2, 3]
    assert "is no sweep" in one_sentence(cli("sweeps", "rates-1"), 1)
    told = one_sentence(cli("logs", "--follow", "rates"), 1)
    (look,) = re.findall(r"with: pipollux (logs \S+)$", told.strip())
    assert '"PIPOLLUX_TRIAL": "0"' in cli(*look.split()).stdout


@pytest.mark.exhaustive
def test_the_search_of_the_page(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    cli.serve()
    shutil.copy(TRIAL, cli.folder / "train.py")
    (cli.folder / "search.yaml").write_text(block_of(repository, "sweeps.md", "search"))
    assert cli("submit", "search.yaml", "--wait").returncode == 0
    found = json.loads(cli("sweeps", "search", "-o", "json").stdout)
    assert (found["num_trials"], len(found["trials"])) == (6, 6)
    assert found["best"]["value"] == min(trial["value"] for trial in found["trials"])
