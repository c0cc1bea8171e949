"""`reference/job-file.md`, from the specifications of jobs, clusters and teams."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from pipollux_protocol.reference import table
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.spec.dependencies import Dependency
from pipollux_sched.spec.job import ExitCodesSpec, JobBatch, JobSpec, ResourceSpec
from pipollux_sched.spec.notify import NotifySpec
from pipollux_sched.spec.sweep import SearchRange, SweepSpec
from pipollux_sched.spec.teams import PrioritySpec, TeamSpec, TeamsSpec

from .fields import rows
from .notes import Notes

MODELS: dict[str, tuple[str, type[BaseModel]]] = {
    "JobBatch": ("Job file", JobBatch),
    "JobSpec": ("Jobs", JobSpec),
    "Dependency": ("Dependencies", Dependency),
    "NotifySpec": ("Notifications", NotifySpec),
    "SweepSpec": ("Sweeps", SweepSpec),
    "SearchRange": ("Search ranges", SearchRange),
    "ResourceSpec": ("Resources", ResourceSpec),
    "ExitCodesSpec": ("Exit codes", ExitCodesSpec),
    "ClusterSpec": ("Cluster file", ClusterSpec),
    "NodeSpec": ("Nodes", NodeSpec),
    "TeamsSpec": ("Team file", TeamsSpec),
    "TeamSpec": ("Teams", TeamSpec),
    "PrioritySpec": ("Priority classes", PrioritySpec),
}
"""By name: its heading on the page."""
FILES = ("JobBatch", "ClusterSpec", "TeamsSpec")


def anchor(model: str) -> str:
    """Return the anchor of a model on the page."""
    return MODELS[model][0].lower().replace(" ", "-")


def page() -> str:
    """Return the page, as Markdown."""
    notes = Notes("job-file")
    text = "\n".join(_lines(notes)) + "\n"
    notes.close()
    return text


def _lines(notes: Notes) -> Iterator[str]:
    yield "# Job, cluster and team files"
    yield ""
    yield "<!-- Generated from pipollux_sched.spec by `make reference`. -->"
    yield from notes.lines("introduction")
    for name, (heading, model) in MODELS.items():
        yield ""
        yield f"{'##' if name in FILES else '###'} {heading}"
        yield from notes.lines(heading)
        yield ""
        yield from (
            _linked(line) for line in table(("field", "type", "default", "meaning"), rows(model))
        )


def _linked(line: str) -> str:
    """Return a line whose links to models lead to their headings."""
    for name in MODELS:
        line = line.replace(f"[{name}](#{name.lower()})", f"[{name}](#{anchor(name)})")
    return line.replace("(#schedhints)", "(rest.md#schedhints)")
