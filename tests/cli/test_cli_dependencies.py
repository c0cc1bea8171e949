"""`pipollux submit --after`, and what commands say of a job that waits for others."""

from __future__ import annotations

import json

import pytest

from .runner import LIGHT, TOY, Cli, one_sentence, wait_until


def jobs_file(cli: Cli, name: str, *lines: str) -> str:
    path = cli.folder / f"{name}.yaml"
    path.write_text("jobs:\n" + "\n".join(f"  - {{script: {TOY}, {line}}}" for line in lines))
    return str(path)


@pytest.mark.exhaustive
def test_a_job_that_waits_for_others(cli: Cli) -> None:
    cli.program = LIGHT
    cli.serve()
    first = jobs_file(cli, "first", "name: prepare", "name: check")
    then = jobs_file(cli, "then", 'name: train, args: [--steps, "2"], after: [prepare]')
    assert "there is no job of this name" in one_sentence(cli("submit", then), 1)
    assert cli("submit", first).returncode == 0
    wait_until(lambda: cli.jobs()["prepare"]["reason"] == "Training")
    bad = one_sentence(cli("submit", then, "--after", "check:done"), 2)
    assert "'check:done' names no job to wait for; give its name, or NAME:WHEN" in bad
    submitted = cli("submit", then, "--after", "check:ended")
    waits = "The job waits for job prepare to complete and for job check to end."
    assert submitted.stdout == f"train: {waits}\n", submitted.stderr
    assert waits in cli("jobs").stdout
    explained = json.loads(cli("explain", "train", "--output", "json").stdout)
    assert explained["waits_for"] == "job prepare to complete; job check to end"
    described = cli("describe", "train").stdout
    assert "prepare:succeeded check:ended" in described
    assert cli("cancel", "check").returncode == 0
    wait_until(lambda: cli.jobs()["check"]["phase"] == "Failed")
    assert cli.jobs()["train"]["message"] == "The job waits for job prepare to complete."
    assert cli("cancel", "prepare").returncode == 0
    wait_until(lambda: cli.jobs()["train"]["phase"] == "Failed")
    assert cli.jobs()["train"]["reason"] == "DependencyNotMet"
    assert "which has ended (Cancelled)" in one_sentence(cli("submit", then), 1)
