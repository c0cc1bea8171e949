"""What traces show."""

from __future__ import annotations

from typing import Any


def rows_of(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what is in each row, by its title."""
    titles = [x for x in trace["traceEvents"] if x["name"] == "thread_name"]
    return {
        title["args"]["name"]: [
            x for x in trace["traceEvents"] if x["ph"] == "X" and x["tid"] == title["tid"]
        ]
        for title in titles
    }
