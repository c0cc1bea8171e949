"""Forecasts as users see them: the commands of the how-to page, before and after a submission."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from pipollux_sched.cli.forecast_text import short_span, spell_estimate
from pipollux_sched.cli.jobs import job_table
from pipollux_sched.store import Store, StoredForecast
from pipollux_sched.views.jobs import list_jobs
from pipollux_sched.views.models import EstimateView
from tests.sched.scripts import TOY

from .kept import Clock, kept
from .runner import LIGHT, Cli, one_sentence, wait_until


def test_a_forecast_whose_end_has_passed_is_overdue() -> None:
    """It is neither in 0 s nor now."""
    now = datetime(2026, 11, 30, 12).timestamp()
    end = EstimateView(low=now - 200, median=now - 150, high=now - 100)
    assert short_span(end, now) == "overdue"
    assert spell_estimate(end, now) == "overdue since 11:58:20"


def page(repository: Path) -> str:
    return (repository / "docs" / "howto" / "forecasts.md").read_text()


def commands(repository: Path) -> list[list[str]]:
    """The commands of the page that need a scheduler, without `pipollux` itself."""
    blocks = re.findall(r"```console\n(.*?)```", page(repository), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ pipollux ") for line in lines)
    return [line.split()[2:] for line in lines]


def write_jobs(cli: Cli, repository: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", page(repository), re.DOTALL)
    assert found is not None
    text = found[1].replace("script: train.py", f"script: {TOY}")
    (cli.folder / "jobs.yaml").write_text(text)


def test_the_commands_of_the_page(cli: Cli, repository: Path) -> None:
    cli.program = LIGHT
    write_jobs(cli, repository)
    *asked, small, off = commands(repository)
    assert (small, off) == (["serve", "--forecasts", "0.05"], ["serve", "--forecasts", "0"])
    before = [words for words in asked if words[0] == "submit"]
    after = [words for words in asked if words[0] != "submit"]
    assert len(before) == 2
    assert {words[0] for words in after} == {"jobs", "describe", "explain", "plan"}
    cli.serve(*small[1:], "--policy", "fifo")

    told = cli(*before[0])
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("char-lm-8: would start now, and end between ")
    assert json.loads(cli("jobs", "--output", "json").stdout) == []

    assert cli("submit", "jobs.yaml").returncode == 0
    refused = cli("submit", "jobs.yaml", "--dry-run")
    assert "already exists" in one_sentence(refused, 1)

    with Store(cli.state_dir / "pipollux.db") as store:
        wait_until(lambda: list_jobs(store)[0][0].forecast is not None)
    [job] = json.loads(cli("jobs", "--output", "json").stdout)
    assert job["forecast"] is not None
    shown = {words[0]: cli(*words).stdout for words in after}
    assert "Ends in" in shown["plan"]
    assert re.search(r"Ends +between .* and .* \(in .*\), median ", shown["describe"])
    assert re.search(r"Forecast\n +Ends: between", shown["explain"])
    assert cli("cancel", "char-lm-8").returncode == 0


@pytest.mark.exhaustive
def test_the_forecast_of_the_page_as_json(cli: Cli, repository: Path) -> None:
    write_jobs(cli, repository)
    in_json = next(
        words for words in commands(repository) if words[0] == "submit" and "json" in words
    )
    cli.serve()
    done = cli(*in_json)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert found["start"]["low"] == found["start"]["high"]
    assert found["made_at"] < found["end"]["low"] < found["end"]["median"] < found["end"]["high"]


LATER = """\
  - {name: rates, script: SCRIPT, args: ["{lr}"], sweep: {grid: {lr: [1, 2]}, pruner: median}}
  - {name: last, script: SCRIPT, after: [rates]}
  - {name: alarm, script: SCRIPT, after: [{job: rates, when: failed}]}
"""


@pytest.mark.exhaustive
def test_without_forecasts_a_dry_run_still_works(cli: Cli, repository: Path) -> None:
    write_jobs(cli, repository)
    with (cli.folder / "jobs.yaml").open("a") as file:
        file.write(LATER.replace("SCRIPT", str(TOY)))
    cli.serve("--forecasts", "0")
    told = cli("submit", "jobs.yaml", "--dry-run")
    job, rates, last, alarm = told.stdout.splitlines() or [told.stderr] * 4
    assert job.startswith("char-lm-8: would start now, and end between ")
    unknown = "at a time that is not known"
    assert rates == f"rates: would start now, and end {unknown}"
    assert last == f"last: would start {unknown}, and end {unknown}"
    assert alarm == (
        "alarm: no forecast: it waits for job rates to fail, and forecasts assume that jobs succeed"
    )
    wrong = cli("submit", "jobs.yaml", "--dry-run", "--wait")
    assert "leave --wait out" in one_sentence(wrong, 2)


def test_the_column_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.time", clock)
    with kept(tmp_path / "state", clock) as store:
        assert "Ends in" not in listed(store, 200)
        now = clock.now
        end = {"low": now + 2400, "median": now + 3600, "high": now + 7200}
        store.forecasts.keep({"grown": StoredForecast(now, None, end, end)})
        assert re.search("grown .* 40m–2h ", listed(store, 200))
        assert "Ends in" not in listed(store, 55)


def listed(store: Store, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(job_table(list_jobs(store)[0], console))
    return capture.get()
