"""Simulations as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from pipollux_simulator.engine.metrics import SimulationMetrics
from pipollux_simulator.engine.outcome import SimulationOutcome
from pipollux_simulator.engine.team_metrics import measure_teams


class _Column(NamedTuple):
    header: str
    write: Callable[[SimulationMetrics], str]


_COLUMNS = (
    _Column("Average JCT", lambda row: _seconds(row.avg_jct_s)),
    _Column("Median JCT", lambda row: _seconds(row.median_jct_s)),
    _Column("p99 JCT", lambda row: _seconds(row.p99_jct_s)),
    _Column("Makespan", lambda row: _seconds(row.makespan_s)),
    _Column("Restarts per job", lambda row: f"{row.restarts_per_job:.1f}"),
    _Column("Elastic resizes per job", lambda row: f"{row.rescales_per_job:.1f}"),
    _Column("GPUs held", lambda row: f"{100 * row.gpu_utilization:.0f} %"),
    _Column("Fairness", lambda row: f"{row.finish_time_fairness:.2f}"),
    _Column("p99 fairness", lambda row: f"{row.finish_time_fairness_p99:.2f}"),
    _Column("Unfair to", lambda row: f"{100 * row.unfair_share:.0f} %"),
    _Column("Policy time", lambda row: f"{row.policy_seconds:.1f} s"),
)


_TOLD = {"exact": "exactly", "none": "not at all", "learned": "as estimated from completed jobs"}
_TOLD["declared"] = "as declared by jobs, else estimated from completed jobs"

HEADERS = ("Workload", "Policy", *(column.header for column in _COLUMNS))
"""Headers of `cells`."""


def cells(row: SimulationMetrics) -> tuple[str, ...]:
    """Return the cells of a row."""
    return row.workload, row.policy, *(column.write(row) for column in _COLUMNS)


def metrics_table(rows: Sequence[SimulationMetrics]) -> Table:
    """Return a table with a row per simulation.

    Example:
        >>> metrics_table([]).columns[2].header
        'Average JCT'
    """
    told = ", ".join(
        sorted(
            {
                _TOLD.get(row.known_length, f"wrong by a factor of up to {row.known_length}")
                for row in rows
            }
        )
    )
    title = f"Simulations; policies know job lengths: {told}" if rows else None
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, header in enumerate(HEADERS):
        table.add_column(header, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*map(Text, cells(row)))
    return table


def teams_table(outcomes: Sequence[SimulationOutcome]) -> Table | None:
    """Return a table with a row per team and simulation; None: there are no teams."""
    table = Table(title="Teams", title_justify="left", header_style="bold")
    for header in ("Workload", "Policy", "Team"):
        table.add_column(header)
    for header in ("Jobs", "Average JCT", "Slot-hours"):
        table.add_column(header, justify="right")
    for outcome in outcomes:
        for team in measure_teams(outcome):
            figures = str(team.jobs), _seconds(team.avg_jct_s), f"{team.slot_hours:.1f}"
            table.add_row(*map(Text, (outcome.workload, outcome.policy, team.team, *figures)))
    return table if table.row_count else None


def _seconds(value: float) -> str:
    return f"{value:.0f} s"
