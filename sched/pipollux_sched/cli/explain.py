"""`pipollux explain`: a job's allocation explained in words."""

from __future__ import annotations

from pipollux_sched.store import StateDir, Store

from .console import TextFormat, print_data, print_result
from .failure import one_sentence
from .options import JobName, StateDirectory, TextOutput


def explain(
    name: JobName, output: TextOutput = TextFormat.text, state_dir: StateDirectory = None
) -> None:
    """Explain a job's allocation, or why it is queued.

    Tells the last decision on it, what one replica more or fewer would be
    worth by the model that the job has sent (its hints), and what limits it.
    Speedups are over one replica.

    Works without a running scheduler too: then it explains how the last one
    left the job.
    """
    from pipollux_sched.planning.account import account_object, find_standing

    from .job_account import account_text

    with one_sentence(), Store(StateDir.choose(state_dir).store) as store:
        job = store.job(name)
        found = find_standing(store, job)
        decisions = store.latest_events(1, job=name, types=["allocated"])
    decision = decisions[-1] if decisions else None
    if output is TextFormat.text:
        print_result(account_text(job, found, decision))
    else:
        print_data(account_object(job, found, decision), output)
