"""A realistic event log, made from a seed: what a demo of two jobs on two nodes writes down.

`char-lm` (2 stages, 4 micro-batches) runs alone on node-0; `digits` (1 stage) arrives on node-1,
grows from 1 to 2 replicas, finishes; `char-lm` grows to 2 replicas on both nodes and completes.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
START = 1_772_360_000.0

CHAR_LM, DIGITS = "char-lm", "digits"


class Clock:
    """The time of the log and the events written so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  # chance for a test's data, not a secret
        self.events: list[Event] = []

    def say(
        self, at: float, kind: str, job: str | None = None, attempt: int | None = None, **data: Any
    ) -> None:
        head = {"time": START + at, "type": kind, "job": job, "attempt": attempt}
        self.events.append({**head, **data})

    def in_order(self) -> list[Event]:
        return sorted(self.events, key=lambda event: event["time"])


def synthetic_log(seed: int = 7) -> list[Event]:
    """Return the events of the whole run."""
    clock = Clock(seed)
    nodes = {f"node-{i}": {"slots": 2, "kind": "cpu"} for i in range(2)}
    clock.say(0.0, "cluster", nodes=nodes, policy="pollux")
    _submit(clock, 0.4, CHAR_LM, num_stages=2, num_microbatches=4)
    _allocate(
        clock, 1.1, CHAR_LM, 1, ["node-0"], [], 2, 64, 1.0, "new job: one replica fits on node-0"
    )
    _submit(clock, 48.0, DIGITS, num_stages=1, num_microbatches=1)
    why = "new job: one replica fits on node-1"
    _allocate(clock, 48.8, DIGITS, 1, ["node-1"], [], 1, 64, 1.0, why)
    _start(clock, 49.0, DIGITS, 1, 52.6, 1, None)
    _digits(clock, 52.6, 78.0, 1, 1, 1)
    why = "hints say 1.82 times the goodput on two slots of node-1"
    _allocate(clock, 78.0, DIGITS, 2, ["node-1"] * 2, ["node-1"], 1, 192, 1.82, why)
    _stop(clock, 78.1, DIGITS, 1, 79.3, 508)
    _start(clock, 79.5, DIGITS, 2, 83.4, 509, 5.3)
    last = _digits(clock, 83.4, 118.0, 2, 2, 509)
    clock.say(118.2, "complete", DIGITS, 2, step=last, epoch=60)

    _start(clock, 1.3, CHAR_LM, 1, 5.9, 1, None)
    stopped = _char_lm(clock, 5.9, 118.6, 1, 1, 1)
    why = "digits completed and left node-1; two replicas give 1.71 times the goodput"
    both = ["node-0", "node-1"]
    _allocate(clock, 118.5, CHAR_LM, 2, both, ["node-0"], 2, 128, 1.71, why)
    _stop(clock, 118.6, CHAR_LM, 1, 120.3, stopped)
    _start(clock, 120.6, CHAR_LM, 2, 126.1, stopped + 1, 7.5)
    last = _char_lm(clock, 126.1, 221.0, 2, 2, stopped + 1)
    clock.say(221.4, "complete", CHAR_LM, 2, step=last, epoch=3)
    return clock.in_order()


def write_log(path: Path, events: Iterable[Event]) -> Path:
    """Write events as JSON lines."""
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return path


def _submit(clock: Clock, at: float, job: str, **spec: Any) -> None:
    script = f"examples/{job.replace('-', '_')}.py"
    clock.say(at, "submitted", job, spec={"name": job, "script": script, **spec})


def _allocate(
    clock: Clock,
    at: float,
    job: str,
    attempt: int,
    nodes: list[str],
    previous: list[str],
    num_stages: int,
    batch_size: int,
    speedup: float,
    why: str,
) -> None:
    clock.say(
        at,
        "allocated",
        job,
        attempt,
        nodes=nodes,
        num_replicas=len(nodes),
        num_stages=num_stages,
        batch_size=batch_size,
        speedup=speedup,
        previous=previous,
        why=why,
    )


def _start(
    clock: Clock,
    at: float,
    job: str,
    attempt: int,
    first: float,
    step: int,
    restart_seconds: float | None,
) -> None:
    clock.say(at, "started", job, attempt, replicas=[str(4000 + attempt)])
    clock.say(first, "first_step", job, attempt, step=step, restart_seconds=restart_seconds)


def _stop(clock: Clock, at: float, job: str, attempt: int, ended: float, step: int) -> None:
    clock.say(at, "stopping", job, attempt, why="a new allocation")
    clock.say(ended, "stopped", job, attempt, step=step)


def _char_lm(clock: Clock, begin: float, end: float, attempt: int, replicas: int, step: int) -> int:
    """Report a character model's training; return its last step."""
    rnd, at = clock.random, begin
    batch = 64
    while at < end - 0.3:
        accum = 1 if replicas == 1 and at > begin + 60 else 0
        batch = 64 * (accum + 1) if replicas == 1 else 128
        usual = 0.118 * (accum + 1) + (0.021 if replicas == 2 else 0.008)
        measured = usual * rnd.lognormvariate(0, 0.07)
        known = 1 - math.exp(-(at - begin) / 12)
        predicted = usual * (1 + (1 - known) * (0.24 if replicas == 2 else -0.3) + 0.015)
        loss = 1.55 + 3.0 * math.exp(-step / 160) + 0.45 * math.exp(-step / 900)
        efficiency = 1 / (1 + (batch - 64) / 700) * rnd.gauss(1, 0.006)
        _progress(
            clock,
            at,
            CHAR_LM,
            attempt,
            step=step,
            epoch=min(2, int((at - 5.9) / 72)),
            samples=64 * step,
            loss=loss * rnd.gauss(1, 0.035),
            batch_size=batch,
            atomic_bsz=64,
            accum_steps=accum,
            num_replicas=replicas,
            step_time=measured,
            predicted_step_time=predicted if at > begin + 3 else None,
            goodput=batch / measured * min(1.0, efficiency) if at > begin + 2 else None,
            efficiency=min(1.0, efficiency) if at > begin + 2 else None,
            num_epochs=3,
        )
        if int(at / 20) != int((at - 0.26) / 20):
            clock.say(at, "timeline", CHAR_LM, attempt, **pipeline_step(rnd, step))
            clock.say(at, "hints", CHAR_LM, attempt, hints={"numStages": 2, "numMicrobatches": 4})
        at += max(0.26, measured)
        step += max(1, round(0.26 / measured))
    return step - 1


def _digits(clock: Clock, begin: float, end: float, attempt: int, replicas: int, step: int) -> int:
    """Report a small classifier's training; return its last step."""
    rnd, at = clock.random, begin
    while at < end - 0.3:
        atomic = 64 if replicas == 1 else 96
        usual = 0.0061 + 0.000052 * atomic + (0.0031 if replicas == 2 else 0)
        measured = usual * rnd.lognormvariate(0, 0.12)
        loss = 0.06 + 2.25 * math.exp(-step / 130)
        efficiency = 0.97 if replicas == 1 else 0.83
        _progress(
            clock,
            at,
            DIGITS,
            attempt,
            step=step,
            epoch=int((at - 52.0) * 0.9),
            samples=64 * step,
            loss=loss * rnd.gauss(1, 0.12),
            batch_size=replicas * atomic,
            atomic_bsz=atomic,
            accum_steps=0,
            num_replicas=replicas,
            step_time=measured,
            predicted_step_time=usual * (1.06 if replicas == 2 else 0.97),
            goodput=replicas * atomic / measured * efficiency,
            efficiency=efficiency * rnd.gauss(1, 0.01),
        )
        at += 0.26
        step += 5
    return step - 1


def _progress(clock: Clock, at: float, job: str, attempt: int, **point: Any) -> None:
    clock.say(at, "progress", job, attempt, **point)


def pipeline_step(rnd: random.Random, step: int, num_microbatches: int = 4) -> dict[str, Any]:
    """Return the time line of a step whose two stages one thread drives in turn."""
    now, events = 0.0, []
    forward, backward = (0.0068, 0.0081), (0.0139, 0.0171)
    for clock_cycle in range(num_microbatches + 1):
        for stage in (0, 1):
            microbatch = clock_cycle - stage
            if 0 <= microbatch < num_microbatches:
                took = forward[stage] * rnd.lognormvariate(0, 0.05)
                events.append([stage, microbatch, "forward", now, now + took])
                now += took + 0.0002
    now += 0.0009
    for clock_cycle in reversed(range(num_microbatches + 1)):
        for stage in (1, 0):
            microbatch = clock_cycle - stage
            if 0 <= microbatch < num_microbatches:
                took = backward[stage] * rnd.lognormvariate(0, 0.05)
                events.append([stage, microbatch, "backward", now, now + took])
                now += took + 0.0002
    return {"step": step, "num_stages": 2, "num_microbatches": num_microbatches, "events": events}
