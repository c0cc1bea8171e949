"""`pipollux describe`: all that is known of a job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipollux_sched.report.event_text import TELLING_TYPES
from pipollux_sched.store import StateDir, Store

from .console import TextFormat, print_data, print_result
from .failure import one_sentence
from .job_sections import job_sections
from .options import JobName, StateDirectory, TextOutput

NUM_EVENTS = 10
"""How many of the last events are told."""


def describe(
    name: JobName, output: TextOutput = TextFormat.text, state_dir: StateDirectory = None
) -> None:
    """Print all that is known of a job: spec, state, generations, progress, hints, events.

    Works without a running scheduler too: then it shows how the last one left
    the job.
    """
    directory = StateDir.choose(state_dir)
    with one_sentence(), Store(directory.store) as store:
        found = describe_job(store, name)
    if output is TextFormat.text:
        print_result(job_sections(found))
    else:
        print_data(found, output)


def describe_job(store: Store, name: str) -> dict[str, Any]:
    """Return all that is known of a job as plain data: `JobRecord.to_json_object` and more.

    Raises:
        UnknownJobError: there is no job of this name.
    """
    job = store.job(name)
    point = store.last_points().get(name)
    generations = [asdict(entry) for entry in store.generations(name)]
    return {
        **job.to_json_object(),
        "generations": [{**entry, "nodes": list(entry["nodes"])} for entry in generations],
        "progress": None if point is None else asdict(point),
        "hints": store.hints().get(name),
        "events": store.latest_events(NUM_EVENTS, job=name, types=TELLING_TYPES),
    }
