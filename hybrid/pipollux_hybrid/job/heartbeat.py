"""Heartbeats of a replica to the scheduler, which never delay training.

Every replica has a thread of its own for this (rank 0 has the `Reporter` besides). Requests have a
timeout. When the scheduler is away the thread tries again after 1 s, 2 s, 4 s, … but never more
seldom than the interval, so that the next scheduler hears of the replica soon.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .env import JobEnvironment

if TYPE_CHECKING:
    pass

__all__ = ["Heartbeat"]

LOG = logging.getLogger(__name__)
REQUEST_TIMEOUT = 5.0
CLOSE_TIMEOUT = 1.0
"""Seconds that the end of the job waits for a request under way; then it is left behind."""
FIRST_BACKOFF = 1.0
REFUSED = (401, 403, 404)
"""Answers that no repetition changes: the token is not this job's, or nobody takes heartbeats."""


class Heartbeat:
    """The thread that sends heartbeats.

    Args:
        env: who this replica is, and whom to tell.
        step: tells the optimizer step; None before there is one.
    """

    def __init__(self, env: JobEnvironment, step: Callable[[], int | None]) -> None:
        self._env = env
        self._step = step
        self._stop = threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._run, name="pipollux-heartbeat", daemon=True)

    @classmethod
    def start(cls, env: JobEnvironment, step: Callable[[], int | None]) -> Heartbeat | None:
        """Start, if a scheduler launched this replica and expects heartbeats."""
        wanted = env.heartbeat_interval > 0 and env.generation > 0
        if not (wanted and env.supervisor_url and env.job_id):
            return None
        heartbeat = cls(env, step)
        heartbeat._thread.start()
        return heartbeat

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        import httpx  # a third of a second that the script need not wait for

        env = self._env
        url = f"{env.supervisor_url}/jobs/{env.job_id}/heartbeats"
        backoff = FIRST_BACKOFF
        with httpx.Client(
            timeout=REQUEST_TIMEOUT,
            headers={"Authorization": f"Bearer {env.token or ''}"},
            # A connection that is kept would mostly have been closed by the next time.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,  # loopback and cluster addresses are not for proxies
        ) as client:
            while not self._stop.is_set():
                delay = env.heartbeat_interval
                try:
                    response = client.post(url, json=self._body())
                    if response.status_code in REFUSED:
                        self._give_up(url, response.status_code)
                        return
                    response.raise_for_status()
                except Exception as error:  # whatever it is, the next one is sent
                    self._note_failure(url, error)
                    delay, backoff = min(backoff, delay), min(2 * backoff, delay)
                else:
                    self._note_success(url)
                    backoff = FIRST_BACKOFF
                self._stop.wait(delay)

    def _body(self) -> dict[str, int]:
        body = {"generation": self._env.generation, "replica": self._env.rank}
        step = self._step()
        return body if step is None else {**body, "step": step}

    def _note_failure(self, url: str, error: Exception) -> None:
        """Log once that requests fail; hours of it would fill the log."""
        if not self._away:
            LOG.warning("a heartbeat to %s failed: %s; training goes on, others follow", url, error)
        self._away = True

    def _note_success(self, url: str) -> None:
        if self._away:
            LOG.warning("heartbeats to %s arrive again", url)
        self._away = False

    def _give_up(self, url: str, status: int) -> None:
        LOG.warning(
            "%s refuses this job's heartbeats (status %d): no more are sent, training goes on; "
            "PIPOLLUX_TOKEN must be the token that the scheduler gave to this job",
            url,
            status,
        )
