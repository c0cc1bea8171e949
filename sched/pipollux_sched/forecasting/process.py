"""The scheduler's side of the process that makes forecasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from pipollux_sched.errors import SchedulerError
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import StoredForecast

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_END_TIMEOUT = 5.0


class ForecastError(SchedulerError):
    """There is no forecast; the message says why."""


class Forecasts(NamedTuple):
    """Forecasts by job, and what they cost."""

    by_job: Mapping[str, StoredForecast]
    cpu_seconds: float


class ForecastProcess:
    """A process that makes forecasts of a store; started with the first request.

    It is a process of its own so that simulations take no turn from the scheduler's threads.

    Args:
        store: the file or URL of the store.
    """

    def __init__(self, store: Path | str) -> None:
        self._store = store
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def ask(self, new: Sequence[JobSpec] = ()) -> Forecasts:
        """Return the forecasts of all jobs, as if `new` ones were submitted now.

        `ForecastError`: there are none, or the process has ended.
        """
        process = self._running()
        jobs = [spec.model_dump(mode="json") for spec in new]
        request = {"store": str(self._store), "jobs": jobs}
        try:
            assert process.stdin is not None  # noqa: S101  # both are pipes
            assert process.stdout is not None  # noqa: S101  # it has a pipe
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        if not line:
            self._end()
            raise ForecastError("the process that makes forecasts has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ForecastError(answer["error"])
        found = {name: StoredForecast(*values) for name, values in answer["forecasts"].items()}
        return Forecasts(found, float(answer["cpu_seconds"]))

    def close(self) -> None:
        """End the process, also in the middle of a request of another thread."""
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._closed:
            raise ForecastError("the scheduler is stopping")
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipollux_sched.forecasting.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **_ONE_THREAD},
                # Ctrl-C ends the scheduler, which ends this process.
                start_new_session=True,
            )
        process = self._process
        if self._closed:  # by another thread meanwhile
            self._end()
            raise ForecastError("the scheduler is stopping")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_END_TIMEOUT)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
