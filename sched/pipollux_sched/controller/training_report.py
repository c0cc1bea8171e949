"""Training reports: conversion to the store's records, and reports that could not be sent.

The last report of an attempt that ended while no scheduler could receive it is written by the
replica on its machine, and its agent passes it on (`backend.result`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipollux_protocol.messages import TrainingReport
from pipollux_sched.store import MetricValue, Point, StaleAttemptError, Store, Timeline

_LOG = logging.getLogger(__name__)


def stored_points(report: TrainingReport) -> list[Point]:
    """Return the points of a report."""
    return [Point(**point.__dict__, num_epochs=report.num_epochs) for point in report.points]


def stored_timeline(report: TrainingReport) -> Timeline | None:
    """Return the timeline of a report, if it has one."""
    found = report.timeline
    return None if found is None else Timeline(**{**found.__dict__, "events": tuple(found.events)})


def stored_metrics(report: TrainingReport) -> list[MetricValue]:
    """Return the metrics of a report."""
    return [MetricValue(each.name, each.step, each.value) for each in report.metrics]


def take_unsent_report(store: Store, body: Mapping[str, Any], job: str, attempt: int) -> None:
    """Store the unsent, unvalidated report of an attempt that has ended; idempotent."""
    try:
        report = TrainingReport.model_validate(body)
    except ValidationError as error:
        _LOG.warning("the last report of job %s is ignored: %s", job, error)
        return
    known = _last_step(store, job, attempt)
    points = [point for point in stored_points(report) if point.step > known]
    metrics = stored_metrics(report)
    if report.attempt != attempt or not (points or metrics):
        return
    try:
        store.add_report(job, attempt, points, stored_timeline(report), metrics)
    except StaleAttemptError:
        return  # the job has restarted meanwhile, and sends reports again


def _last_step(store: Store, job: str, attempt: int) -> int:
    """Return the last stored step of an attempt; -1 if there is none."""
    for event in store.latest_events(1, job=job, types=["progress"]):
        if event["attempt"] == attempt:
            return int(event["step"])
    return -1
