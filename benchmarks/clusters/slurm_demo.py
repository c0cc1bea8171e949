"""The two jobs of `pipollux demo` on three Slurm hosts, with checks of the result.

    python benchmarks/clusters/slurm_demo.py [--folder DIR]

The pool has nodes of two slots. A foreign job holds the third host at first, so that the two jobs
have as much room as the demo has on one machine; it ends with the second job, and the third host
joins the pool. The scripts run under `counted.py`, which counts each sample. Prints Markdown; exits
with status 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counted import fault  # same folder
from slurm_world import HERE, REPOSITORY, SlurmWorld

from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec, load_jobs
from pipollux_sched.spec.script import with_script_found

OPTIONS = (
    *("--nodes=3", "--interval=15", "--hints-interval=5", "--checkpoint-interval=20"),
    *("--grace=20",),
)
"""As in `pipollux demo`."""
STEPS_ALONE = 60
EPOCHS = {"digits": 120, "char-lm": 3}
SAMPLES = {"digits": 1437 * 120, "char-lm": 11875 * 3}
PATIENCE = 1200.0


class Story:
    """The events of the jobs, from the scheduler's store and Slurm."""

    def __init__(self, world: SlurmWorld) -> None:
        self._world = world
        self._begun = time.time()
        self._now: dict[str, tuple[str, ...]] = {}
        self.lines: list[str] = []
        self.sizes: dict[str, list[int]] = {}

    def look(self) -> None:
        """Record allocations that have changed."""
        for name, job in self._world.jobs().items():
            nodes = tuple(job.state.running_on) if job.state.reason == "Training" else ()
            if job.phase is Phase.COMPLETE:
                self._tell(name, ("complete",))
            elif nodes:
                self._tell(name, nodes)

    def say(self, text: str) -> None:
        """Record another event."""
        line = f"| {time.time() - self._begun:.0f} s | {text} |"
        self.lines.append(line)
        print(line, file=sys.stderr, flush=True)

    def _tell(self, job: str, where: tuple[str, ...]) -> None:
        if self._now.get(job) == where:
            return
        self._now[job] = where
        if where == ("complete",):
            self.say(f"{job} is complete")
            return
        self.sizes.setdefault(job, []).append(len(where))
        self.say(f"{job} trains on {', '.join(where)}")


def tell(world: SlurmWorld, story: Story) -> None:
    """Submit the two jobs, and return when both have ended."""
    file = REPOSITORY / "examples" / "demo-jobs.yaml"
    first, second = (_counted(with_script_found(job, file)) for job in load_jobs(file))

    def until(what: str, true: Any) -> None:
        def look() -> bool:
            story.look()
            failed = [x.name for x in world.jobs().values() if x.phase is Phase.FAILED]
            assert not failed, f"{failed} failed"
            return bool(true())

        world.until(what, look, PATIENCE)

    with world.api() as client:
        client.submit(first)
        story.say(f"{first.name} is submitted")
        until("the first job is on two hosts", lambda: story.sizes.get(first.name, [])[-1:] == [2])
        until("it trains", lambda: _step(world, first.name) >= STEPS_ALONE)
        client.submit(second)
        story.say(f"{second.name} is submitted")
        until(
            "the first job makes room for the second",
            lambda: story.sizes.get(second.name) and story.sizes[first.name][-1] == 1,
        )
        until("the second job is complete", lambda: world.jobs()[second.name].phase.ended)
        world.slurm.call("scancel", "--name=neighbour")
        story.say("the neighbour leaves n3 to others")
    until("both are complete", lambda: all(x.phase.ended for x in world.jobs().values()))


def _counted(job: JobSpec) -> JobSpec:
    args = (str(job.script), *job.args)
    return job.model_copy(update={"script": str(HERE / "counted.py"), "args": args})


def wrong(world: SlurmWorld, story: Story) -> Iterator[str]:
    """Return errors."""
    for name, job in world.jobs().items():
        if job.phase is not Phase.COMPLETE or job.state.failures:
            yield f"{name} is {job.phase.value} after {job.state.failures} failures"
        yield from _account(world, name, world.store.overview.points(name, 5000))
        if missing := fault(world.checkpoints(job), EPOCHS[name]):
            yield f"{name}: {missing}"
    if story.sizes.get("char-lm") != [1, 2, 1, 2]:
        yield f"char-lm did not start, grow, shrink and grow again: {story.sizes}"


def _account(world: SlurmWorld, name: str, points: list[Any]) -> Iterator[str]:
    """Return errors unless each epoch was completed once, with all samples, and the loss fell."""
    logs = [path for _, _, path in world.directory.logs(name)]
    text = "\n".join(log.read_text(errors="replace") for log in logs)
    epochs = [int(number) for number in re.findall(r"^.*epoch (\d+): ", text, re.MULTILINE)]
    if sorted(epochs) != list(range(EPOCHS[name])):
        yield f"{name}: the ends of epochs in its logs are {sorted(epochs)}"
    steps = [point.step for point in points]
    samples = [point.samples for point in points]
    if steps != sorted(set(steps)) or samples != sorted(set(samples)):
        yield f"{name}: steps or samples do not grow from point to point"
    if SAMPLES[name] and samples[-1] != SAMPLES[name]:
        yield f"{name}: {samples[-1]} samples were trained, not {SAMPLES[name]}"
    losses = [point.loss for point in points if point.loss is not None]
    tenth = max(len(losses) // 10, 1)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    if last > 0.8 * first:
        yield f"{name}: the loss does not fall: {first:.3f} has become {last:.3f}"
    starts = [found.loss for found in _starts(world.store.attempts(name), points)]
    if any(loss > 0.9 * losses[0] for loss in starts[1:]):
        yield f"{name}: the loss after a restart is that of the beginning: {starts}"


def _step(world: SlurmWorld, job: str) -> int:
    points = world.store.overview.points(job, 1)
    return points[-1].step if points else 0


def report(world: SlurmWorld, story: Story) -> str:
    """Return the events as Markdown."""
    lines = ["| after | |", "|---|---|", *story.lines, ""]
    for name, job in world.jobs().items():
        points = world.store.overview.points(name, 5000)
        attempts = world.store.attempts(name)
        first, last = points[0], points[-1]
        lines.append(
            f"{name}: {job.phase.value}, {len(attempts)} attempts, {last.step} steps, "
            f"{last.samples} samples, loss {first.loss:.3f} to {last.loss:.3f}; at each start: "
            + ", ".join(f"step {p.step} loss {p.loss:.3f}" for p in _starts(attempts, points))
        )
    return "\n".join(lines)


def _starts(attempts: list[Any], points: list[Any]) -> Iterator[Any]:
    """Yield the first point of each attempt that has any."""
    for entry in attempts:
        later = [p for p in points if p.time >= entry.created_at and p.loss is not None]
        if later:
            yield later[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="pipollux-slurm-demo-"))
    faults: list[str] = []
    neighbour = "--job-name=neighbour --nodelist=n3 --exclusive --output=/dev/null"
    with SlurmWorld(folder, slots=2, options=OPTIONS, preparation=neighbour) as world:
        story = Story(world)
        try:
            tell(world, story)
            faults += wrong(world, story)
            print(report(world, story))
        except AssertionError as error:
            faults.append(str(error))
        world.end()
        left = world.processes()
        faults += [f"left running: {left}"] if left else []
        pools = world.pools()
        faults += [f"allocations left: {pools}"] if pools else []
    if faults:
        print("\n".join(faults), f"what is left of it lies in {folder}", sep="\n", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
