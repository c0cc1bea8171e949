"""The boundary between two iterations, where the replicas agree on what happens next.

At the start of an iteration every replica announces its position and its requests; at its end it
reads the sum over all. So stopping, saving and changing the configuration happen on every replica
at the same boundary, and the exchange is part of the iteration's backward.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from pipollux_hybrid.checkpoint.manager import (
    CheckpointManager,
    save_all_states,
    shared_failure,
    write_stop_marker,
)
from pipollux_hybrid.errors import CheckpointError, PeerLostError
from pipollux_hybrid.job import signals
from pipollux_hybrid.job.context import JobContext, current
from pipollux_hybrid.job.control_plane import ControlMessage
from pipollux_hybrid.job.stop_notice import tell_stop
from pipollux_hybrid.push_pull.component import learner_of
from pipollux_hybrid.resize.elastic_membership import elastic_membership
from pipollux_hybrid.telemetry.metrics import Metrics
from pipollux_protocol.exit_statuses import CHECKPOINT_LOST


class IterationEnd(enum.Enum):
    """The outcome of an iteration."""

    DONE = "all replicas have done it"
    REGROUPED = "it is done, and some replicas were lost"
    VOID = "some replicas were lost, and it is to be done again"


class StepBoundary:
    """The actions between two iterations of a loop."""

    def __init__(self, ctx: JobContext) -> None:
        self._context = ctx
        self._metrics = ctx.component(Metrics)
        self._membership = elastic_membership(ctx)
        self._agreed: ControlMessage | None = None

    def announce(self, place: str, *, adapts: bool) -> None:
        """Announce the beginning of an iteration. Replicas with different values of ``place`` are
        detected at its end; ``adapts`` is whether the loop can change its batch size.
        """
        message = self._message(adapts=adapts)
        if self._membership is not None:
            message = self._membership.announce(message)
        self._context.control.launch(message, place)

    def end_iteration(self) -> IterationEnd:
        """Read the agreed message; if replicas were lost, continue with the surviving ones. Raises
        a SynchronizationError if a replica is elsewhere, or is gone and the others cannot continue.
        """
        losses = self._context.control.losses
        if not losses.void:
            try:
                self._agreed = self._context.control.collect()
            except PeerLostError as error:
                if not losses.note(error, voids=True):
                    raise
        if losses.error is None:
            return IterationEnd.DONE
        assert self._membership is not None  # noqa: S101  # else it was not noted
        void = losses.void
        recovered = self._membership.recovery.recover()
        if void and not recovered.behind:
            return IterationEnd.VOID
        agreed = recovered.last if void else self._agreed
        if agreed is not None:  # the other fields depend on the lost replicas
            self._agreed = ControlMessage(stop=agreed.stop)
        return IterationEnd.REGROUPED

    def settle(self) -> ControlMessage | None:
        """Stop or save at the end of an iteration if that was agreed on; return the agreed message,
        None right after a `break`.

        Raises:
            SystemExit: A stop was agreed on, and everything is saved.
            SynchronizationError: A replica is gone, or elsewhere in its training loop.
        """
        agreed, self._agreed = self._agreed, None
        agreed = self._collect() if agreed is None else agreed
        self._follow(agreed)
        return agreed

    def begin_loop(self, place: str, message: Callable[[], ControlMessage]) -> ControlMessage:
        """Begin a loop over data, and return the agreed message. ``place`` describes the loop and
        must be equal on all replicas.

        Raises:
            SystemExit: A stop was agreed on in the iteration that was left by ``break``.
            SynchronizationError: A replica is gone, or begins another loop.
        """
        if self._context.control.under_way:
            self.settle()  # after a `break`
        return self._exchange(message, place, repeats=True)

    def begin_epochs(self) -> None:
        """Begin or resume a loop over epochs: stop now, with a SystemExit, if a stop was requested
        meanwhile. Nothing is saved: objects that the interrupted epoch had created before the last
        stop do not exist again yet.
        """
        self._metrics.record_agreed(self._collect())  # after a `break`
        place = "the beginning of a loop over epochs"
        if self._exchange(lambda: ControlMessage(stop=signals.stop_requested()), place).stop:
            self._leave(None)

    def begin_epoch(self, epoch: int) -> None:
        """Stop, with a SystemExit, or save between two epochs, if that is due."""
        control = self._context.control
        if control.under_way:
            self.settle()  # after a `break`
        place = f"the beginning of epoch {epoch}"
        message = self._message(adapts=False)
        self._follow(self._exchange(lambda: message, place))

    def end_epochs(self) -> None:
        """Complete pending exchanges at the end of a loop over epochs."""
        losses, behind = self._context.control.losses, False
        while not behind:
            try:
                self._metrics.flush()
                break
            except PeerLostError as error:
                if self._membership is None or not losses.note(error, voids=False):
                    raise
            behind = self._membership.recovery.recover().behind

    def _collect(self) -> ControlMessage | None:
        """Return the agreed message of an iteration that was left by `break`."""
        losses = self._context.control.losses
        if losses.void and losses.error is not None:
            raise losses.error  # the loop cannot be entered again
        return self._context.control.collect()

    def _exchange(
        self, message: Callable[[], ControlMessage], place: str, *, repeats: bool = False
    ) -> ControlMessage:
        """Exchange a message between two iterations; after a loss, with the surviving replicas.
        ``repeats``: replicas that had received the message repeat the exchange, too.
        """
        control = self._context.control
        while True:
            try:
                return control.exchange(message(), place)
            except PeerLostError as error:
                if self._membership is None or not control.losses.note(error, voids=False):
                    raise
            recovered = self._membership.recovery.recover()
            if recovered.behind and recovered.last is not None and not repeats:
                return ControlMessage(stop=recovered.last.stop)  # see end_iteration

    def _message(self, *, adapts: bool) -> ControlMessage:
        metrics = self._metrics
        leads = self._context.env.leads
        loss_sum, loss_samples = metrics.take_loss()
        proposal = metrics.take_proposal() if leads and adapts else (0, 0, 0)
        atomic_bsz, accum_steps, num_microbatches = proposal
        return ControlMessage(
            stop=signals.stop_requested(),
            save=leads and metrics.checkpoint_due(),
            atomic_bsz=atomic_bsz,
            accum_steps=accum_steps,
            num_microbatches=num_microbatches,
            loss_sum=loss_sum,
            loss_samples=loss_samples,
        )

    def _follow(self, agreed: ControlMessage | None) -> None:
        self._metrics.record_agreed(agreed)
        if agreed is not None and agreed.stop:
            self._stop()
        if agreed is not None and agreed.save:
            self._save_periodically()

    def _stop(self) -> None:
        self._metrics.flush()
        learner = learner_of(self._context)
        if learner is not None:
            learner.leave()
        try:
            save_all_states()
        except CheckpointError as error:
            self._leave(error)
        self._leave(None)

    def _leave(self, failure: CheckpointError | None) -> NoReturn:
        """Exit together, all with one status; without the marker if nothing could be saved."""
        ctx = self._context
        if failure is None:
            failure = _mark(ctx)
        failure = shared_failure(ctx, failure)
        if failure is None and ctx.env.checkpoint_dir is not None:
            tell_stop(ctx.env, ctx.step or 0)
        self._metrics.finish_progress()
        ctx.control.barrier()
        if ctx.env.leads:
            print(f"pipollux: {_farewell(ctx, failure)}", file=sys.stderr, flush=True)
        sys.exit(signals.exit_code() if failure is None else CHECKPOINT_LOST)

    def _save_periodically(self) -> None:
        self._metrics.interrupt_steps()
        try:
            with self._context.control.losses.noting():
                save_all_states(background=self._context.env.checkpoint_background)
        except CheckpointError as error:
            # Training continues; the next attempt follows after the usual interval.
            print(f"pipollux: {error}", file=sys.stderr)


def acknowledge(number: int) -> None:
    """Handle a signal outside of loops over loaders, where no step boundary may follow soon.

    Called in the signal's handler, in the middle of any code of the script. A job of one replica
    without unsaved training exits at once with a SystemExit. Else the script may be changing state
    to be saved, or other replicas have to agree: the job stops at the next boundary.
    """
    ctx = current()
    if ctx is None or ctx.batch.loop is not None:
        return
    name = signal.Signals(number).name
    if ctx.env.world_size == 1 and ctx.step == ctx.component(CheckpointManager).saved_step:
        failure = _mark(ctx)
        _say(f"{_farewell(ctx, failure)} ({name} outside of a loop; nothing was left to save)")
        sys.exit(signals.exit_code() if failure is None else CHECKPOINT_LOST)
    _say(
        f"{name} outside of a loop over a loader: the job stops before the next epoch or after the "
        "next step, whichever comes first, or runs to its end if there is none"
    )


def _mark(ctx: JobContext) -> CheckpointError | None:
    try:
        write_stop_marker(ctx.step or 0)
    except CheckpointError as error:
        return error
    return None


def _farewell(ctx: JobContext, failure: CheckpointError | None) -> str:
    text = f"stopped at step {ctx.step or 0} as asked"
    if failure is not None:
        return f"{text}, without a checkpoint of it: {failure}"
    return (
        text if ctx.env.checkpoint_dir else f"{text}; set PIPOLLUX_CHECKPOINT_DIR to resume later"
    )


def _say(sentence: str) -> None:
    """Print from a signal handler, which may have interrupted another print."""
    with suppress(OSError):
        os.write(2, f"pipollux: {sentence}\n".encode())
