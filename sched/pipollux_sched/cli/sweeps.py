"""`pipollux sweeps`: the sweeps of a scheduler, and the trials of one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from pipollux_protocol.environment import parameter_text
from pipollux_sched.store import TrialState
from pipollux_sched.views.models import SweepDetails, SweepView, TrialView
from pipollux_utils.text import DASH, clean, first_line, number, spell_age

from .completion import complete_sweeps
from .console import OutputFormat, print_data, print_result
from .jobs import STYLES_BY_WORD
from .options import StateDirectory, TableOutput
from .reader import reading, tell_unserved

_DIGITS = 5


def sweeps(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP",
            help="Sweep whose trials are listed.",
            show_default="all sweeps, without their trials",
            autocompletion=complete_sweeps,
        ),
    ] = None,
    output: TableOutput = OutputFormat.table,
    state_dir: StateDirectory = None,
) -> None:
    """List sweeps, or the trials of one with their parameters and metric.

    A sweep is a job: submit, cancel, suspend, resume, rerun and delete it as one.
    Without a running scheduler, sweeps shows the last recorded state.

        pipollux sweeps rates
    """
    with reading(state_dir) as reader:
        if name is None:
            found = reader.sweeps()
            tell_unserved(reader)
            if output is not OutputFormat.table:
                print_data([sweep.to_dict() for sweep in found], output)
            elif found:
                print_result(sweep_table(found), fold=False)
            else:
                typer.echo("No sweeps yet; submit a job with 'sweep' with: pipollux submit FILE")
            return
        sweep = reader.sweep(name)
        tell_unserved(reader)
    if output is not OutputFormat.table:
        print_data(sweep.to_dict(), output)
        return
    print_result(Text(clean(first_line(sweep.message))), fold=False)
    print_result(trial_table(sweep, sweep.trials), fold=False)


def sweep_table(sweeps: Sequence[SweepView], now: float | None = None) -> Table:
    """Return sweeps as a table, with ages relative to `now`."""
    now = time.time() if now is None else now
    heads = ("Sweep", "Phase", "Trials", "Ended", "In progress", "Metric", "Best", "Parameters")
    table = _table(*heads, "Age")
    for sweep in sweeps:
        states, best = sweep.trial_states, sweep.best
        ended = sum(many for state, many in states.items() if state.ended)
        table.add_row(
            clean(sweep.name),
            Text(sweep.phase.value, style=STYLES_BY_WORD.get(sweep.phase.value, "")),
            str(sweep.num_trials),
            str(ended),
            str(states[TrialState.UNFINISHED]),
            clean(sweep.metric),
            DASH if best is None else number(best.value, _DIGITS),
            DASH if best is None else spell_parameters(best.parameters),
            spell_age((sweep.ended_at or now) - sweep.submitted_at),
        )
    return table


def trial_table(sweep: SweepView, trials: Sequence[TrialView]) -> Table:
    """Return trials as a table, with a column for each parameter; the best one is bold."""
    names = list(trials[0].parameters) if trials else []
    table = _table("Trial", "Job", "State", *map(clean, names), clean(sweep.metric))
    best = None if sweep.best is None else sweep.best.number
    for trial in trials:
        running = trial.phase is not None and trial.state is TrialState.UNFINISHED
        state = trial.phase.value if running and trial.phase else trial.state.value.capitalize()
        table.add_row(
            str(trial.number),
            trial.job if trial.phase is not None else DASH,
            Text(state, style=STYLES_BY_WORD.get(state, "")),
            *(Text(clean(parameter_text(trial.parameters[name]))) for name in names),
            number(trial.value, _DIGITS),
            style="bold" if trial.number == best else "",
        )
    return table


def best_first(sweep: SweepDetails) -> list[TrialView]:
    """Return the trials with a value, the best one first."""
    known = [trial for trial in sweep.trials if trial.value is not None]
    sign = 1.0 if sweep.direction == "minimize" else -1.0
    return sorted(known, key=lambda trial: sign * (trial.value or 0.0))


def spell_parameters(parameters: Mapping[str, Any]) -> str:
    """Return parameters on one line."""
    return clean(" ".join(f"{name}={parameter_text(v)}" for name, v in parameters.items()))


def _table(*headers: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        table.add_column(header, no_wrap=True)
    return table
