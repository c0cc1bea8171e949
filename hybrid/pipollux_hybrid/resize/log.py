"""What replicas that come and go say for whoever reads the log."""

from __future__ import annotations

import sys

__all__ = ["say"]


def say(sentence: str) -> None:
    """Print for whoever reads the log."""
    print(f"pipollux: {sentence}", file=sys.stderr, flush=True)
