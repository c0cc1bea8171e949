"""What a script tells about itself."""

from __future__ import annotations

from torch import Tensor

from .context import context

__all__ = ["report"]


def report(*, loss: Tensor | float) -> None:
    """Report the mean loss of the batch at hand.

    The replicas' losses are averaged by their samples once a step, and shown by the scheduler.

    Args:
        loss: The mean loss of this replica's batch; its graph is let go of at once.
    """
    context().metrics.note_loss(loss.detach() if isinstance(loss, Tensor) else float(loss))
