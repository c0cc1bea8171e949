"""The boundary between two iterations, where the replicas agree on what happens next.

At the start of an iteration every replica announces where it is and what it was asked to do; at the
iteration's end it reads what all announced. So stopping, saving and changing the configuration
happen on every replica at the same boundary, and the exchange is part of the iteration's backward.
"""

from __future__ import annotations

import sys

from . import interrupt
from .checkpoint import save_all_states, write_stop_marker
from .context import JobContext
from .control import ControlMessage
from .errors import CheckpointError

__all__ = ["StepBoundary"]


class StepBoundary:
    """What happens between two iterations of a loop.

    Args:
        ctx: The job's context.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx

    def announce(self, place: str, *, adapts: bool) -> None:
        """An iteration begins.

        Args:
            place: Where this replica is; replicas that are elsewhere are found out at the end of
                the iteration.
            adapts: Whether the loop can change its batch size.
        """
        ctx = self._context
        # After a `break` the message of the iteration that was left is still under way.
        if not ctx.control.under_way:
            ctx.control.launch(self._message(adapts=adapts), place)

    def settle(self) -> ControlMessage | None:
        """An iteration ended: stop or save if that was agreed on.

        Returns:
            What was agreed on; None right after a `break`.

        Raises:
            SystemExit: A stop was agreed on, and everything is saved.
            SynchronizationError: A replica is gone, or elsewhere in its training loop.
        """
        agreed = self._context.control.collect()
        self._context.metrics.record_agreed(agreed)
        if agreed is not None and agreed.stop:
            self._stop()
        if agreed is not None and agreed.save:
            self._save_periodically()
        return agreed

    def _message(self, *, adapts: bool) -> ControlMessage:
        metrics = self._context.metrics
        leads = self._context.env.rank == 0
        loss_sum, loss_samples = metrics.take_loss()
        proposal = metrics.take_proposal() if leads and adapts else (0, 0, 0)
        atomic_bsz, accum_steps, num_microbatches = proposal
        return ControlMessage(
            stop=interrupt.stop_requested(),
            save=leads and metrics.checkpoint_due(),
            atomic_bsz=atomic_bsz,
            accum_steps=accum_steps,
            num_microbatches=num_microbatches,
            loss_sum=loss_sum,
            loss_samples=loss_samples,
        )

    def _stop(self) -> None:
        """Save once and leave, all replicas at this very step."""
        ctx = self._context
        ctx.metrics.flush()
        save_all_states()
        write_stop_marker(ctx.metrics.step)
        ctx.control.barrier()
        if ctx.env.rank == 0:
            hint = "" if ctx.env.checkpoint_dir else "; set PIPOLLUX_CHECKPOINT_DIR to go on later"
            print(f"pipollux: stopped at step {ctx.metrics.step} as asked{hint}", file=sys.stderr)
        sys.exit(interrupt.exit_code())

    def _save_periodically(self) -> None:
        self._context.metrics.interrupt_steps()
        try:
            save_all_states(background=self._context.env.checkpoint_background)
        except CheckpointError as error:
            # Training goes on; the next one is tried after the same interval.
            print(f"pipollux: {error}", file=sys.stderr)
