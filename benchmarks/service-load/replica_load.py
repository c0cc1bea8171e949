"""Requests of the replicas of many jobs, at their usual times: run by `heartbeats.py`.

Reads a plan as JSON from its standard input, and writes its measurements to its standard output.
The requests are, byte by byte, those of `pipollux_hybrid` through httpx; the rules for times and
failures are those of its `Heartbeat` and `Reporter`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from pipollux_hybrid.job.heartbeat import FIRST_BACKOFF, OVER, REQUEST_TIMEOUT
from pipollux_hybrid.telemetry.reporter import (
    MAX_BACKOFF,
    MAX_POINTS,
    POINTS_PER_SECOND,
    REPORT_INTERVAL,
)

KEPT = 5.0
"""Seconds that httpx keeps a connection without a request."""


@dataclass
class Measured:
    """Results of the requests of one kind."""

    times: list[float] = field(default_factory=list)
    """Seconds of each accepted request, from its due time."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Answers by status, and failures by name."""


class Job(NamedTuple):
    """One job as its replicas know it."""

    name: str
    token: str
    attempt: int
    replicas: int


class Connection:
    """The connection of one client with a job's token, kept open for a while if `keeps`."""

    def __init__(self, base: str, token: str, *, keeps: bool) -> None:
        self._url, self._keeps = urlsplit(base), keeps
        self._lines = _header_lines(base) + f"Authorization: Bearer {token}\r\n".encode()
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0
        self.over = False
        """Whether the scheduler has answered that the job's attempt is over: its replicas end."""
        self.later: float | None = None
        """Seconds after which the scheduler requests a retry; None: not given."""

    async def send(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Send a request; return its status and the body of the answer.

        Raises OSError if it was not answered; also TimeoutError, EOFError.
        """
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        head = f"{method} {path} HTTP/1.1\r\n".encode() + self._lines + length
        self.later = None
        async with asyncio.timeout(REQUEST_TIMEOUT), self._connected() as (reader, writer):
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            status = int(answer[9:12])
            self.over = status == OVER
            size = 0
            for line in answer.split(b"\r\n")[1:]:
                if line[:15].lower() == b"content-length:":
                    size = int(line[15:])
                elif line[:12].lower() == b"retry-after:":
                    self.later = float(line[12:])
            return status, await reader.readexactly(size)

    @asynccontextmanager
    async def _connected(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        now = time.monotonic()
        if self._open is not None and (now > self._used + KEPT or self._open[0].at_eof()):
            self.close()
        if self._open is None:
            self._open = await asyncio.open_connection(self._url.hostname, self._url.port)
        try:
            yield self._open
        except BaseException:  # raised again; a half-sent request must not be continued
            self.close()
            raise
        self._used = time.monotonic()
        if not self._keeps:
            self.close()

    def close(self) -> None:
        """Close what is open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


@cache
def _header_lines(base: str) -> bytes:
    """Return httpx's header of a request with a body, without token and length."""
    with httpx.Client(base_url=base, trust_env=False) as client:
        raw = client.build_request("POST", "/", json={}).headers.raw
    lines = (b"%s: %s\r\n" % pair for pair in raw if pair[0].lower() != b"content-length")
    return b"".join(lines)


class Load:
    """The replicas of some jobs.

    Args:
        plan: `url`, `seconds`, `jobs`; `heartbeat_interval`, `hints_interval`, `step_time`, all in
        seconds; `hints`.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan, self._url = plan, plan["url"]
        self.jobs = [Job(*entry) for entry in plan["jobs"]]
        self.measured = {kind: Measured() for kind in ("heartbeat", "report", "hints")}
        self.gaps: dict[tuple[str, int], float] = {}
        """The longest time between two accepted heartbeats of a replica."""
        self._end = 0.0
        self._chance = random.Random(1)  # noqa: S311  # the same each time

    async def live(self) -> None:
        """Act as all replicas of all jobs for a time."""
        self._end = time.monotonic() + self._plan["seconds"]
        tasks = [
            asyncio.ensure_future(self._beat(job, replica, self._plan["heartbeat_interval"]))
            for job in self.jobs
            for replica in range(job.replicas)
        ]
        tasks += [asyncio.ensure_future(self._report(job)) for job in self.jobs]
        await asyncio.gather(*tasks)

    async def flat_out(self, kind: str, clients: int) -> None:
        """Send requests of one kind from several clients, each as soon as it has its answer."""
        self._end = time.monotonic() + self._plan["seconds"]
        await asyncio.gather(*(self._flood(kind, number, clients) for number in range(clients)))

    async def _flood(self, kind: str, number: int, clients: int) -> None:
        mine = self.jobs[number::clients]
        sends = {"heartbeat": self._send_heartbeat, "hints": self._send_hints}
        for step in range(self._plan.get("times", sys.maxsize)):
            for job in mine:
                if time.monotonic() >= self._end:
                    return
                connection = Connection(self._url, job.token, keeps=False)
                if kind == "report":
                    await self._send_points(connection, job, [self._point(step)], time.monotonic())
                else:
                    await sends[kind](connection, job, step % job.replicas, time.monotonic())

    async def _beat(self, job: Job, replica: int, within: float) -> None:
        """Send a replica's heartbeats, the first one within some seconds."""
        interval = self._plan["heartbeat_interval"]
        due = time.monotonic() + self._chance.uniform(0.0, within)
        connection = Connection(self._url, job.token, keeps=False)
        backoff, taken = FIRST_BACKOFF, 0.0
        while due < self._end:
            await self._until(job, replica, due)
            answer = await self._send_heartbeat(connection, job, replica, due)
            now = time.monotonic()
            if connection.over:
                return
            if connection.later is not None:
                due = now + min(connection.later, interval)
                continue
            if answer is None:
                due, backoff = now + min(backoff, interval), min(2 * backoff, interval)
                continue
            if taken:
                key = job.name, replica
                self.gaps[key] = max(self.gaps.get(key, 0.0), now - taken)
            taken, backoff = now, FIRST_BACKOFF
            again = answer.get("again")
            due = now + (interval if again is None else min(again, interval))

    async def _until(self, _job: Job, _replica: int, due: float) -> None:
        """Wait until a heartbeat is due."""
        await asyncio.sleep(max(due - time.monotonic(), 0.0))

    async def _send_heartbeat(
        self, connection: Connection, job: Job, replica: int, due: float
    ) -> Any:
        elastic: dict[str, Any] = {"membership": 1}
        if replica == 0:
            elastic |= {"epoch": 3, "loop": 1, "balance": [1], "cannot": None, "schedule": "gpipe"}
        body = {"attempt": job.attempt, "replica": replica, "step": int(2 * due)}
        path = f"/jobs/{job.name}/heartbeats"
        return await self._send(
            "heartbeat", connection, "POST", path, {**body, "elastic": elastic}, due
        )

    async def _report(self, job: Job) -> None:
        """Act as the reporting thread of replica 0."""
        connection = Connection(self._url, job.token, keeps=True)
        step_time, hints_interval = self._plan["step_time"], self._plan["hints_interval"]
        due = time.monotonic() + self._chance.uniform(0.0, REPORT_INTERVAL)
        next_hints = due + self._chance.uniform(0.0, hints_interval)
        last, backoff, pace, next_report = due, REPORT_INTERVAL, REPORT_INTERVAL, due
        points: list[dict[str, Any]] = []
        while due < self._end:
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            points += [self._point(step) for step in _steps(last, due, step_time)]
            points, last = points[-MAX_POINTS:], due
            accepted, connection.later = True, None
            if due >= next_hints:
                accepted = await self._send_hints(connection, job, 0, due) is not None
                next_hints += hints_interval if accepted else 0.0
            if points and accepted and due >= next_report:
                gap = pace / POINTS_PER_SECOND if pace > REPORT_INTERVAL else 0.0
                sent = points[:: -max(round(gap / step_time), 1)][::-1]
                answer = await self._send_points(connection, job, sent, due)
                accepted = answer is not None
                if answer is not None:
                    points, pace = [], max(answer.get("again", 0.0), REPORT_INTERVAL)
                    next_report = time.monotonic() + pace - REPORT_INTERVAL
            now = time.monotonic()
            if connection.over:
                break
            if connection.later is not None:
                due = now + max(connection.later, REPORT_INTERVAL)
                continue
            due = now + (REPORT_INTERVAL if accepted else backoff)
            backoff = REPORT_INTERVAL if accepted else min(2 * backoff, MAX_BACKOFF)
        connection.close()

    async def _send_points(
        self, connection: Connection, job: Job, points: list[dict[str, Any]], due: float
    ) -> Any:
        body = {"attempt": job.attempt, "numEpochs": 10, "points": points, "timeline": None}
        path = f"/jobs/{job.name}/reports"
        return await self._send("report", connection, "POST", path, body, due)

    async def _send_hints(self, connection: Connection, job: Job, _replica: int, due: float) -> Any:
        path = f"/jobs/{job.name}/hints?attempt={job.attempt}"
        return await self._send("hints", connection, "PUT", path, self._plan["hints"], due)

    async def _send(
        self,
        kind: str,
        connection: Connection,
        method: str,
        path: str,
        body: dict[str, Any],
        due: float,
    ) -> Any:
        """Send a request; return the answer, None if it was not accepted."""
        measured = self.measured[kind]
        try:
            encoded = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
            status, answer = await connection.send(method, path, encoded)
        except (OSError, EOFError) as error:
            measured.statuses[type(error).__name__] += 1
            return None
        measured.statuses[str(status)] += 1
        if status >= 400:
            return None
        measured.times.append(time.monotonic() - due)
        return json.loads(answer) if answer else {}

    def _point(self, step: int) -> dict[str, Any]:
        sizes = {"batchSize": 64, "atomicBsz": 16, "accumSteps": 0, "numReplicas": 4}
        told = {"predictedStepTime": 0.4812345, "goodput": 112.512345, "efficiency": 0.83123456}
        at = {"time": time.time(), "step": step, "epoch": 3, "samples": 64 * step}
        return {**at, "loss": 1.2512345, **sizes, "stepTime": 0.5012345, **told}


def _steps(since: float, until: float, step_time: float) -> range:
    return range(int(since / step_time) + 1, int(until / step_time) + 1)


def summary(load: Load) -> dict[str, Any]:
    """Return the measurements for JSON."""
    kinds = {
        kind: {"milliseconds": [1000 * s for s in found.times], "statuses": dict(found.statuses)}
        for kind, found in load.measured.items()
    }
    return {**kinds, "longest_gap": max(load.gaps.values(), default=0.0)}


async def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Carry out a plan."""
    load = Load(plan)
    if plan.get("flat_out"):
        await load.flat_out(plan["flat_out"], plan["clients"])
    else:
        await load.live()
    return summary(load)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
