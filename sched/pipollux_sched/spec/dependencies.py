"""Dependencies of a job: the jobs that it waits for, and how they have to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .names import Name

MOST_DEPENDENCIES = 1000


class Dependency(BaseModel):
    """A job that another one waits for."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    job: Name = Field(description="the name of a job")
    """The job to wait for."""
    when: Literal["succeeded", "failed", "ended"] = "succeeded"
    """How it has to end: complete, failed or cancelled, or either."""


def spelled_out(entries: Any) -> Any:
    """Return a list of dependencies in which the names of jobs are objects.

    Example:
        >>> spelled_out(["prepare", {"job": "train", "when": "ended"}])
        [{'job': 'prepare'}, {'job': 'train', 'when': 'ended'}]
    """
    if not isinstance(entries, list | tuple):
        return entries
    return [{"job": entry} if isinstance(entry, str) else entry for entry in entries]


def check_dependencies(entries: Sequence[Dependency]) -> Sequence[Dependency]:
    """Return dependencies; raise ValueError if there are too many, or a job is named twice."""
    if len(entries) > MOST_DEPENDENCIES:
        raise ValueError(
            f"has {len(entries)} entries; a job waits for at most {MOST_DEPENDENCIES} others"
        )
    names = [entry.job for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names '{twice}' twice; name each job once")
    return entries


def parse_dependency(text: str) -> Dependency:
    """Return the dependency in an option: ``NAME`` or ``NAME:WHEN``; ValueError: it is neither.

    Example:
        >>> parse_dependency("train:ended").when
        'ended'
    """
    name, colon, when = text.partition(":")
    return Dependency.model_validate({"job": name, "when": when} if colon else {"job": name})


def find_cycle(waits_for: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Return jobs that wait for each other in a circle, the first one also last; None: none do.

    Example:
        >>> find_cycle({"a": ["b"], "b": ["c"], "c": ["b"]})
        ['b', 'c', 'b']
    """
    done: set[str] = set()
    for first in waits_for:
        path: list[str] = []
        on_path: set[str] = set()
        todo = [(first, 0)]
        while todo:
            name, depth = todo.pop()
            on_path.difference_update(path[depth:])
            del path[depth:]
            if name in on_path:
                return [*path[path.index(name) :], name]
            if name in done:
                continue
            done.add(name)
            path.append(name)
            on_path.add(name)
            todo += [(other, depth + 1) for other in waits_for.get(name, ())]
    return None
