"""Log lines of elastic resizes."""

from __future__ import annotations

import sys


def say(sentence: str) -> None:
    """Print a sentence to standard error."""
    print(f"pipollux: {sentence}", file=sys.stderr, flush=True)
