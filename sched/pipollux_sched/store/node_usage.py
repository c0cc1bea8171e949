"""Slot usage of nodes over time, in equal intervals of a span."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import accumulate

from sqlalchemy import ColumnElement, String, cast, false, func, or_, select
from sqlalchemy.orm import Session

from .records import AttemptRecord, attempt_record
from .tables import AttemptRow, JobRow


def usage(session: Session, begin: float, end: float, num_parts: int) -> dict[str, list[float]]:
    """Return the mean number of slots held on each used node, in `num_parts` equal intervals."""
    row = AttemptRow
    query = select(row.nodes, row.num_stages, row.created_at, row.ended_at)
    found: dict[str, _Usage] = {}
    for nodes, num_stages, created_at, ended_at in session.execute(
        query.where(_held_after(begin), row.created_at < end)
    ):
        for node in nodes:
            parts = found.setdefault(node, _Usage(begin, end, num_parts))
            parts.add(num_stages, created_at, end if ended_at is None else ended_at)
    return {node: parts.means() for node, parts in found.items()}


def attempts(
    session: Session, since: float, most: int, nodes: Collection[str] | None = None
) -> list[tuple[AttemptRecord, int]]:
    """Return the attempts that held slots after a time: see `Overview.attempts_since`."""
    row = AttemptRow
    query = select(row, JobRow.id).join(JobRow, JobRow.name == row.job).where(_held_after(since))
    if nodes is not None:
        query = query.where(or_(false(), *map(_lies_on, nodes)))
    rows = session.execute(query.order_by(row.id.desc()).limit(most)).all()
    return [(attempt_record(row), number) for row, number in reversed(rows)]


def oldest_attempt(session: Session) -> float | None:
    """Return the first start of an attempt of the running jobs; if none runs, of any job."""
    row = AttemptRow
    running = select(row.job).where(row.ended_at.is_(None))
    first = select(func.min(row.created_at))
    return session.scalar(first.where(row.job.in_(running))) or session.scalar(first)


def _held_after(moment: float) -> ColumnElement[bool]:
    ended = AttemptRow.ended_at
    return or_(ended.is_(None), ended > moment)


def _lies_on(node: str) -> ColumnElement[bool]:
    # The list has quoted names in JSON, so no other name contains this one.
    return cast(AttemptRow.nodes, String).contains(json.dumps(node), autoescape=True)


class _Usage:
    """Slot-seconds in equal intervals of a span; `add` takes constant time."""

    def __init__(self, begin: float, end: float, num_parts: int) -> None:
        self._begin, self._end = begin, end
        self._width = (end - begin) / num_parts
        self._partial = [0.0] * num_parts
        self._change = [0] * (num_parts + 1)
        """Increase of the slots held throughout an interval over the previous interval."""

    def add(self, slots: int, begin: float, end: float) -> None:
        begin, end = max(begin, self._begin), min(end, self._end)
        if begin >= end:
            return
        first, last = self._part_of(begin), self._part_of(end)
        if first == last:
            self._partial[first] += slots * (end - begin)
            return
        self._partial[first] += slots * (self._begin + (first + 1) * self._width - begin)
        self._partial[last] += slots * (end - self._begin - last * self._width)
        self._change[first + 1] += slots
        self._change[last] -= slots

    def means(self) -> list[float]:
        whole = accumulate(self._change[:-1])
        return [
            slots + seconds / self._width
            for slots, seconds in zip(whole, self._partial, strict=True)
        ]

    def _part_of(self, moment: float) -> int:
        return min(int((moment - self._begin) / self._width), len(self._partial) - 1)
