"""Worker processes of loaders, which must outlive the wish to stop.

torchrun's agent and terminals signal a whole process group, so a stop that the replicas have yet to
agree on also reaches the processes that load data, and torch would have them die of it in the
middle of a step.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

__all__ = ["WorkerStart"]


class WorkerStart:
    """The first thing that a loader's worker process does.

    Args:
        then: The user's own ``worker_init_fn``, given the worker's number.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        """Have the first SIGTERM, and Ctrl-C, mean nothing here: the replica ends its workers."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _pass_over)
        if self._then is not None:
            self._then(worker_id)


def _pass_over(number: int, _frame: FrameType | None) -> None:
    # A second one comes from the replica, which ends a worker that does not answer.
    signal.signal(number, signal.SIG_DFL)
