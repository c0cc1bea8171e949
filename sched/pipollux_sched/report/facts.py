"""The numbers and sentences of the report, computed from a run's records."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from pipollux_sched.report.charts.gantt import slot_use
from pipollux_sched.report.charts.prediction import accuracies, mean_absolute_error
from pipollux_sched.report.run.records import Attempt, JobRun, Run
from pipollux_utils.text import (
    DASH,
    amount,
    clean,
    clock,
    count,
    duration,
    grouped,
    listing,
    percent,
    placements,
)

from .event_text import decision_text

MOST_OF_SOURCE = 300

Key = TypeVar("Key", int, tuple[int, int])


class Headline(NamedTuple):
    """One large number of the header, with its label."""

    value: str
    caption: str


class JobFacts(NamedTuple):
    """One job's line in the table of the header."""

    name: str
    colour: int
    phase: str
    source: str
    message: str
    stages: str
    steps: str
    epochs: str
    replicas: str
    restarts: str
    resizes: str
    loss: str
    goodput: str
    speedup: str


class AllocationRow(NamedTuple):
    """One line of the allocation history."""

    time: str
    job: str
    colour: int
    num_stages: str
    replicas: str
    nodes: list[str]
    batch_size: str
    speedup: str
    why: str


def title(run: Run) -> str:
    """Return a title with the run's jobs, if they are few."""
    names = [clean(name, 32) for name in run.jobs]
    if not names:
        return "A run without jobs"
    jobs = listing(names) if len(names) <= 3 else _spelt(len(names), "job")
    return f"{jobs} on {_spelt(len(run.nodes), 'node').lower()}" if run.nodes else jobs


def moment(run: Run) -> str:
    """Return the start of the run, as a date in UTC."""
    try:
        begin = datetime.fromtimestamp(run.start or 0.0, UTC)
    except (OverflowError, OSError, ValueError):
        return "unknown date"
    return f"{begin.day} {begin:%B %Y, %H:%M} UTC"


def cluster(run: Run) -> str:
    """Describe the cluster: `2 nodes with 4 CPU slots`."""
    slots = sum(node.slots for node in run.nodes.values())
    kinds = sorted({node.kind.upper() for node in run.nodes.values() if node.kind})
    what = f"{' and '.join(kinds)} slot".strip()
    return f"{count(len(run.nodes), 'node')} with {count(slots, clean(what, 24))}"


def summary(run: Run) -> str:
    """Summarise the run in a few sentences."""
    jobs = list(run.jobs.values())
    if not jobs:
        return "The log has no jobs."
    sentences = [
        f"{_spelt(len(jobs), 'training job')} on {cluster(run)}, for {duration(run.seconds)}."
    ]
    if len(jobs) <= 3:
        sentences += [_job_sentence(job, run) for job in jobs if job.started]
    sentences.append(_outcomes(jobs))
    return " ".join(sentences)


def _spelt(how_many: int, what: str) -> str:
    small = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
    if how_many >= len(small):
        return count(how_many, what)
    return f"{small[how_many]} {what}{'' if how_many == 1 else 's'}"


def _job_sentence(job: JobRun, run: Run) -> str:
    name = clean(job.name, 32)
    sizes = [g.num_replicas for g in job.started]
    shape = f"a pipeline of {job.num_stages} stages" if job.num_stages > 1 else "one stage"
    if job.num_microbatches and job.num_stages > 1:
        shape += f" and {count(job.num_microbatches, 'micro-batch', 'micro-batches')}"
    first = f"{name} ({shape}) ran with {count(sizes[0], 'replica')}"
    turns = [
        f"{g.num_replicas} from {clock(g.started - (run.start or 0.0))}"
        for before, g in pairwise(job.started)
        if g.started is not None and g.num_replicas != before.num_replicas
    ]
    more = f" {job.synchronization}" if job.synchronization else ""
    if not turns:
        return f"{first} throughout.{more}"
    if len(turns) > 3:
        return f"{first}, and then with {min(sizes)} to {max(sizes)}.{more}"
    return f"{first}, with {listing(turns)} on.{more}"


def _outcomes(jobs: list[JobRun]) -> str:
    ends: dict[str, list[str]] = {}
    for job in jobs:
        ends.setdefault(job.phase, []).append(clean(job.name, 32))
    if list(ends) == ["Complete"]:
        return {1: "It completed.", 2: "Both completed."}.get(len(jobs), "All completed.")
    parts = []
    for phase, names in ends.items():
        who = listing(names) if len(names) <= 4 else _spelt(len(names), "job")
        known = {"Complete": "completed", "Failed": "failed", "Cancelled": "cancelled"}
        parts.append(f"{who}: {known.get(phase, f'still {phase.lower()} when the log ends')}")
    return "; ".join(parts) + "."


def headlines(run: Run) -> list[Headline]:
    """Return the large numbers of the header."""
    found = [Headline(duration(run.seconds), "from the first event to the last")]
    use = slot_use(run)
    if use is not None:
        caption = f"of the slots' time in training, {percent(use.changing)} starting or stopping"
        found.append(Headline(percent(use.training), caption))
    restarts = sum(job.num_restarts for job in run.jobs.values())
    found.append(_headline(restarts, "restart", restart_costs(run)))
    changes = sum(job.num_resizes for job in run.jobs.values())
    if changes:
        found.append(_headline(changes, "elastic resize", pauses(run)))
    error = mean_absolute_error(accuracies(run))
    if error is not None:
        found.append(Headline(percent(error), "mean absolute error of the predicted step time"))
    return found


def _headline(how_many: int, what: str, costs: list[float]) -> Headline:
    tail = f", {duration(median(costs))} each at the median" if costs else ""
    return Headline(str(how_many), f"{what}{'' if how_many == 1 else 's'}{tail}")


def pauses(run: Run) -> list[float]:
    """Return the pause of each elastic resize, in seconds: the time in which no replica trained."""
    known = [g.pause_seconds for job in run.jobs.values() for g in job.started if g.elastic]
    return [pause for pause in known if pause is not None]


def restart_costs(run: Run) -> list[float]:
    """Return the cost of each restart: seconds from the stop request to the next first step."""
    costs = []
    for job in run.jobs.values():
        for before, after in pairwise(job.started):
            if after.elastic:
                continue
            if after.restart_seconds is not None:
                costs.append(after.restart_seconds)
            elif after.first_step is not None and (begin := before.stopping or before.ended):
                costs.append(after.first_step - begin)
    return costs


def job_row(job: JobRun, colour: int) -> JobFacts:
    """Return a job's line in the table of the header."""
    losses = [p.loss for p in job.points if p.loss is not None]
    speedups = [a.speedup for a in job.allocations if a.speedup is not None]
    last = job.last_point
    step = job.final_step if job.final_step is not None else last.step if last else None
    return JobFacts(
        name=clean(job.name),
        colour=colour,
        phase=job.phase,
        source=clean(" · ".join(filter(None, [job.owner, job.program])), MOST_OF_SOURCE),
        message=clean(job.message),
        stages=str(job.num_stages),
        steps=amount(step),
        epochs=amount(epochs(job)),
        replicas=_path([str(g.num_replicas) for g in job.started]),
        restarts=str(job.num_restarts) if job.started else DASH,
        resizes=str(job.num_resizes) if job.started else DASH,
        loss=f"{grouped(losses[0])} → {grouped(losses[-1])}" if losses else DASH,
        goodput=_path([grouped(value) for value in goodputs(job)]),
        speedup=f"{grouped(max(speedups))}×" if speedups else DASH,
    )


def epochs(job: JobRun) -> int | None:
    """Return the number of completed epochs, or the current epoch, from 0, of a running job."""
    if job.final_epoch is not None:
        return job.final_epoch
    return job.last_point.epoch if job.last_point else None


def goodputs(job: JobRun) -> list[float]:
    """Return the mean goodput of each membership that reported any, in samples/s."""
    known = [((p.attempt, p.membership), p.goodput) for p in job.points if p.goodput is not None]
    return [fmean(values) for values in _grouped(known).values()]


class Speedup(NamedTuple):
    """Goodput with the most replicas of a job over that with one: measured and predicted."""

    num_replicas: int
    measured: float
    predicted: float | None


def speedup(job: JobRun) -> Speedup | None:
    """Return a job's speedup; None unless it reported goodput with one replica and with more."""
    known = [(p.num_replicas, p.goodput) for p in job.points if p.goodput and p.num_replicas]
    means = {size: fmean(values) for size, values in _grouped(known).items()}
    most = max(means, default=1)
    if most < 2 or means.get(1, 0.0) <= 0:
        return None
    foretold = [a.speedup for a in job.allocations if a.num_replicas == most]
    return Speedup(most, means[most] / means[1], foretold[-1] if foretold else None)


def _grouped(pairs: Iterable[tuple[Key, float]]) -> dict[Key, list[float]]:
    groups: dict[Key, list[float]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return dict(sorted(groups.items()))


def _path(values: list[str]) -> str:
    """Write a series as `1 → 2`, or only its ends if it is long."""
    if not values:
        return DASH
    short = [v for i, v in enumerate(values) if i == 0 or v != values[i - 1]]
    if len(short) > 3:
        short = [short[0], "…", short[-1]]
    return " → ".join(short)


def continuations(job: JobRun) -> str:
    """Describe the steps at which a job stopped and resumed, or was resized."""
    pairs = [(a, b) for a, b in pairwise(job.started) if b.first_step_number is not None]
    if not pairs:
        restarts = len(job.started) - 1
        if restarts > 0:
            return f"After {count(restarts, 'restart')} it has reported no further step."
        return "It ran without a restart." if job.started else "It was never started."
    parts = [_changed(a, b) if b.elastic else _resumed(a, b) for a, b in pairs]
    what = "change" if any(b.elastic for _, b in pairs) else "restart"
    tail = f", and {count(len(parts) - 3, f'more {what}')}" if len(parts) > 3 else ""
    return f"It {'; '.join(parts[:3])}{tail}."


def _resumed(before: Attempt, after: Attempt) -> str:
    last, first = before.stopped_step, after.first_step_number
    head = "" if last is None else f"stopped at step {amount(last)}, "
    back = last is not None and first is not None and first < last
    verb = "went back" if back else "went on"
    return f"{head}{verb} with step {amount(first)} and {count(after.num_replicas, 'replica')}"


def _changed(before: Attempt, after: Attempt) -> str:
    pause = after.pause_seconds
    cost = "" if pause is None else f", after a pause of {duration(pause)}"
    replicas = count(after.num_replicas, "replica")
    verb = "lost replicas and went on with" if before.outcome == "survived" else "resized to"
    return f"{verb} {replicas} at step {amount(after.first_step_number)}{cost}"


MAX_ALLOCATIONS = 1000
"""Number of decisions listed, the newest ones."""


def allocation_rows(run: Run, colours: dict[str, int]) -> list[AllocationRow]:
    """Return the decisions about all jobs in words, the newest `MAX_ALLOCATIONS` of them."""
    return [
        AllocationRow(
            time=clock(a.time - (run.start or 0.0)),
            job=clean(a.job),
            colour=colours[a.job],
            num_stages=str(a.num_stages),
            replicas=f"{len(a.previous)} → {a.num_replicas}" if a.previous else f"{a.num_replicas}",
            nodes=placements(a.nodes),
            batch_size=amount(a.batch_size),
            speedup=f"{grouped(a.speedup)}×" if a.speedup is not None else DASH,
            why=clean(decision_text(a.why, a.why_restart)),
        )
        for a in run.allocations[-MAX_ALLOCATIONS:]
    ]
