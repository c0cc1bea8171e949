"""Jobs that run in container images: planned like any other, refused where nothing runs them."""

from __future__ import annotations

import json
from pathlib import Path

from .runner import TOY, Cli, one_sentence

IMAGE = "registry.example/team/train:2.1"
JOBS = f"""
jobs:
  - {{name: boxed, image: {IMAGE}, args: [--epochs, "3"], max_replicas: 2}}
  - {{name: inside, image: {IMAGE}, script: train.py}}
"""
REFUSAL = (
    f"job 'boxed': image: '{IMAGE}' cannot be run by the local backend, which starts processes of "
    "this machine and no containers; remove it, and give as script the path of a Python script"
)


def test_a_scheduler_without_containers_refuses_images(cli: Cli) -> None:
    cli.serve()
    (cli.folder / "boxed.yaml").write_text(JOBS + f"  - {{name: plain, script: {TOY}}}\n")
    done = cli("submit", "boxed.yaml")
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", f"Error: {REFUSAL}\n")
    assert cli.jobs() == {}, "all jobs of a file or none"


def test_what_would_run_jobs_here_refuses_images_before_it_begins(
    cli: Cli, repository: Path
) -> None:
    (cli.folder / "boxed.yaml").write_text(JOBS.rpartition("  - ")[0])
    files = ("--cluster", "cluster.yaml", "--jobs", "boxed.yaml")
    assert one_sentence(cli("apply", *files, "--yes"), 2) == f"Error: {REFUSAL}\n"
    assert not cli.state_dir.exists()

    examples = cli.folder / "examples"
    examples.mkdir()
    demo_cluster = (repository / "examples" / "demo-cluster.yaml").read_text()
    (examples / "demo-cluster.yaml").write_text(demo_cluster)
    (examples / "demo-jobs.yaml").write_text(JOBS.rpartition("  - ")[0])
    demo = cli("demo", "--examples", "examples", "--folder", "out")
    assert one_sentence(demo, 2) == f"Error: {REFUSAL}\n"
    assert not (cli.folder / "out").exists()


def test_images_are_planned_like_scripts(cli: Cli) -> None:
    (cli.folder / "boxed.yaml").write_text(JOBS)
    files = ("--cluster", "cluster.yaml", "--jobs", "boxed.yaml")
    planned = cli("plan", *files, "--output", "json")
    assert planned.returncode == 0, planned.stderr
    found = {job["job"]: job["num_replicas"] for job in json.loads(planned.stdout)["assignments"]}
    assert found == {"boxed": 1, "inside": 1}
