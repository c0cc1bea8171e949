"""Tables for terminals, in one style; `plan` and the live view print `allocation_table`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from pipollux_utils.text import DASH, THIN_SPACE, amount, clean, placement


class AllocationLine(NamedTuple):
    """One job's line in a table of allocations; `previous_replicas` None for a new job."""

    job: str
    num_stages: int
    nodes: Sequence[str]
    batch_size: int | None
    speedup: float | None
    why: str
    previous_replicas: int | None = None


def allocation_table(rows: Iterable[AllocationLine], *, title: str | None = None) -> Table:
    """Return a table of allocations and their reasons, in the order of the rows.

    Example:
        >>> row = AllocationLine("char-lm", 2, ["a", "b"], 128, 1.7, "a node is free", 1)
        >>> allocation_table([row]).row_count
        1
    """
    table = open_table(title)
    table.add_column("job", style="bold", overflow="fold")
    for heading in ("stages", "replicas"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("nodes", overflow="fold")
    table.add_column("batch\nsize", justify="right", no_wrap=True)
    table.add_column("predicted\nspeedup", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    for row in rows:
        before = row.previous_replicas
        now = len(row.nodes)
        table.add_row(
            cell(row.job),
            cell(amount(row.num_stages)),
            cell(f"{now}" if before in (None, now) else f"{before} → {now}"),
            cell(placement(row.nodes)),
            cell(amount(row.batch_size)),
            cell(DASH if row.speedup is None else f"{row.speedup:.2f}×"),
            cell(row.why),
        )
    return table


def open_table(title: str | None) -> Table:
    """Return an empty table in the common style."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )


def plain_spaces(words: str) -> str:
    """Return text without narrow spaces, which terminal fonts seldom have.

    >>> plain_spaces("1\u202f391 in 4.2\u202fs")
    '1391 in 4.2 s'
    """
    return re.sub(rf"(?<=\d){THIN_SPACE}(?=\d)", "", words).replace(THIN_SPACE, " ")


def cell(words: str) -> Text:
    """Return text in which markup and control characters have no effect."""
    return Text(plain_spaces(clean(words)))
