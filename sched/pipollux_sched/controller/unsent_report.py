"""The last report of an attempt that ended while no scheduler could receive it.

The replica writes it on its machine, and its agent passes it on (`backend.result`). Once the
attempt has ended, the part that the store does not have yet is added.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipollux_protocol.messages import TrainingReport
from pipollux_sched.store import StaleAttemptError, Store

from .training_report import stored_points, stored_timeline

__all__ = ["take_unsent_report"]

_LOG = logging.getLogger(__name__)


def take_unsent_report(store: Store, body: Mapping[str, Any], job: str, attempt: int) -> None:
    """Store the unsent, unvalidated report of an attempt that has ended; idempotent."""
    try:
        report = TrainingReport.model_validate(body)
    except ValidationError as error:
        _LOG.warning("the last report of job %s is ignored: %s", job, error)
        return
    known = _last_step(store, job, attempt)
    points = [point for point in stored_points(report) if point.step > known]
    if report.attempt != attempt or not points:
        return
    try:
        store.add_report(job, attempt, points, stored_timeline(report))
    except StaleAttemptError:
        return  # the job has restarted meanwhile, and sends reports again


def _last_step(store: Store, job: str, attempt: int) -> int:
    """Return the last stored step of an attempt; -1 if there is none."""
    for event in store.latest_events(1, job=job, types=["progress"]):
        if event["attempt"] == attempt:
            return int(event["step"])
    return -1
