"""Which GPU each slot of each node is.

A slot keeps its GPU, by UUID, when the driver lists the GPUs in another order, when others are
added or break, and when the scheduler starts again: the table is a file in the state directory.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pipollux_utils.atomic_write import PRIVATE, write_aside

FILE_NAME = "gpus.json"


def assign(
    saved: Mapping[str, Sequence[str]],
    wanted: Mapping[str, int],
    present: Sequence[str],
    barred: Collection[str] = (),
) -> dict[str, tuple[str, ...]]:
    """Return the GPU of each slot of each node.

    A saved GPU that is missing keeps its slot, unless a GPU without a slot takes its place. So a
    node may have more slots than wanted, of which no more than wanted have a GPU; it has fewer if
    there are too few GPUs.

    Args:
        saved: the earlier table.
        wanted: the number of slots by node; nodes take GPUs in this order.
        present: the GPUs that may be used, by UUID.
        barred: GPUs that are there and must not be used.

    Example:
        >>> assign({"a": ["GPU-2", "GPU-0"]}, {"a": 2, "b": 1}, ["GPU-0", "GPU-1"])
        {'a': ('GPU-1', 'GPU-0'), 'b': ()}
        >>> assign({"a": ["GPU-2", "GPU-0"]}, {"a": 2}, ["GPU-0"])
        {'a': ('GPU-2', 'GPU-0')}
    """
    there, taken = set(present), set(barred)
    rows: dict[str, list[str | None]] = {}
    for node, slots in wanted.items():
        row: list[str | None] = rows.setdefault(node, [])
        for uuid in saved.get(node, ()):
            if _filled(row, there) == slots:
                break
            row.append(None if uuid in taken else uuid)
            taken.add(uuid)
    spare = [uuid for uuid in dict.fromkeys(present) if uuid not in taken]
    for node, slots in wanted.items():
        row = rows[node]
        for place, kept in enumerate(row):
            if kept not in there and spare and _filled(row, there) < slots:
                row[place] = spare.pop(0)
        number = min(slots - _filled(row, there), len(spare))
        row += [spare.pop(0) for _ in range(max(number, 0))]
    return {node: tuple(uuid for uuid in row if uuid is not None) for node, row in rows.items()}


def _filled(row: Sequence[str | None], there: Collection[str]) -> int:
    return sum(uuid in there for uuid in row)


def load(file: Path) -> dict[str, list[str]]:
    """Return the saved table; empty if there is none, or none of this version."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["nodes"]
        return {str(node): [str(uuid) for uuid in row] for node, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save(file: Path, rows: Mapping[str, Sequence[str]]) -> None:
    """Write the table durably, or raise OSError."""
    write_aside(file, (json.dumps({"nodes": rows}, indent=1) + "\n").encode(), PRIVATE)
