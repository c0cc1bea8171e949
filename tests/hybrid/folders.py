"""What is in a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

from pipollux_hybrid.checkpoint.owner import OWNER


def saved_in(folder: Path) -> list[str]:
    """Return the names in a folder in their order, but for the record of its owner."""
    return sorted(path.name for path in folder.iterdir() if path.name != OWNER)
