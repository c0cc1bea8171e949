"""Predictions as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from pipollux_sched.modeling.prediction import Answer
from pipollux_sched.modeling.stage_model import Prediction
from pipollux_sched.utils.text import rounded, seconds

from .console import output_console

_ALWAYS = (
    "Stages",
    "Replicas",
    "Nodes",
    "GPUs",
    "Micro-batches",
    "Atomic batch size",
    "Accumulation steps",
    "Batch size",
    "Step time",
    "Samples/s",
)
_IF_KNOWN = ("Efficiency", "Goodput/s")


def print_answer(answer: Answer) -> None:
    """Print predictions for people, on standard output."""
    headers = (*_ALWAYS, *(_IF_KNOWN if answer.efficiency_known else ()), "Speedup")
    table = Table(title="Predictions", title_justify="left", header_style="bold")
    for header in headers:
        table.add_column(header, justify="right")
    before = None
    for one in answer.predictions:
        if before not in (None, one.num_stages):
            table.add_section()
        before = one.num_stages
        cells = (*_place(one), *_worth(one, efficiency_known=answer.efficiency_known))
        table.add_row(*map(Text, cells), style=None if one.feasible else "dim")
    console = output_console()
    console.print(table)
    basis = "goodput" if answer.efficiency_known else "throughput"
    console.print(
        Text(
            "Step time: accumulation steps and the optimizer step together. "
            f"Speedup: {basis} over that of one replica of the same stages."
        )
    )
    for note in answer.notes:
        console.print(Text(note))


def _place(one: Prediction) -> tuple[str, ...]:
    stages = f"{one.num_stages}{'' if one.measured else '*'}"
    return stages, str(one.num_replicas), str(one.num_nodes), str(one.num_gpus)


def _worth(one: Prediction, *, efficiency_known: bool) -> tuple[str, ...]:
    if one.step_time is None:
        return ("–",) * (9 if efficiency_known else 7)
    sizes = one.num_microbatches, one.atomic_bsz, one.accum_steps, one.batch_size
    known: tuple[str, ...] = ()
    if one.efficiency is not None and one.goodput is not None:
        known = f"{one.efficiency:.3f}", rounded(one.goodput)
    rates = seconds(one.step_time), rounded(one.throughput)
    return (*map(str, sizes), *rates, *known, f"{one.speedup:.2f}")
