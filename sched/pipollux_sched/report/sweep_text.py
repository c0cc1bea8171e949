"""The progress and the end of a sweep in a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from pipollux_protocol.environment import parameter_text
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import JobRecord, TrialRecord, TrialState
from pipollux_utils.text import count, first_line

_MOST_OF_WORDS = 200

TEAM_FULL = "; more wait, as its team has reached max_submit_jobs"
"""Part of the message of a sweep that could not start all trials which it may run."""

Counts = Mapping[TrialState, int]


def spell_progress(
    counts: Counts, best: TrialRecord | None, spec: SweepSpec, *, team_full: bool
) -> str:
    """Return how many trials of a sweep have ended and run, and the best one."""
    ended = sum(number for state, number in counts.items() if state.ended)
    runs = counts.get(TrialState.UNFINISHED, 0)
    trials = count(spec.num_trials, "trial")
    held = TEAM_FULL if team_full else ""
    return f"{ended} of {trials} ended, {runs} in progress{_with_best(best, spec)}{held}."


def spell_end(
    counts: Counts, best: TrialRecord | None, spec: SweepSpec, failed: JobRecord | None = None
) -> str:
    """Return how the trials of a sweep have ended, the best one, and why a `failed` one did."""
    parts = ", ".join(f"{counts[state]} {state}" for state in TrialState if counts.get(state))
    ended = f"All {spec.num_trials} trials have" if spec.num_trials > 1 else "The trial has"
    told, cause = _with_best(best, spec), "."
    if best is None and counts.get(TrialState.COMPLETE):
        told = f"; no trial has reported {spec.metric}"
    if failed is not None:
        cause = f"; {failed.name}: {_shortened(first_line(failed.state.message))}"
    return f"{ended} ended ({parts}){told}{cause}"


def _with_best(trial: TrialRecord | None, spec: SweepSpec) -> str:
    """Return the number, metric and parameters of the best trial in a few words."""
    if trial is None:
        return ""
    value = "" if trial.value is None else f"{spec.metric} {trial.value:.4g}, "
    said = " ".join(f"{name}={parameter_text(entry)}" for name, entry in trial.parameters.items())
    return f"; the best is trial {trial.number} with {value}{_shortened(said)}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_OF_WORDS else f"{text[: _MOST_OF_WORDS - 3]}..."
