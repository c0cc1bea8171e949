"""Tables from the results of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write(results: dict[str, Any], folder: Path) -> None:
    """Write the long table."""
