"""Heartbeats of a replica to the scheduler, which never delay training.

Every replica has a thread for them (rank 0 has the `Reporter` besides). While the scheduler is away
the thread retries after 1 s, 2 s, 4 s, … up to the interval, so that a restarted scheduler receives
a heartbeat soon. An overloaded scheduler sends Retry-After. The last heartbeat reports the end of
the script: the replica's silence is not a loss from then on, however long other replicas run.

A replica that was cut off may live on after the scheduler has started others in its place. The
answer to its next heartbeat reports this, and it exits at once, before it writes to checkpoints
that are now theirs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pipollux_protocol.exit_statuses import REPLACED

from . import signals
from .env import JobEnvironment

if TYPE_CHECKING:
    import httpx

    from pipollux_protocol import messages

LOG = logging.getLogger(__name__)
REQUEST_TIMEOUT = 5.0
CLOSE_TIMEOUT = 1.0
"""Seconds that the end of the job waits for the last request before it is abandoned."""
GOODBYE_PATIENCE = 20.0
"""The same while the scheduler is away and another replica may still train."""
GOODBYE_PAUSE = 0.5
"""Seconds between two attempts at the last request."""
BUSY = 429
"""Lowest status of a refusal that is worth a retry: too many requests, a full store."""
FIRST_BACKOFF = 1.0
OVER = 409
"""Status if the attempt has ended, or another one has replaced it."""
REFUSED = (401, 403, 404)
"""Statuses that no retry changes: a wrong token, or no endpoint for heartbeats."""


class HeartbeatPayload(Protocol):
    """Additional content of heartbeats, and the receiver of the answers."""

    def told(self) -> messages.ElasticStatus:
        """Return the status to add to the next heartbeat."""

    def take(self, answer: messages.HeartbeatAnswer) -> float | None:
        """Process the answer; return the seconds until the next heartbeat, None for the default."""


class Heartbeat:
    """The thread that sends heartbeats."""

    def __init__(self, env: JobEnvironment, step: Callable[[], int | None]) -> None:
        self._env = env
        self._step = step
        self.rider: HeartbeatPayload | None = None
        self.network_level: int | None = None
        """Level of the network at which the job's nodes meet, by the last answer."""
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._url = f"{env.scheduler_url}/jobs/{env.job_id}/heartbeats"
        self._backoff = FIRST_BACKOFF
        self._away = False
        self._expected = False
        """Whether a scheduler has received a heartbeat, and so expects more."""
        self._says_goodbye = False
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="pipollux-heartbeat", daemon=True)

    @classmethod
    def start(
        cls,
        env: JobEnvironment,
        step: Callable[[], int | None],
        rider: HeartbeatPayload | None = None,
    ) -> Heartbeat | None:
        """Start, if a scheduler launched this replica and expects heartbeats."""
        wanted = env.heartbeat_interval > 0 and env.attempt > 0
        if not (wanted and env.scheduler_url and env.job_id):
            return None
        heartbeat = cls(env, step)
        heartbeat.rider = rider
        heartbeat._thread.start()
        return heartbeat

    @property
    def alive(self) -> bool:
        """Whether it sends heartbeats: it stops when the scheduler refuses them."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Send the next heartbeat now."""
        self._woken.set()

    def close(self, *, goodbye: bool = True) -> None:
        """End the thread; its last request reports the end of the script, unless the script failed.
        While the scheduler is away and another replica may still train, this waits for it up to a
        limit, as a restarted scheduler would take this replica's silence for a loss. Without
        ``goodbye`` there is no last request, as this process starts further heartbeats.
        """
        self._says_goodbye = goodbye and not _has_failed()
        waits = self._expected and self._env.num_replicas > 1 and not signals.stop_requested()
        patience = GOODBYE_PATIENCE if waits and self._says_goodbye else CLOSE_TIMEOUT
        self._deadline = time.monotonic() + patience
        self._stop.set()
        self._woken.set()
        self._thread.join(patience)

    def _run(self) -> None:
        # Importing httpx takes a third of a second, which does not delay the script here.
        import httpx

        from .supervisor_client import supervisor_client

        # A kept connection would mostly have been closed by the next heartbeat.
        limits = httpx.Limits(max_keepalive_connections=0)
        with supervisor_client(self._env, timeout=REQUEST_TIMEOUT, limits=limits) as client:
            while not self._stop.is_set():
                delay = self._beat(client)
                if delay is None:
                    return
                self._woken.wait(delay)
                if not self._stop.is_set():
                    self._woken.clear()
            if self._says_goodbye:
                self._say_goodbye(client)

    def _beat(self, client: httpx.Client) -> float | None:
        """Send a heartbeat; return the seconds until the next one, None if they are refused."""
        from .supervisor_client import retry_after

        interval = self._env.heartbeat_interval
        try:
            response = client.post(self._url, json=self._message().to_json_object())
            if response.status_code in REFUSED:
                self._give_up(response.status_code)
                return None
            if response.status_code == OVER and not self._stop.is_set():
                self._end(response.text)
                return None
            later = retry_after(response)
            if later is not None:  # overloaded, which is not a failure
                return min(later, interval)
            response.raise_for_status()
            answered = self._hand_on(response)
        except Exception as error:  # must not end the thread
            self._note_failure(error)
            delay = min(self._backoff, interval)
            self._backoff = min(2 * self._backoff, interval)
            return delay
        self._note_success()
        self._backoff, self._expected = FIRST_BACKOFF, True
        return interval if answered is None else min(answered, interval)

    def _hand_on(self, response: httpx.Response) -> float | None:
        if not response.content:
            return None
        from pipollux_protocol import messages

        answer = messages.HeartbeatAnswer.model_validate_json(response.content)
        self.network_level = answer.network_level
        return None if self.rider is None else self.rider.take(answer)

    def _say_goodbye(self, client: httpx.Client) -> None:
        body = self._message(finished=True).to_json_object()
        while (left := self._deadline - time.monotonic()) > 0.0:
            try:
                status = client.post(self._url, json=body, timeout=left).status_code
            except Exception as error:  # as above; the job has ended well all the same
                LOG.debug("the last heartbeat to %s failed: %s", self._url, error)
            else:
                if status < BUSY:
                    return
            time.sleep(min(GOODBYE_PAUSE, left))

    def _message(self, *, finished: bool = False) -> messages.Heartbeat:
        from pipollux_protocol import messages

        return messages.Heartbeat(
            attempt=self._env.attempt,
            replica=self._env.replica,
            step=self._step(),
            finished=finished,
            elastic=None if self.rider is None else self.rider.told(),
        )

    def _note_failure(self, error: Exception) -> None:
        """Log the first of several failures; hours of them would fill the log."""
        if not self._away:
            LOG.warning(
                "a heartbeat to %s failed: %s; training continues, retrying", self._url, error
            )
        self._away = True

    def _note_success(self) -> None:
        if self._away:
            LOG.warning("heartbeats to %s succeed again", self._url)
        self._away = False

    def _end(self, words: str) -> None:
        """Exit at once: this process must not save any more."""
        print(
            f"pipollux: attempt {self._env.attempt} of this job is over for the scheduler "
            f"({words.strip()[:300]}): this replica ends, and saves nothing",
            file=sys.stderr,
            flush=True,
        )
        os._exit(REPLACED)

    def _give_up(self, status: int) -> None:
        LOG.warning(
            "%s refuses this job's heartbeats (status %d): no more are sent, training continues; "
            "PIPOLLUX_TOKEN must be the token that the scheduler gave to this job",
            self._url,
            status,
        )


def _has_failed() -> bool:
    """Return whether an exception ends or has ended the script; a stop does not count."""
    errors = (sys.exception(), getattr(sys, "last_value", None))
    return any(error is not None and not isinstance(error, SystemExit) for error in errors)
