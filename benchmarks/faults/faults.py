"""Random faults over one long workload with real processes, and what became of the jobs.

    python benchmarks/faults/faults.py [--faults 200] [--seed 0] [--jobs 4] [--out FILE]

Prints Markdown; `--out` keeps a line of JSON for each fault. As soon as something is not as it must
be it ends with status 1, and keeps the folder.
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

from injections import INJECTIONS, Injection  # lies beside
from invariants import Invariants
from outer_faults import mount_small_disk, unmount
from scheduler_faults import MOST_UNDER_WAY
from workload import KINDS, MOST_TRAINING, TRAINING, Work
from world import World, backs_off


class Run:
    """One workload, and what was done to it.

    Args:
        folder: an empty folder for all of it.
        seed: of the faults, and of the jobs.
        num_jobs: jobs that are kept going.
        out: takes a line of JSON for each fault; None: nowhere.
        invariants: of the world that it happens in; None: a new world.
        injections: the faults, and how often each comes.
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
        """Let as many jobs be under way as shall be, one of them saving on the small disk.

        Those that wait after a failure do not count, up to a number.
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
        """Let one thing go wrong, wait until all is well again, and look whether it is."""
        kinds, weights = list(self.injections), [weight for weight, _ in self.injections.values()]
        kind = self.rng.choices(kinds, weights)[0]
        self.world.struck, begun = None, time.monotonic()
        hit = self.injections[kind][1](self.world, self.rng)
        if hit is None:
            time.sleep(0.2)  # nothing was there to be hit; soon there may be
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
        """Let all jobs end, and the scheduler after them."""
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
        """Say what was done, and how long it took until all was well again."""
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
        """Faults so far."""
        return sum(map(len, self.done.values()))


def main() -> None:
    """Run it all."""
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
    except BaseException:  # also Ctrl-C: no job stays behind
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
