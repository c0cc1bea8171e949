"""Predictions as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from pipollux_perfmodel.modeling.arguments import spell_size
from pipollux_perfmodel.modeling.prediction import Answer
from pipollux_perfmodel.modeling.stage_model import Prediction
from pipollux_utils.text import DASH, rounded, seconds

from .console import output_console

BEST = "✓"
"""Marks the schedule with the most goodput of those that fit."""
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
    """Print predictions as a table on standard output."""
    headers = [*_ALWAYS, *(_IF_KNOWN if answer.efficiency_known else ()), "Speedup"]
    if answer.schedules_asked:
        headers.insert(1, "Schedule")
        headers += ["Memory", "Best"]
    table = Table(title="Predictions", title_justify="left", header_style="bold")
    for header in headers:
        table.add_column(header, justify="right")
    before = None
    for one in answer.predictions:
        if before not in (None, one.num_stages):
            table.add_section()
        before = one.num_stages
        cells = [*_place(one), *_worth(one, efficiency_known=answer.efficiency_known)]
        if answer.schedules_asked:
            cells.insert(1, _schedule(one))
            cells += [_memory(one), BEST if one.best else ""]
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
    if answer.schedules_asked:
        console.print(
            Text(
                f"{BEST}: the schedule with the most {basis} of those that fit, on as many stages "
                "and replicas. Memory: of the fullest device, known from --layers."
            )
        )
    for note in answer.notes:
        console.print(Text(note))


def _place(one: Prediction) -> tuple[str, ...]:
    stages = f"{one.num_stages}{'' if one.measured else '*'}"
    return stages, str(one.num_replicas), str(one.num_nodes), str(one.num_gpus)


def _schedule(one: Prediction) -> str:
    if one.num_stages == 1:
        return DASH
    chunks = f" of {one.chunks_per_stage}" if one.chunks_per_stage > 1 else ""
    return f"{one.schedule}{chunks}{'' if one.schedule_measured else '*'}"


def _memory(one: Prediction) -> str:
    return DASH if one.memory is None else spell_size(one.memory)


def _worth(one: Prediction, *, efficiency_known: bool) -> tuple[str, ...]:
    if one.step_time is None:
        return ("–",) * (9 if efficiency_known else 7)
    sizes = one.num_microbatches, one.atomic_bsz, one.accum_steps, one.batch_size
    known: tuple[str, ...] = ()
    if one.efficiency is not None and one.goodput is not None:
        known = f"{one.efficiency:.3f}", rounded(one.goodput)
    rates = seconds(one.step_time), rounded(one.throughput)
    return (*map(str, sizes), *rates, *known, f"{one.speedup:.2f}")
