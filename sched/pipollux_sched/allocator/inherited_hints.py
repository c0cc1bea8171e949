"""Inherited hints of jobs that have sent none yet, so that they may start larger than minimal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_sched.store import Predecessor, Store

_LOG = logging.getLogger(__name__)
_ITS_OWN = ("remaining_samples", "trained_samples", "global_batch_size")
"""Fields that are valid only for the job that sent them."""


class WarmStart(NamedTuple):
    """The inherited hints of a job that has measured nothing."""

    predecessor: str
    hints: SchedHints


class HeirReader:
    """Reads inherited hints; parses only those that have changed since the last call.

    Gradients get noisier in training, so that more replicas are worth their slots. Jobs are planned
    with those with which their predecessor began, until they send their own: with its latest ones
    they would start too large.

    Args:
        store: of the scheduler.
        latest: whether the gradients are the latest ones, which tell how a job goes on.
    """

    def __init__(self, store: Store, *, latest: bool = False) -> None:
        self._store = store
        self._latest = latest
        self._parsed: dict[str, tuple[Mapping[str, Any], WarmStart | None]] = {}

    def read(self, specs: Mapping[str, Mapping[str, Any]]) -> dict[str, WarmStart]:
        """Return the inherited hints of the jobs, given by their specs, that have a predecessor."""
        found = self._store.families.predecessors(specs) if specs else {}
        for gone in self._parsed.keys() - {before.job for before in found.values()}:
            del self._parsed[gone]
        warm_starts = {name: self._parse(before) for name, before in found.items()}
        return {
            name: warm_start for name, warm_start in warm_starts.items() if warm_start is not None
        }

    def _parse(self, before: Predecessor) -> WarmStart | None:
        known = self._parsed.get(before.job)
        if known is None or known[0] is not before.hints:
            inherited = _heir(before, latest=self._latest)
            known = self._parsed[before.job] = (before.hints, inherited)
        return known[1]


def without_rows(hints: SchedHints) -> SchedHints:
    """Return hints without the profile rows that are only passed on to heirs."""
    return hints.model_copy(update={"step_profile": None}) if hints.step_profile else hints


def _heir(before: Predecessor, *, latest: bool) -> WarmStart | None:
    told = dict(before.hints)
    if before.first_gradients and not latest:
        told["gradParams"] = before.first_gradients
    try:
        hints = SchedHints.from_json_object(told)
    except HintsError as error:
        _LOG.warning("nothing is inherited from job %s: %s", before.job, error)
        return None
    if hints.goodput_function() is None:
        return None
    update: dict[str, Any] = dict.fromkeys(_ITS_OWN)
    rows = hints.step_profile
    if rows is not None:
        # Rows that are too old to be inherited do not raise the cap.
        most = min(hints.max_profiled_replicas, rows.max_replicas)
        update["max_profiled_replicas"] = most
    return WarmStart(before.job, without_rows(hints.model_copy(update=update)))
