"""Reporting to the scheduler and to listeners, without ever delaying training.

On rank 0 a thread has the performance model fitted every hints interval (30 s by default), sends
hints and, about once a second, the latest points of progress; a scheduler of many jobs asks for
them less often, and gets fewer. It also hands points to the progress bar and to TensorBoard.
Requests have a timeout; when the scheduler is away the thread backs off, keeps a bounded number of
points and the latest hints, and training goes on. One that has too much to do says when to come
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx

from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.supervisor_client import retry_after, supervisor_client
from pipollux_perfmodel import StageEvent
from pipollux_protocol.messages import ReportAnswer, StageTimeline, TrainingReport

from . import unsent_report
from .loss_watch import LossWatch
from .progress_bar import ProgressDisplay
from .step_record import StepListener, StepRecord
from .tensorboard import ScalarWriter

if TYPE_CHECKING:
    from pipollux_perfmodel import SchedHints

__all__ = ["Reporter"]

LOG = logging.getLogger(__name__)
POINTS_PER_SECOND = 4.0
"""Points are thinned to this rate."""
MAX_POINTS = 1000
"""Points kept while the scheduler is away; the oldest go first."""
REPORT_INTERVAL = 1.0
REQUEST_TIMEOUT = 5.0
MAX_BACKOFF = 60.0
REFUSED = (401, 403)
"""Answers that no repetition changes: the token is not, or no longer, this job's."""
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
        self._points: deque[StepRecord] = deque(maxlen=MAX_POINTS)
        self._unshown: deque[StepRecord] = deque(maxlen=MAX_POINTS)
        self._timeline: StageTimeline | None = None
        self._hints: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_point = 0.0
        self._held: Callable[[], StepRecord] | None = None
        self._retry_at = 0.0
        self._backoff = REPORT_INTERVAL
        self._pace = REPORT_INTERVAL
        """Seconds between two reports, as the scheduler wants it."""
        self._next_report = 0.0
        self._senders = deque([self._send_hints, self._send_report])
        env = ctx.env
        self._next_hints = time.monotonic() + FIRST_HINTS * env.hints_interval
        self._url = f"{env.scheduler_url}/jobs/{env.job_id}" if env.scheduler_url else None
        # A scheduler shows progress itself.
        self._display = ProgressDisplay() if env.progress and self._url is None else None
        self._listeners: list[StepListener] = [self._display] if self._display else []
        self._losses = LossWatch()
        self._fault = ""
        self._hints_of: Callable[[], SchedHints | None] = lambda: None
        if env.tensorboard_dir is not None:
            # Whoever is rank 0 opens it: that changes when the first replica leaves.
            self._listeners.append(ScalarWriter(env.tensorboard_dir))
        ctx.closers.append(self.close)

    def listen(self, listener: StepListener) -> None:
        """Hand points to one more listener."""
        with self._lock:
            self._listeners.append(listener)

    def send_hints_of(self, fit: Callable[[], SchedHints | None]) -> None:
        """Send what this gives, every hints interval.

        Args:
            fit: Called by the reporting thread; None: there is nothing to be known yet.
        """
        self._hints_of = fit

    def note_loss(self, step: int, loss: float | None) -> None:
        """Look at the loss of every optimizer step, also of one whose point is not reported."""
        self._losses.note(step, loss)

    def add_point(self, when: float, make: Callable[[], StepRecord]) -> None:
        """Report an optimizer step; of steps in quick succession the latest is kept.

        Args:
            when: Seconds since 1970 at which it was done.
            make: Makes its point, which is only asked for if the point is reported.
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
        """Report the measured time line of a step; the latest is sent."""
        with self._lock:
            self._timeline = StageTimeline.model_construct(
                step=step,
                num_stages=num_stages,
                num_microbatches=num_microbatches,
                schedule=self._context.pipeline.schedule,
                events=[tuple(event) for event in events],
            )

    def pause_progress(self) -> None:
        """Pause the progress bar after a loop, so that no line of it follows the script's own."""
        if self._display is not None and not self._call(self._display, self._display.pause):
            self._display = None

    def finish_progress(self) -> None:
        """Show the last step when the epochs are over, before the script's later output."""
        with self._lock:
            if self._held is not None:
                self._queue(self._held())
            last = self._unshown[-1] if self._unshown else None
        display = self._display
        if display is not None and not self._call(display, display.finish, last):
            self._display = None

    def close(self) -> None:
        """Send what is left and end the thread."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join(timeout=3 * REQUEST_TIMEOUT)
        if self._thread.is_alive():
            LOG.warning("the reporting thread did not end within %.0f s", 3 * REQUEST_TIMEOUT)
        self._thread = None

    def _queue(self, point: StepRecord) -> None:
        """Queue a point for its receivers; the caller holds the lock."""
        self._last_point, self._held = point.time, None
        self._unshown.append(point)
        if self._url is not None:
            self._points.append(point)

    def _ensure_running(self) -> None:
        if self._thread is None and self._context.env.leads and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="pipollux-reporter", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with supervisor_client(self._context.env, timeout=REQUEST_TIMEOUT) as client:
            # The first point goes out at once: the scheduler waits to see the job train.
            while not self._stop.is_set():
                self._safely(self._turn, client)
                self._stop.wait(REPORT_INTERVAL)
            self._safely(self._last_turn, client)

    def _safely(self, turn: Callable[[httpx.Client], None], client: httpx.Client) -> None:
        """Run a turn; log an error once and keep the thread alive."""
        try:
            turn(client)
        except Exception as error:  # a thread that ends silently takes all reports with it
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
        # Each by itself: hints that fail must not take the last report with them.
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
        """Call a listener; drop one that fails, so that reports continue."""
        try:
            method(*arguments)
        except Exception:  # a full disk, a closed terminal: whatever it is, training goes on
            LOG.exception("%s failed and is switched off", type(listener).__name__)
            with self._lock:
                self._listeners = [x for x in self._listeners if x is not listener]
            return False
        return True

    def _fit(self) -> None:
        try:
            hints = self._hints_of()
        except (ValueError, ArithmeticError):
            # A fit that fails costs a better batch size, not the training.
            LOG.exception("the performance model could not be fitted")
            return
        if hints is not None:
            self._hints = hints.model_dump(mode="json", by_alias=True)

    def _send_hints(self, client: httpx.Client) -> None:
        """Send the latest hints, if the scheduler does not have them yet."""
        if self._hints is None or time.monotonic() < self._retry_at:
            return
        attempt = self._context.env.attempt
        if self._send(client, "PUT", "hints", self._hints, attempt=attempt):
            self._hints = None

    def _send_report(self, client: httpx.Client) -> None:
        with self._lock:
            points, timeline = list(self._points), self._timeline
        if not points or time.monotonic() < max(self._retry_at, self._next_report):
            return
        body = self._body(_thinned(points, self._pace), timeline)
        if self._send(client, "POST", "reports", body, take=self._take_pace):
            with self._lock:
                # Meanwhile the oldest may have made room for new ones.
                while self._points and self._points[0].step <= points[-1].step:
                    self._points.popleft()
                if self._timeline is timeline:
                    self._timeline = None

    def _take_pace(self, answer: httpx.Response) -> None:
        """Note how soon the scheduler wants the next report."""
        try:
            wanted = ReportAnswer.model_validate_json(answer.content).again
        except ValueError:  # an earlier version has no such wish
            wanted = REPORT_INTERVAL
        self._pace = min(wanted, MAX_BACKOFF) if wanted > REPORT_INTERVAL else REPORT_INTERVAL
        # The next turn is one interval away in any case.
        self._next_report = time.monotonic() + self._pace - REPORT_INTERVAL

    def _body(self, points: list[StepRecord], timeline: StageTimeline | None) -> dict[str, Any]:
        return TrainingReport.model_construct(
            attempt=self._context.env.attempt,
            num_epochs=points[-1].num_epochs,
            points=[point.point() for point in points],
            timeline=timeline,
        ).to_json_object()

    def _keep_unsent(self) -> None:
        """Leave on the disk what nobody has taken: the end of a job must not be lost."""
        with self._lock:
            points, timeline = list(self._points), self._timeline
        if points:
            unsent_report.keep(self._context.env.checkpoint_dir, self._body(points, timeline))

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
        """Send a request; return whether it is done with, accepted or refused for good."""
        if self._url is None:
            return True
        try:
            response = client.request(method, f"{self._url}/{what}", json=body, params=query)
            later = retry_after(response)
            if later is not None:  # no fault: it has more to do than it can at the moment
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
            # What JSON cannot say would stand in the way of all that comes after it.
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

    def _back_off(self, what: str, error: httpx.HTTPError) -> None:
        self._retry_at = time.monotonic() + self._backoff
        self._senders.rotate()  # one that always fails must not keep the other from being tried
        LOG.warning(
            "%s to %s failed: %s; training goes on, the next attempt is in %.0f s",
            what,
            self._url,
            error,
            self._backoff,
        )
        self._backoff = min(2 * self._backoff, MAX_BACKOFF)


def _thinned(points: list[StepRecord], pace: float) -> list[StepRecord]:
    """Return as many points as are sent in `REPORT_INTERVAL`, of one of `pace` seconds: the last is
    among them.
    """
    if pace <= REPORT_INTERVAL:
        return points
    gap, kept = pace / (POINTS_PER_SECOND * REPORT_INTERVAL), points[-1:]
    for point in reversed(points[:-1]):
        if kept[-1].time - point.time >= gap:
            kept.append(point)
    return kept[::-1]
