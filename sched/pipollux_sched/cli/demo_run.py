"""The demo: two real training jobs under the scheduler, with an event log and a report."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from pipollux_policies import DEFAULT_POLICY, make_policy
from pipollux_sched.backend.local.engine import check_local
from pipollux_sched.backend.local.hardware import count_gpus
from pipollux_sched.errors import SchedulerError
from pipollux_sched.lifecycle import Phase
from pipollux_sched.report.live_view import LiveView
from pipollux_sched.report.page import write_report
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.spec.cluster import ClusterSpec, load_cluster
from pipollux_sched.spec.job import load_jobs
from pipollux_sched.spec.script import with_script_found
from pipollux_sched.store import StateDir, StateDirError
from pipollux_sched.utils.signals import Interruption

INTERVAL = 15.0
HINTS_INTERVAL = 5.0
CHECKPOINT_INTERVAL = 20.0
RESTART_SECONDS = 8.0
"""Intervals of rounds, hints and checkpoints, and the assumed cost of a restart: these jobs train
for minutes, not for days."""
SECONDS_ALONE = 60.0
"""Seconds between the first and the second job: enough rounds for the first job to grow."""
GRACE = 20.0


class DemoError(SchedulerError):
    """The demo cannot start; the message gives the reason and the fix."""


class Demo:
    """Runs the demo once, and replaces the files of an earlier one.

    Raises:
        DemoError: Another demo runs in this folder, or the examples are missing.
        SpecError: An example file is invalid.
    """

    def __init__(
        self,
        output: Path,
        console: Console,
        examples: Path | None = None,
        seconds_alone: float = SECONDS_ALONE,
        policy: str | None = None,
    ) -> None:
        folder = examples or find_examples()
        self._output = output
        self._cluster = with_gpus(load_cluster(folder / "demo-cluster.yaml"))
        jobs_file = folder / "demo-jobs.yaml"
        self._jobs = [with_script_found(job, jobs_file) for job in load_jobs(jobs_file)]
        for job in self._jobs:
            check_local(job)
        self._view = LiveView(console)
        self._console = console
        self._seconds_alone = seconds_alone
        self._policy = make_policy(policy or DEFAULT_POLICY)
        self._log: TextIO | None = None

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self._output / "report.html"

    @property
    def events(self) -> Path:
        """The event log."""
        return self._output / "events.jsonl"

    def run(self) -> bool:
        """Run to the end, or until a signal; return whether all jobs are complete."""
        state_dir = self._prepare()
        with Interruption() as interruption, self.events.open("w", encoding="utf-8") as log:
            self._log = log
            scheduler = Scheduler(
                state_dir,
                self._cluster,
                self._policy,
                interval=INTERVAL,
                hints_interval=HINTS_INTERVAL,
                checkpoint_interval=CHECKPOINT_INTERVAL,
                restart_seconds=RESTART_SECONDS,
                grace=GRACE,
                on_event=self._on_event,
            )
            phases: list[Phase] = []
            with self._view:
                try:
                    scheduler.start()
                    self._submit_and_wait(scheduler, interruption)
                    phases = [job.phase for job in scheduler.jobs().values()]
                finally:
                    if interruption.count:
                        self._say("Stopping: the jobs save.")
                    scheduler.stop(hurry=lambda: interruption.count > 1)
            self._log = None
        self._view.print_summary()
        write_report(self.events, self.report)
        return len(phases) == len(self._jobs) and set(phases) == {Phase.COMPLETE}

    def _prepare(self) -> StateDir:
        self._output.mkdir(parents=True, exist_ok=True)
        state_dir = StateDir(self._output / "state")
        if state_dir.path.exists():
            try:
                with state_dir.lock():
                    pass
            except StateDirError as error:
                raise DemoError(
                    f"another demonstration runs in {self._output}: end it, or choose another "
                    "folder with --folder"
                ) from error
            shutil.rmtree(state_dir.path)
        self.report.unlink(missing_ok=True)
        return state_dir

    def _submit_and_wait(self, scheduler: Scheduler, interruption: Interruption) -> None:
        first, *others = self._jobs
        scheduler.submit(first)
        deadline = time.monotonic() + self._seconds_alone
        while time.monotonic() < deadline and not self._over(scheduler):
            if interruption.wait(0.2):
                break
        if not interruption.count:
            for job in others:
                scheduler.submit(job)
        while not (interruption.wait(0.2) or self._over(scheduler)):
            pass

    def _over(self, scheduler: Scheduler) -> bool:
        return all(job.phase.ended for job in scheduler.jobs().values())

    def _on_event(self, event: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.write(json.dumps(event) + "\n")
            self._log.flush()
        self._view.on_event(event)

    def _say(self, sentence: str) -> None:
        self._console.print(sentence)


def find_examples() -> Path:
    """Return the folder of the examples, of the package or the repository, or raise `DemoError`."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / "demo-jobs.yaml").is_file():
            return folder
    raise DemoError(
        "the example scripts are not installed: run `make demo` in a checkout of the repository, "
        "or name their folder with --examples"
    )


def with_gpus(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with a GPU per slot if this machine has enough GPUs, else unchanged."""
    if count_gpus() < sum(node.slots for node in cluster.nodes):
        return cluster
    nodes = [node.model_copy(update={"kind": "gpu"}) for node in cluster.placed_nodes]
    return cluster.model_copy(update={"nodes": nodes})
