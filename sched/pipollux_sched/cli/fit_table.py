"""A fit as tables: its parameters, errors, assumptions and outliers."""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipollux_perfmodel import PerfParams
from pipollux_perfmodel.modeling.fitting import StageFit
from pipollux_perfmodel.modeling.params_file import FitSummary
from pipollux_utils.text import error_percent, seconds


class _Meaning(NamedTuple):
    unit: str
    text: str


_SECONDS = {
    "alpha_c": _Meaning("", "fixed time of a micro-batch in all stages"),
    "beta_c": _Meaning("/sample", "time of each sample of a micro-batch in all stages"),
    "alpha_n": _Meaning("", "synchronizing two replicas on several nodes"),
    "beta_n": _Meaning("/replica", "each replica beyond two, on several nodes"),
    "alpha_r": _Meaning("", "synchronizing two replicas on one node"),
    "beta_r": _Meaning("/replica", "each replica beyond two, on one node"),
}
_NUMBERS = {
    "gamma": "overlap of communication and compute: 1 none, 10 almost full",
    "overlap": "overlap of stages: 0 one after another, 1 an ideal pipeline",
    "gamma_c": "overlap of a micro-batch's fixed and per-sample time: 1 none",
    "contention": "slowdown per additional replica on the same node",
    "growth_n": "growth of the network time across nodes: 1 with R, 0 with log R",
    "two_node_penalty": "extra cost of two nodes, relative to more nodes",
}
_LISTS = {
    "forward_shares": "share of a micro-batch in each stage's forward",
    "backward_shares": "share of a micro-batch in each stage's backward",
}
_STAGES_ONLY = ("overlap", *_LISTS)
_NOT_TIMED = "stages were not timed; assumed equally slow"


def print_fit(console: Console, fit: StageFit) -> None:
    """Print the fit for one number of stages."""
    stages = "1 stage" if fit.num_stages == 1 else f"{fit.num_stages} stages"
    console.print(_parameters(fit, f"{stages}: parameters"))
    console.print(_errors(fit, f"{stages}: error of the fit"))
    if fit.report.outliers:
        console.print(_outliers(fit, f"{stages}: outliers"))
    console.print()


def print_rows(console: Console, summary: FitSummary) -> None:
    """Print how many rows were read, and how many were used."""
    fitted = sum(len(fit.rows) for fit in summary.fits)
    outliers = sum(len(fit.outliers) for fit in summary.fits)
    table = _table("Rows", "File", "Fitted", "Outliers", "Invalid, skipped")
    for column in table.columns[1:]:
        column.justify = "right"
    counts = fitted, outliers, summary.num_skipped
    table.add_row(Text(summary.source), *map(str, counts))
    console.print(table)


def _parameters(fit: StageFit, title: str) -> Table:
    table = _table(title, "Parameter", "Value", "Meaning", "Source")
    table.columns[1].justify = "right"
    reasons = {one.parameter: one.reason for one in fit.report.assumed}
    if not fit.timed:
        reasons |= dict.fromkeys(_LISTS, _NOT_TIMED)
    for name, value, text in _described(fit.perf_params):
        reason = f"assumed: {reasons[name]}" if name in reasons else "measured"
        style = "dim" if name in reasons else None
        table.add_row(*map(Text, (name, value, text, reason)), style=style)
    return table


def _described(params: PerfParams) -> list[tuple[str, str, str]]:
    rows = [
        (name, seconds(getattr(params, name)) + meaning.unit, meaning.text)
        for name, meaning in _SECONDS.items()
    ]
    rows += [(name, f"{getattr(params, name):.3g}", text) for name, text in _NUMBERS.items()]
    for name, text in _LISTS.items():
        rows.append((name, ", ".join(f"{share:.3f}" for share in getattr(params, name)), text))
    return [row for row in rows if row[0] not in _STAGES_ONLY or params.num_stages > 1]


def _errors(fit: StageFit, title: str) -> Table:
    table = _table(title, "Regime", "Rows", "Mean error", "Worst error")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in fit.report.regimes:
        name = one.name if one.name == "accumulation steps" else f"optimizer steps, {one.name}"
        cells = (
            name,
            str(one.num_measurements),
            error_percent(one.mean_error),
            error_percent(one.worst_error),
        )
        table.add_row(*map(Text, cells))
    return table


def _outliers(fit: StageFit, title: str) -> Table:
    headers = "Row", "Nodes", "Replicas", "Atomic batch size", "Micro-batches"
    table = _table(title, *headers, "Accumulation step", "Optimizer step")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in fit.outliers:
        one = row.measurement
        numbers = one.num_nodes, one.num_replicas, one.atomic_bsz, one.num_microbatches
        times = seconds(one.accum_step_time), seconds(one.optim_step_time)
        table.add_row(*map(Text, (row.place, *map(str, numbers), *times)))
    return table


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for header in headers:
        table.add_column(header)
    return table
