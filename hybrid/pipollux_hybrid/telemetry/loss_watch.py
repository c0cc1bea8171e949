"""Report of a loss that is NaN or infinite, once; training continues."""

from __future__ import annotations

import math
import sys


class LossWatch:
    """Prints a line when the reported loss stops being finite, and one when it recovers."""

    def __init__(self) -> None:
        self._since: int | None = None

    def note(self, step: int, loss: float | None) -> None:
        """Check the loss of an optimizer step; None if the script reported none."""
        if loss is None or math.isfinite(loss) == (self._since is None):
            return
        if self._since is None:
            self._since = step
            value = "NaN" if math.isnan(loss) else "infinite"
            _say(f"loss is {value} since step {step}; it is reported as a gap, training goes on")
        else:
            _say(f"loss is finite again at step {step}; it was not since step {self._since}")
            self._since = None


def _say(sentence: str) -> None:
    print(f"pipollux: {sentence}", file=sys.stderr, flush=True)
