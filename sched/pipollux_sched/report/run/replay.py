"""Replay: build the records of a run from the events of a log.

`Recorder` reads events one at a time, so that it also serves the live view. It relies on the order
of the events, but no event is required: missing values stay None.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from pipollux_perfmodel import StageEvent
from pipollux_perfmodel.timing.params import SCHEDULES
from pipollux_sched.spec.synchronization import synchronization

from .event_log import Event, names, numbers, real, text, whole
from .records import (
    FINISHED,
    AllocationRecord,
    Attempt,
    JobRun,
    NodeRun,
    Run,
    RunPoint,
    StepTimeline,
)

MAX_SLOTS, MAX_STAGES, MAX_MICROBATCHES = 4096, 1024, 65536
"""Limits on values in a log; larger ones are ignored, because drawing them would take too long."""


class Recorder:
    """Builds a `Run` from events, one at a time.

    Args:
        max_points: number of latest reports of each job to keep besides the first; None: all.

    Example:
        >>> recorder = Recorder()
        >>> recorder.add({"time": 0.0, "type": "submitted", "job": "a", "spec": {}})
        >>> recorder.run.jobs["a"].phase
        'Queued'
    """

    def __init__(self, max_points: int | None = None) -> None:
        self.run = Run()
        self._max_points = max_points
        self._on_job: dict[str, Callable[[JobRun, Event, float], None]] = {
            "submitted": _submitted,
            "allocated": self._allocated,
            "started": _started,
            "first_step": _first_step,
            "changing": _changing,
            "change_abandoned": _change_abandoned,
            "changed": self._changed,
            "survived": self._changed,
            "stopping": _stopping,
            "stopped": _stopped,
            "progress": self._progress,
            "timeline": self._timeline,
            "restarting": _restarting,
            "complete": _complete,
            "failed": _failed,
            "cancelled": _cancelled,
            "rerun": _rerun,
            "hints": _hints,
        }

    def add(self, event: Event) -> None:
        """Record one event; an event of an unknown type only advances the clock."""
        time = real(event, "time")
        if time is None:
            return
        run = self.run
        kind, name = text(event, "type"), text(event, "job")
        if kind == "progress" and run.start is not None:
            time = max(time, run.start)  # the clock of a job may be off
        run.start = time if run.start is None else min(run.start, time)
        run.end = time if run.end is None else max(run.end, time)
        if kind == "cluster":
            self._cluster(event)
        elif kind == "deleted":
            run.jobs.pop(name, None)  # a later job of the same name is another one
        elif name and (handler := self._on_job.get(kind)) is not None:
            handler(run.jobs.setdefault(name, JobRun(name)), event, time)

    def _cluster(self, event: Event) -> None:
        nodes = event.get("nodes")
        self.run.policy = text(event, "policy")
        if not isinstance(nodes, Mapping):
            return
        for name, node in nodes.items():
            if isinstance(name, str) and isinstance(node, Mapping):
                slots = min(max(0, whole(node, "slots") or 0), MAX_SLOTS)
                self.run.nodes[name] = NodeRun(name, slots, text(node, "kind"))
                self.run.nodes_declared = True

    def _allocated(self, job: JobRun, event: Event, time: float) -> None:
        nodes = tuple(names(event, "nodes"))
        num_stages = _num_stages(event, job.num_stages)
        job.num_stages = num_stages
        job.allocations.append(
            AllocationRecord(
                time=time,
                job=job.name,
                nodes=nodes,
                previous=tuple(names(event, "previous")),
                num_stages=num_stages,
                num_replicas=len(nodes),
                batch_size=whole(event, "batch_size"),
                speedup=real(event, "speedup"),
                why=text(event, "why"),
                elastic=event.get("elastic") is True,
                why_restart=text(event, "why_restart"),
            )
        )
        if event.get("elastic") is True:
            return  # the attempt continues unchanged until `changed`
        if nodes:
            number = whole(event, "attempt") or _next_number(job)
            attempt = _attempt(job, number)
            attempt.nodes, attempt.num_stages = nodes, num_stages
            attempt.allocated = time
            attempt.membership = max(1, whole(event, "membership") or 1)
            attempt.replicas = tuple(numbers(event, "replicas")) or tuple(range(len(nodes)))
            self._make_room(nodes, num_stages)
        elif job.current is None and job.phase not in FINISHED:
            job.phase = "Suspended"

    def _changed(self, job: JobRun, event: Event, time: float) -> None:
        """Start the next membership of the running attempt, at the end of the previous one."""
        before = _running(job, event)
        nodes = tuple(names(event, "nodes"))
        if before is None or not before.active or not nodes:
            return
        before.ended, before.outcome = time, text(event, "type")
        after = Attempt(
            before.number,
            nodes,
            _num_stages(event, before.num_stages),
            membership=max(whole(event, "membership") or 0, before.membership + 1),
            elastic=True,
            pause_seconds=real(event, "pause_seconds"),
            replicas=tuple(numbers(event, "replicas")),
            arrivals=before.arriving,
            allocated=before.allocated,
            started=time,
            first_step=time,
            first_step_number=whole(event, "step"),
        )
        job.attempts.insert(job.attempts.index(before) + 1, after)
        job.phase = "Running"
        self._make_room(nodes, after.num_stages)

    def _make_room(self, nodes: tuple[str, ...], num_stages: int) -> None:
        """Enlarge a node to the replicas placed on it, if there is no `cluster` event."""
        if self.run.nodes_declared:
            return
        for node in nodes:
            known = self.run.nodes.get(node, NodeRun(node, 0))
            slots = max(known.slots, nodes.count(node) * num_stages)
            self.run.nodes[node] = known._replace(slots=slots)

    def _progress(self, job: JobRun, event: Event, time: float) -> None:
        step = whole(event, "step")
        attempt = _of_event(job, event)
        if step is None:
            return
        if attempt is not None and attempt.first_step is None:
            attempt.first_step, attempt.first_step_number = time, step
        if attempt is not None and attempt.active and attempt.stopping is None:
            job.phase = "Running"
        job.num_epochs = whole(event, "num_epochs") or job.num_epochs
        number = attempt.number if attempt else whole(event, "attempt") or 0
        membership = attempt.membership if attempt else 1
        job.points.append(_point(event, time, number, membership, step))
        if self._max_points is not None:
            del job.points[1 : -self._max_points]

    def _timeline(self, job: JobRun, event: Event, _time: float) -> None:
        timeline = _parse_timeline(event, _of_event(job, event))
        if timeline is not None:
            job.timelines.append(timeline)
            job.num_microbatches = timeline.num_microbatches
            if self._max_points is not None:
                del job.timelines[:-1]


def _num_stages(event: Mapping[str, Any], otherwise: int) -> int:
    return min(max(1, whole(event, "num_stages") or otherwise), MAX_STAGES)


def _next_number(job: JobRun) -> int:
    return job.attempts[-1].number + 1 if job.attempts else 1


def _attempt(job: JobRun, number: int) -> Attempt:
    """Return the job's attempt of that number; a new one gets the last one's nodes."""
    for attempt in reversed(job.attempts):
        if attempt.number == number:
            return attempt
    nodes = job.attempts[-1].nodes if job.attempts else ()
    job.attempts.append(Attempt(number, nodes, job.num_stages))
    job.attempts.sort(key=lambda g: g.number)
    return next(g for g in job.attempts if g.number == number)


def _of_event(job: JobRun, event: Event) -> Attempt | None:
    """Return the last membership of an event's attempt: by its number, else the running one."""
    number = whole(event, "attempt")
    for attempt in reversed(job.attempts):
        if attempt.number == number:
            return attempt
    return job.current


def _submitted(job: JobRun, event: Event, time: float) -> None:
    job.submitted, job.phase = time, "Queued"
    spec = event.get("spec")
    if isinstance(spec, Mapping):
        job.num_stages = _num_stages(spec, 1)
        job.num_microbatches = whole(spec, "num_microbatches")
        job.owner, job.program = _owner(spec), _program(spec)


def _owner(spec: Mapping[str, Any]) -> str:
    team = text(spec, "team")
    return ", ".join(filter(None, [text(spec, "user"), f"team {team}" if team else ""]))


def _program(spec: Mapping[str, Any]) -> str:
    args = spec.get("args")
    given = [arg for arg in args if isinstance(arg, str)] if isinstance(args, list | tuple) else []
    fields = ("script", "module", "command", "image")
    program = next(filter(None, (text(spec, field) for field in fields)), "")
    return shlex.join([program, *given]) if program else ""


def _started(job: JobRun, event: Event, time: float) -> None:
    number = whole(event, "attempt")
    if number is None:
        waiting = [g.number for g in job.attempts if g.started is None]
        number = waiting[-1] if waiting else _next_number(job)
    for other in job.attempts:
        if other.active and other.number != number:
            other.ended = time
    _attempt(job, number).started = time
    job.phase = "Starting"


def _first_step(job: JobRun, event: Event, time: float) -> None:
    attempt = _of_event(job, event)
    if attempt is None:
        return
    attempt.started = attempt.started or time
    attempt.first_step = time
    attempt.first_step_number = whole(event, "step")
    attempt.restart_seconds = real(event, "restart_seconds")
    job.phase = "Running"


def _changing(job: JobRun, event: Event, time: float) -> None:
    """Record the start times of the joining replicas, which hold slots from then on."""
    attempt = _running(job, event)
    joining = event.get("joining")
    if attempt is None or not isinstance(joining, list | tuple):
        return
    arrivals = (whole(one, "replica") for one in joining if isinstance(one, Mapping))
    attempt.arriving = {replica: time for replica in arrivals if replica is not None}


def _change_abandoned(job: JobRun, event: Event, _time: float) -> None:
    attempt = _running(job, event)
    if attempt is not None:
        attempt.arriving = {}


def _stopping(job: JobRun, event: Event, time: float) -> None:
    attempt = _running(job, event)
    if attempt is not None:
        attempt.stopping = time
        job.phase = "Stopping"


def _running(job: JobRun, event: Event) -> Attempt | None:
    """Return the attempt to stop: the one of the event if it runs, else the running one."""
    named = _of_event(job, event)
    return named if named is not None and named.active else job.current


def _end(job: JobRun, event: Event, time: float, outcome: str) -> None:
    attempt = _running(job, event)
    if attempt is not None:
        attempt.ended, attempt.outcome = time, outcome
        attempt.stopped_step = whole(event, "step")


def _stopped(job: JobRun, event: Event, time: float) -> None:
    _end(job, event, time, "stopped")
    if job.phase not in FINISHED:
        to_be_started = any(g.started is None for g in job.attempts)
        job.phase = "Restarting" if to_be_started else "Suspended"


def _restarting(job: JobRun, event: Event, time: float) -> None:
    _end(job, event, time, "failed")
    job.num_failures += 1
    job.phase, job.message = "Restarting", text(event, "why")


def _complete(job: JobRun, event: Event, time: float) -> None:
    _end(job, event, time, "complete")
    job.phase, job.ended, job.message = "Complete", time, ""
    job.final_step, job.final_epoch = whole(event, "step"), whole(event, "epoch")


def _failed(job: JobRun, event: Event, time: float) -> None:
    _end(job, event, time, "failed")
    job.phase, job.ended, job.message = "Failed", time, text(event, "why")


def _cancelled(job: JobRun, event: Event, time: float) -> None:
    _end(job, event, time, "cancelled")
    job.phase, job.ended, job.message = "Cancelled", time, text(event, "why")


def _rerun(job: JobRun, _event: Event, _time: float) -> None:
    job.phase, job.ended, job.message = "Queued", None, ""


def _hints(job: JobRun, event: Event, _time: float) -> None:
    hints = event.get("hints")
    if isinstance(hints, Mapping):
        job.num_microbatches = whole(hints, "numMicrobatches") or job.num_microbatches
        nodes = job.current.nodes if job.current else ()
        job.synchronization = synchronization(hints, nodes) or ""


def _point(event: Event, time: float, attempt: int, membership: int, step: int) -> RunPoint:
    return RunPoint(
        time=time,
        attempt=attempt,
        step=step,
        epoch=whole(event, "epoch"),
        samples=whole(event, "samples"),
        loss=real(event, "loss"),
        batch_size=whole(event, "batch_size"),
        atomic_bsz=whole(event, "atomic_bsz"),
        accum_steps=whole(event, "accum_steps"),
        num_replicas=whole(event, "num_replicas"),
        membership=membership,
        step_time=real(event, "step_time"),
        predicted_step_time=real(event, "predicted_step_time"),
        goodput=real(event, "goodput"),
        efficiency=real(event, "efficiency"),
    )


def _parse_timeline(event: Event, attempt: Attempt | None) -> StepTimeline | None:
    entries = event.get("events")
    if not isinstance(entries, list | tuple):
        return None
    events = tuple(e for e in map(_stage_event, entries) if e is not None)
    if not events:
        return None
    return StepTimeline(
        attempt=attempt.number if attempt else whole(event, "attempt") or 0,
        step=whole(event, "step"),
        num_stages=max(_num_stages(event, 1), 1 + max(e.stage for e in events)),
        num_microbatches=1 + max(e.microbatch for e in events),
        schedule=next((x for x in SCHEDULES if x == event.get("schedule")), "gpipe"),
        events=events,
    )


def _stage_event(entry: Any) -> StageEvent | None:
    if not isinstance(entry, list | tuple) or len(entry) != 5:
        return None
    fields = dict(zip(("stage", "microbatch", "phase", "start", "end"), entry, strict=True))
    stage, microbatch = whole(fields, "stage"), whole(fields, "microbatch")
    start, end = real(fields, "start"), real(fields, "end")
    if stage is None or microbatch is None or start is None or end is None:
        return None
    phase = fields["phase"]
    if not (0 <= stage < MAX_STAGES and 0 <= microbatch < MAX_MICROBATCHES and end >= start):
        return None
    if phase == "forward":
        return StageEvent(stage, microbatch, "forward", start, end)
    if phase == "backward":
        return StageEvent(stage, microbatch, "backward", start, end)
    return None
