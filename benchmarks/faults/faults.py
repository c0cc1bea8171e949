"""Random faults over one long workload with real processes, and what became of the jobs.

    python benchmarks/faults/faults.py [--faults 200] [--seed 0] [--jobs 4] [--folder DIR]

Prints Markdown. As soon as something is not as it must be it ends with status 1, and keeps the
folder.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from injections import INJECTIONS, mount_small_disk, unmount  # lies beside
from world import World  # lies beside

KINDS = (
    {"num_stages": 1},
    {"num_stages": 2},
    {"num_stages": 1, "min_replicas": 2},
    {"num_stages": 1, "preemptible": False, "max_replicas": 1},
)
"""What jobs are submitted, in turn."""


class Run:
    """One workload, and what was done to it."""

    def __init__(self, folder: Path, seed: int, num_jobs: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(folder)
        self.num_jobs = num_jobs
        self.disk = folder / "small"
        self.has_disk = mount_small_disk(self.disk)
        self.done: dict[str, list[float]] = defaultdict(list)
        self.missed: dict[str, int] = defaultdict(int)

    def keep_busy(self) -> None:
        """Let as many jobs be under way as shall be, one of them saving on the small disk."""
        under_way = self.world.under_way()
        while len(under_way) < self.num_jobs:
            number = len(self.world.acknowledged)
            fields = dict(KINDS[number % len(KINDS)])
            name = f"job-{number}"
            if self.has_disk and not any(j.spec.get("checkpoint_dir") for j in under_way):
                fields["checkpoint_dir"] = str(self.disk / name)
            self.world.submit(name, self.rng.randrange(150, 400), **fields)
            under_way = self.world.under_way()

    def inject(self) -> None:
        """Let one thing go wrong, and wait until all is well again."""
        kinds, weights = list(INJECTIONS), [weight for weight, _ in INJECTIONS.values()]
        kind = self.rng.choices(kinds, weights)[0]
        begun = time.monotonic()
        hit = INJECTIONS[kind][1](self.world, self.rng)
        if hit is None:
            self.missed[kind] += 1
            return
        self.world.until("every job trains, waits or has ended", self._settled)
        seconds = time.monotonic() - begun
        self.done[kind].append(seconds)
        print(f"{kind}: {hit}; well again after {seconds:.1f} s", file=sys.stderr, flush=True)
        wrong = self.world.violations()
        assert not wrong, f"after {kind} ({hit}): {wrong}"

    def finish(self) -> None:
        """Let all jobs end, and the scheduler after them."""
        world = self.world
        world.until("all jobs have ended", lambda: not world.under_way(), 900.0)
        phases = {job.name: job.phase.value for job in world.jobs().values()}
        wrong = [f"{name} is {phase}" for name, phase in phases.items() if phase != "Complete"]
        wrong += world.violations() + self._wrong_counts()
        assert not wrong, wrong
        world.until("no process of a job is left", lambda: not world.processes(), 10.0)
        world.end()

    def report(self) -> str:
        """Say what was done, and how long it took until all was well again."""
        lines = ["| fault | times | well again after: median | worst |", "|---|---|---|---|"]
        for kind in INJECTIONS:
            times = self.done.get(kind, [])
            if times:
                lines.append(
                    f"| {kind} | {len(times)} | {median(times):.1f} s | {max(times):.1f} s |"
                )
        jobs = self.world.jobs().values()
        launches = sum(job.state.generation for job in jobs)
        total = sum(map(len, self.done.values()))
        summary = (
            f"{total} faults, {len(self.world.acknowledged)} jobs, {launches} launches: every job "
            "Complete with each of its samples counted once, no process left, none started twice."
        )
        return "\n".join([summary, "", *lines])

    def _settled(self) -> bool:
        """Whether nothing is under way between what is decided and what runs."""
        jobs = self.world.under_way()
        resting = {"Training", "NoRoom", "Preempted", "Submitted", "Resumed"}
        return all(job.state.reason in resting and job.state.intent is None for job in jobs)

    def _wrong_counts(self) -> list[str]:
        return self.world.wrong_counts()


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pipollux-faults-"))
    run = Run(folder, options.seed, options.jobs)
    try:
        while sum(map(len, run.done.values())) < options.faults:
            run.keep_busy()
            run.inject()
        run.finish()
        print(run.report())
    except BaseException:
        print(f"what is left of it lies in {folder}", file=sys.stderr)
        run.world.kill()
        for pid in run.world.processes():
            run.world.signal(pid, 9)
        raise
    finally:
        unmount(run.disk)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
