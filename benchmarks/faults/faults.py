"""Random faults during one long workload with real processes, and their effect on the jobs.

    python benchmarks/faults/faults.py [--faults 200] [--seed 0] [--jobs 4] [--out FILE]

Prints Markdown; `--out` writes a line of JSON for each fault. At the first violation it exits with
status 1, and keeps the folder.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from injections import INJECTIONS, Injection  # same folder
from invariants import Invariants
from outer_faults import mount_small_disk, unmount
from scheduler_faults import MOST_UNDER_WAY
from workload import KINDS, MOST_TRAINING, TRAINING, Work
from world import World, backs_off


class Run:
    """One workload, and its faults.

    Args:
        folder: an empty folder for everything.
        seed: of the faults, and of the jobs.
        num_jobs: how many jobs to keep under way.
        out: for a line of JSON per fault.
        invariants: of an existing world; None: of a new one.
        injections: the faults, and their relative frequency.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        num_jobs: int,
        out: Path | None,
        invariants: Invariants | None = None,
        injections: Mapping[str, tuple[int, Injection]] = INJECTIONS,
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.disk = folder / "small"
        self.has_disk = invariants is None and mount_small_disk(self.disk)
        self.invariants = invariants or Invariants(World(folder))
        self.world = self.invariants.world
        self.injections = injections
        self.num_jobs = num_jobs
        self.out = out
        self.begun = time.monotonic()
        self.submitted = 0
        self.done: dict[str, list[float]] = defaultdict(list)

    def keep_busy(self) -> None:
        """Submit jobs until enough are under way, one of them saving on the small disk.

        Up to a number, jobs that wait after a failure do not count.
        """
        while True:
            under_way = self.world.under_way()
            busy = [job for job in under_way if not backs_off(job)]
            if len(busy) >= self.num_jobs or len(under_way) >= MOST_UNDER_WAY:
                return
            fields = dict(KINDS[self.submitted % len(KINDS)])
            name = f"job-{self.submitted}"
            self.submitted += 1
            script = fields.pop("script")
            training = [job for job in under_way if job.spec["script"] == str(TRAINING)]
            if script == TRAINING and len(training) >= MOST_TRAINING:
                continue
            if self.has_disk and not any(job.spec.get("checkpoint_dir") for job in under_way):
                fields["checkpoint_dir"] = str(self.disk / name)
            self.world.submit(name, Work.drawn(script, self.rng), **fields)

    def inject(self) -> None:
        """Inject a fault, wait for recovery, and check the invariants."""
        kinds, weights = list(self.injections), [weight for weight, _ in self.injections.values()]
        kind = self.rng.choices(kinds, weights)[0]
        self.world.struck, begun = None, time.monotonic()
        hit = self.injections[kind][1](self.world, self.rng)
        if hit is None:
            time.sleep(0.2)  # there was no target; try again
            return
        self.world.until("every job trains, waits or has ended", self.invariants.settled)
        seconds = time.monotonic() - (self.world.struck or begun)
        wrong = self.invariants.violations()
        assert not wrong, f"after {kind} ({hit}): {wrong}"
        self.done[kind].append(seconds)
        print(f"{self.total}. {kind}: {hit}; {seconds:.1f} s", file=sys.stderr, flush=True)
        if self.out is not None:
            line = {"fault": kind, "target": hit, "seconds": round(seconds, 2)}
            with self.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def finish(self) -> None:
        """End all jobs, then the scheduler."""
        world = self.world
        world.until("all jobs have ended", lambda: not world.under_way(), 900.0)
        jobs = world.jobs()
        wrong = [
            f"{name} is {job.phase.value}"
            for name, job in jobs.items()
            if job.phase.value != "Complete"
        ]
        wrong += self.invariants.violations()
        for name, work in world.acknowledged.items():
            fault = None if wrong else work.fault(world.checkpoints(jobs[name]))
            wrong += [f"{name}: {fault}"] if fault else []
        assert not wrong, wrong
        world.until("no process of a job is left", lambda: not world.processes(), 10.0)
        world.end()

    def report(self) -> str:
        """Return the faults, and the time until recovery from each."""
        lines = ["| fault | times | well again after: median | worst |", "|---|---|---|---|"]
        for kind in self.injections:
            times = self.done.get(kind, [])
            if times:
                lines.append(
                    f"| {kind} | {len(times)} | {median(times):.1f} s | {max(times):.1f} s |"
                )
        work = self.world.acknowledged.values()
        attempts = sum(job.state.attempt for job in self.world.jobs().values())
        store = self.world.store
        rows = [entry for name in self.world.jobs() for entry in store.attempts(name)]
        changes = sum(entry.pause_seconds is not None for entry in rows)
        samples = f"{sum(entry.samples for entry in work):,}".replace(",", " ")
        num_training = sum(entry.script == TRAINING for entry in work)
        minutes = (time.monotonic() - self.begun) / 60.0
        summary = (
            f"Seed {self.seed}: {self.total} faults in {minutes:.0f} minutes, {len(work)} jobs "
            f"({num_training} that train with the library), {attempts} attempts, "
            f"{changes} times replicas joined, left or were lost while others trained, "
            f"{samples} samples: every job Complete, each sample counted once, no process left, "
            "none started twice."
        )
        return "\n".join([summary, "", *lines])

    @property
    def total(self) -> int:
        """Number of faults so far."""
        return sum(map(len, self.done.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", action="append", choices=INJECTIONS, help="these faults alone")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pipollux-faults-"))
    chosen = {name: INJECTIONS[name] for name in options.only or INJECTIONS}
    run = Run(folder, options.seed, options.jobs, options.out, injections=chosen)
    try:
        while run.total < options.faults:
            run.keep_busy()
            run.inject()
        run.finish()
        print(run.report())
    except BaseException:  # also Ctrl-C: end all jobs
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
