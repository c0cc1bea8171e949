"""Reports to the scheduler and to listeners, without delaying training.

A thread on rank 0 fits the performance model in every hints interval (30 s by default), sends hints
and, about once per second or as often as the scheduler allows, the latest points of progress. It
also passes points to the progress bar and to TensorBoard. If the scheduler is unreachable the
thread backs off and keeps a bounded number of points and the latest hints; training continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.supervisor_client import retry_after, supervisor_client
from pipollux_perfmodel import StageEvent
from pipollux_protocol.messages import (
    MAX_METRICS,
    Metric,
    ReportAnswer,
    StageTimeline,
    TrainingReport,
)

from . import unsent_report
from .loss_watch import LossWatch
from .progress_bar import ProgressDisplay
from .step_record import StepListener, StepRecord
from .tensorboard import ScalarWriter

if TYPE_CHECKING:
    from pipollux_perfmodel import SchedHints

LOG = logging.getLogger(__name__)
POINTS_PER_SECOND = 4.0
"""Maximum rate of points."""
MAX_POINTS = 1000
"""Points kept while the scheduler is unreachable; the oldest are dropped first."""
REPORT_INTERVAL = 1.0
REQUEST_TIMEOUT = 5.0
MAX_BACKOFF = 60.0
REFUSED = (401, 403)
"""Permanent errors: the token does not, or no longer, belong to this job."""
FIRST_HINTS = 0.2
"""Part of the interval after which the first fit runs, so that a new job soon has measurements."""


class Reporter:
    """The reporting thread of rank 0; on other ranks it never starts."""

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._points: deque[StepRecord] = deque(maxlen=MAX_POINTS)
        self._unshown: deque[StepRecord] = deque(maxlen=MAX_POINTS)
        self._timeline: StageTimeline | None = None
        self._metrics: dict[tuple[str, int], float | None] = {}
        """Values of metrics by name and step, the oldest first."""
        self._hints: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_point = 0.0
        self._held: Callable[[], StepRecord] | None = None
        self._retry_at = 0.0
        self._backoff = REPORT_INTERVAL
        self._pace = REPORT_INTERVAL
        """Seconds between reports, set by the scheduler."""
        self._next_report = 0.0
        self._senders = deque([self._send_hints, self._send_report])
        env = ctx.env
        self._next_hints = time.monotonic() + FIRST_HINTS * env.hints_interval
        self._url = f"{env.scheduler_url}/jobs/{env.job_id}" if env.scheduler_url else None
        # With a scheduler, its own display shows the progress.
        self._display = ProgressDisplay() if env.progress and self._url is None else None
        self._listeners: list[StepListener] = [self._display] if self._display else []
        self._losses = LossWatch()
        self._fault = ""
        self._hints_of: Callable[[], SchedHints | None] = lambda: None
        if env.tensorboard_dir is not None:
            # Opened by rank 0, which changes when the first replica leaves.
            self._listeners.append(ScalarWriter(env.tensorboard_dir))
        ctx.closers.append(self.close)

    def listen(self, listener: StepListener) -> None:
        """Pass points to one more listener."""
        with self._lock:
            self._listeners.append(listener)

    def send_hints_of(self, fit: Callable[[], SchedHints | None]) -> None:
        """Send the hints that this function returns, in the reporting thread, in every interval."""
        self._hints_of = fit

    def note_loss(self, step: int, loss: float | None) -> None:
        """Check the loss of every optimizer step, including steps without a reported point."""
        self._losses.note(step, loss)

    def add_point(self, when: float, make: Callable[[], StepRecord]) -> None:
        """Report an optimizer step that ended at ``when``, in seconds since 1970; of steps in quick
        succession only the latest is kept, and its point made.
        """
        with self._lock:
            if when - self._last_point < 1.0 / POINTS_PER_SECOND:
                self._held = make
                return
        point = make()
        with self._lock:
            self._queue(point)
        self._ensure_running()

    def add_timeline(
        self, step: int, num_stages: int, num_microbatches: int, events: list[StageEvent]
    ) -> None:
        """Report the measured timeline of a step; the latest is sent."""
        with self._lock:
            self._timeline = StageTimeline.model_construct(
                step=step,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                schedule=self._context.pipeline.schedule,
                events=[tuple(event) for event in events],
            )

    def add_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Report values of metrics at a step; a later value of the same step replaces them."""
        if self._url is None or not self._context.env.reports:
            return
        with self._lock:
            for name, value in values.items():
                self._metrics.pop((name, step), None)
                self._metrics[name, step] = value
            for key in list(self._metrics)[:-MAX_METRICS]:
                del self._metrics[key]
        self._ensure_running()

    def pause_progress(self) -> None:
        """Pause the progress bar after a loop, so that it does not follow the script's output."""
        if self._display is not None and not self._call(self._display, self._display.pause):
            self._display = None

    def finish_progress(self) -> None:
        """Show the last step at the end of the epochs, before the script's later output."""
        with self._lock:
            if self._held is not None:
                self._queue(self._held())
            last = self._unshown[-1] if self._unshown else None
        display = self._display
        if display is not None and not self._call(display, display.finish, last):
            self._display = None

    def close(self) -> None:
        """Send the remaining reports and end the thread."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(timeout=3 * REQUEST_TIMEOUT)
        if self._thread.is_alive():
            LOG.warning("the reporting thread did not end within %.0f s", 3 * REQUEST_TIMEOUT)
        self._thread = None

    def _queue(self, point: StepRecord) -> None:
        """Queue a point for the listeners; the caller holds the lock."""
        self._last_point, self._held = point.time, None
        self._unshown.append(point)
        if self._url is not None:
            self._points.append(point)

    def _ensure_running(self) -> None:
        if self._thread is None and self._context.env.reports and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="pipollux-reporter", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with supervisor_client(self._context.env, timeout=REQUEST_TIMEOUT) as client:
            # The first point is sent immediately: the scheduler waits for the start of training.
            while not self._stop.is_set():
                self._safely(self._turn, client)
                self._stop.wait(REPORT_INTERVAL)
            self._safely(self._last_turn, client)

    def _safely(self, turn: Callable[[httpx.Client], None], client: httpx.Client) -> None:
        """Run a turn; log an error once and keep the thread alive."""
        try:
            turn(client)
        except Exception as error:  # if the thread ended, all reports would stop
            if repr(error) != self._fault:
                LOG.exception("reporting failed; it is tried again, and training goes on")
            self._fault = repr(error)

    def _last_turn(self, client: httpx.Client) -> None:
        with self._lock:
            if self._held is not None:
                self._queue(self._held())
        self._show()
        for listener in self._listeners:
            self._call(listener, listener.close)
        self._retry_at = self._next_report = 0.0
        # Independently: failing hints must not prevent the last report.
        self._safely(lambda _: self._fit(), client)
        self._safely(self._send_hints, client)
        self._safely(self._send_report, client)
        self._safely(lambda _: self._keep_unsent(), client)

    def _turn(self, client: httpx.Client) -> None:
        self._show()
        if time.monotonic() >= self._next_hints:
            self._next_hints = time.monotonic() + self._context.env.hints_interval
            self._fit()
        for send in tuple(self._senders):
            send(client)

    def _show(self) -> None:
        with self._lock:
            points, listeners = list(self._unshown), list(self._listeners)
            self._unshown.clear()
        for listener in listeners:
            for point in points:
                if not self._call(listener, listener.on_step, point):
                    break

    def _call(self, listener: StepListener, method: Any, *arguments: Any) -> bool:
        """Call a listener; remove one that fails, so that reports continue."""
        try:
            method(*arguments)
        except Exception as error:  # a full disk, a closed terminal: training must continue
            name = type(listener).__name__
            if isinstance(error, OSError):  # its sentence says it all
                LOG.warning("%s cannot write, and is switched off: %s", name, error)
            else:
                LOG.exception("%s failed and is switched off", name)
            with self._lock:
                self._listeners = [x for x in self._listeners if x is not listener]
            return False
        return True

    def _fit(self) -> None:
        try:
            hints = self._hints_of()
        except (ValueError, ArithmeticError):
            # Without a fit the batch size may be worse, but training continues.
            LOG.exception("the performance model could not be fitted")
            return
        if hints is not None:
            self._hints = hints.model_dump(mode="json", by_alias=True)

    def _send_hints(self, client: httpx.Client) -> None:
        if self._hints is None or time.monotonic() < self._retry_at:
            return
        attempt = self._context.env.attempt
        if self._send(client, "PUT", "hints", self._hints, attempt=attempt):
            self._hints = None

    def _send_report(self, client: httpx.Client) -> None:
        with self._lock:
            points, timeline, metrics = list(self._points), self._timeline, dict(self._metrics)
        due = time.monotonic() >= max(self._retry_at, self._next_report)
        if not (points or metrics) or not due:
            return
        body = self._body(_thinned(points, self._pace), timeline, metrics)
        if self._send(client, "POST", "reports", body, take=self._take_pace):
            with self._lock:
                # The oldest points may have been dropped in the meantime.
                while points and self._points and self._points[0].step <= points[-1].step:
                    self._points.popleft()
                for key, value in metrics.items():
                    if key in self._metrics and self._metrics[key] == value:
                        del self._metrics[key]
                if self._timeline is timeline:
                    self._timeline = None

    def _take_pace(self, answer: httpx.Response) -> None:
        """Record the interval that the scheduler sets for reports."""
        try:
            wanted = ReportAnswer.model_validate_json(answer.content).again
        except ValueError:  # sent by an earlier version
            wanted = REPORT_INTERVAL
        self._pace = min(wanted, MAX_BACKOFF) if wanted > REPORT_INTERVAL else REPORT_INTERVAL
        # The next turn is at least one interval away.
        self._next_report = time.monotonic() + self._pace - REPORT_INTERVAL

    def _body(
        self,
        points: list[StepRecord],
        timeline: StageTimeline | None,
        metrics: Mapping[tuple[str, int], float | None],
    ) -> dict[str, Any]:
        return TrainingReport.model_construct(
            attempt=self._context.env.attempt,
            num_epochs=points[-1].num_epochs if points else None,
            points=[point.point() for point in points],
            timeline=timeline,
            metrics=[
                Metric.model_construct(name=name, step=step, value=value)
                for (name, step), value in metrics.items()
            ],
        ).to_json_object()

    def _keep_unsent(self) -> None:
        """Save undelivered points to disk, so that the end of a job is not lost."""
        with self._lock:
            points, timeline, metrics = list(self._points), self._timeline, dict(self._metrics)
        if points or metrics:
            body = self._body(points, timeline, metrics)
            unsent_report.keep(self._context.env.checkpoint_dir, body)

    def _send(
        self,
        client: httpx.Client,
        method: str,
        what: str,
        body: dict[str, Any],
        *,
        take: Callable[[httpx.Response], object] = lambda _: None,
        **query: int,
    ) -> bool:
        """Send a request; return whether it is complete, accepted or permanently refused."""
        if self._url is None:
            return True
        try:
            response = client.request(method, f"{self._url}/{what}", json=body, params=query)
            later = retry_after(response)
            if later is not None:  # not an error: the scheduler is overloaded
                self._retry_at = time.monotonic() + min(later, MAX_BACKOFF)
                return False
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            if error.response.status_code in REFUSED:
                self._give_up(error.response.status_code)
                return True
            self._back_off(what, error)
            return False
        except httpx.HTTPError as error:
            self._back_off(what, error)
            return False
        except (ValueError, TypeError) as error:
            # Data without a JSON form would block all later reports.
            LOG.warning("%s cannot be sent (%s) and are left out; training goes on", what, error)
            return True
        self._backoff = REPORT_INTERVAL
        take(response)
        return True

    def _give_up(self, status: int) -> None:
        LOG.warning(
            "%s refuses this job's token (status %d): nothing more is reported, training goes on; "
            "PIPOLLUX_TOKEN must be the token that the scheduler gave to this job",
            self._url,
            status,
        )
        with self._lock:
            self._url = None
            self._points.clear()
            self._metrics.clear()

    def _back_off(self, what: str, error: httpx.HTTPError) -> None:
        self._retry_at = time.monotonic() + self._backoff
        self._senders.rotate()  # a failing sender must not block the other
        LOG.warning(
            "%s to %s failed: %s; training goes on, the next attempt is in %.0f s",
            what,
            self._url,
            error,
            self._backoff,
        )
        self._backoff = min(2 * self._backoff, MAX_BACKOFF)


def _thinned(points: list[StepRecord], pace: float) -> list[StepRecord]:
    """Return the points to send, thinned to the rate of `pace`, including the last point."""
    if pace <= REPORT_INTERVAL:
        return points
    gap, kept = pace / (POINTS_PER_SECOND * REPORT_INTERVAL), points[-1:]
    for point in reversed(points[:-1]):
        if kept[-1].time - point.time >= gap:
            kept.append(point)
    return kept[::-1]
