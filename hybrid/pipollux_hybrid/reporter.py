"""Telling the scheduler how the job does, without ever standing in the way of training.

On rank 0 a thread fits the performance model every hints interval (30 s by default), sends hints
and, about once a second, the latest points of progress. Requests have a timeout; when the scheduler
is away the thread backs off, keeps a bounded number of points, and training goes on.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import Any

import httpx

from pipollux_perfmodel import StageEvent

from .context import JobContext
from .epoch import epoch_state
from .metrics import Point

__all__ = ["Reporter"]

LOG = logging.getLogger(__name__)
POINTS_PER_SECOND = 4.0
"""Points are thinned to this rate."""
REPORT_INTERVAL = 1.0
REQUEST_TIMEOUT = 5.0
MAX_BACKOFF = 60.0
SAY_INTERVAL = 5.0
"""Seconds between two lines of progress where there is no scheduler to show it."""
FIRST_HINTS = 0.2
"""The first fit comes after this share of the interval, so that a new job is soon judged by its own
numbers rather than by guesses."""


class Reporter:
    """The reporting thread of rank 0; on other ranks it never starts.

    Args:
        ctx: The job's context.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._points: deque[dict[str, Any]] = deque(maxlen=1000)
        self._timeline: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_point = 0.0
        self._held: Point | None = None
        self._next_line = 0.0
        self._retry_at = 0.0
        self._backoff = REPORT_INTERVAL
        env = ctx.env
        self._next_hints = time.monotonic() + FIRST_HINTS * env.hints_interval
        self._url = f"{env.supervisor_url}/jobs/{env.job_id}" if env.supervisor_url else None

    def add_point(self, point: Point) -> None:
        """Report an optimizer step; of steps in quick succession the latest is kept."""
        with self._lock:
            if point.time - self._last_point < 1.0 / POINTS_PER_SECOND:
                self._held = point
                return
            self._last_point, self._held = point.time, None
            self._points.append(_camel_case(asdict(point)))
        self._ensure_running()

    def add_timeline(
        self, step: int, num_stages: int, num_microbatches: int, events: list[StageEvent]
    ) -> None:
        """Report the measured time line of a step; the latest is sent."""
        with self._lock:
            self._timeline = {
                "step": step,
                "numStages": num_stages,
                "numMicrobatches": num_microbatches,
                "events": [list(event) for event in events],
            }

    def close(self) -> None:
        """Send what is left and end the thread."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(timeout=3 * REQUEST_TIMEOUT)
        if self._thread.is_alive():
            LOG.warning("the reporting thread did not end within %.0f s", 3 * REQUEST_TIMEOUT)
        self._thread = None

    def _ensure_running(self) -> None:
        if self._thread is None and self._context.env.rank == 0 and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="pipollux-reporter", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self._context.env.token or ''}"}
        # Loopback and cluster addresses are not for proxies.
        with httpx.Client(timeout=REQUEST_TIMEOUT, headers=headers, trust_env=False) as client:
            # The first point goes out at once: the scheduler waits to see the job train.
            while not self._stop.is_set():
                self._turn(client)
                self._stop.wait(REPORT_INTERVAL)
            with self._lock:
                if self._held is not None:
                    self._points.append(_camel_case(asdict(self._held)))
                    self._held = None
            self._retry_at = 0.0
            self._fit_and_send_hints(client)
            self._send_report(client)

    def _turn(self, client: httpx.Client) -> None:
        if time.monotonic() >= self._next_hints:
            self._next_hints = time.monotonic() + self._context.env.hints_interval
            self._fit_and_send_hints(client)
        self._send_report(client)

    def _fit_and_send_hints(self, client: httpx.Client) -> None:
        try:
            self._context.metrics.fit()
            hints = self._context.metrics.hints()
        except (ValueError, ArithmeticError):
            # A fit that fails costs a better batch size, not the training.
            LOG.exception("the performance model could not be fitted")
            return
        if hints is not None:
            body = hints.model_dump(mode="json", by_alias=True)
            self._send(client, "PUT", "hints", body, generation=self._context.env.generation)

    def _send_report(self, client: httpx.Client) -> None:
        with self._lock:
            points, timeline = list(self._points), self._timeline
        if not points or time.monotonic() < self._retry_at:
            return
        if self._url is None:
            self._say(points[-1])
        body = {
            "generation": self._context.env.generation,
            "numEpochs": epoch_state(self._context).num_epochs,
            "points": points,
            "timeline": timeline,
        }
        if self._send(client, "POST", "reports", body):
            with self._lock:
                for _ in points:
                    self._points.popleft()
                if self._timeline is timeline:
                    self._timeline = None

    def _say(self, point: dict[str, Any]) -> None:
        """Without a scheduler, progress goes to the terminal."""
        if time.monotonic() < self._next_line and not self._stop.is_set():
            return
        self._next_line = time.monotonic() + SAY_INTERVAL
        loss = "" if point["loss"] is None else f" loss {point['loss']:.4f}"
        rate = point["batchSize"] / point["stepTime"]
        goodput = "" if point["goodput"] is None else f" goodput {point['goodput']:.0f}"
        print(
            f"pipollux: epoch {point['epoch']} step {point['step']}{loss} "
            f"batch size {point['batchSize']} throughput {rate:.0f}{goodput} samples/s",
            file=sys.stderr,
            flush=True,
        )

    def _send(
        self, client: httpx.Client, method: str, what: str, body: dict[str, Any], **query: int
    ) -> bool:
        if self._url is None:
            return True
        try:
            response = client.request(method, f"{self._url}/{what}", json=body, params=query)
            response.raise_for_status()
        except httpx.HTTPError as error:
            self._retry_at = time.monotonic() + self._backoff
            self._backoff = min(2 * self._backoff, MAX_BACKOFF)
            LOG.warning("%s to %s failed: %s; training goes on", what, self._url, error)
            return False
        self._backoff = REPORT_INTERVAL
        return True


def _camel_case(fields: dict[str, Any]) -> dict[str, Any]:
    """Field names as the REST interface has them."""
    return {_camel(name): value for name, value in fields.items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
