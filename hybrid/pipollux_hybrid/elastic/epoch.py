"""Epochs that continue where the last attempt of the job stopped.

A restarted script runs its interrupted epoch from the beginning. Completed loops over data loaders
are skipped, and the interrupted one continues. Code between the loops runs again. Objects created
there (loaders, accumulators) are identified by the *phase* of their creation, the script's
beginning or an epoch, and their index in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

from pipollux_hybrid.checkpoint.manager import CheckpointManager, load_state, save_last_states
from pipollux_hybrid.checkpoint.state import State, States
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job import signals
from pipollux_hybrid.job.context import JobContext, context, from_scratch
from pipollux_hybrid.job.membership import JobPlace
from pipollux_hybrid.push_pull.component import learner_of
from pipollux_hybrid.resize.elastic_membership import elastic_membership
from pipollux_hybrid.telemetry.metrics import Metrics

from .step_boundary import StepBoundary

STATE_NAME = "epoch.json"


class EpochState(State):
    """The position of a job in its training loop."""

    takes_over = False

    def __init__(self) -> None:
        super().__init__(STATE_NAME)
        self.epoch = 0
        """The current epoch, counted from 0."""
        self.num_epochs: int | None = None
        self.loops_done = 0
        """Number of loops over data loaders that this epoch has completed."""
        self.loops_to_skip = 0
        """Number of these that were completed before the restart and are still to be skipped."""
        self.trainings = 0
        """Number of loops of the training in this epoch that are over on the servers of push and
        pull: others may be of one replica alone, as an evaluation on replica 0."""
        self.entered = False
        """Whether the script is in a loop over epochs now."""
        self.began = False
        """Whether it ever was, in this process."""

    def remember(self) -> Callable[[], None]:
        """No step changes the state."""
        return lambda: None

    def regrouped(self) -> None:
        """No replica has joined."""

    @property
    def phase(self) -> str:
        """The current phase of the script: its beginning, or an epoch."""
        return f"epoch{self.epoch}" if self.began else "start"

    def save(self, fileobj: BinaryIO) -> None:
        """Write epoch and completed loops as JSON."""
        fileobj.write(json.dumps({"epoch": self.epoch, "loops_done": self.loops_done}).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Read epoch and completed loops, which are skipped."""
        content = json.load(fileobj)
        self.epoch = int(content["epoch"])
        self.loops_done = self.loops_to_skip = int(content["loops_done"])

    def rejoined(self) -> None:
        """Stop skipping: a replica joins in the current loop of the others."""
        self.loops_to_skip = 0

    def advance(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.loops_done = self.loops_to_skip = self.trainings = 0

    def go_on_at(self, place: JobPlace) -> None:
        """Move forward to the position of the job that this replica is about to join."""
        if place.epoch > self.epoch:
            self.epoch, self.loops_done = place
            self.loops_to_skip = self.loops_done

    def skip_loop(self) -> bool:
        """Return whether the loop about to begin was completed before the restart."""
        if self.loops_to_skip > 0:
            self.loops_to_skip -= 1
            return True
        return False


def epoch_state(ctx: JobContext) -> EpochState:
    """Return the epoch state of a job, restored at its first use."""
    state = ctx.component(States).get(STATE_NAME)
    if state is None:
        state = EpochState()
        load_state(state)
        if ctx.joins is not None:
            state.epoch, state.loops_done = ctx.joins.place
            state.loops_to_skip = state.loops_done
    assert isinstance(state, EpochState)  # noqa: S101  # the name is this module's own
    return state


def have_ended(ctx: JobContext) -> bool:
    """Return whether the script has trained all epochs it wanted, without a stop."""
    state = ctx.component(States).get(STATE_NAME)
    if not isinstance(state, EpochState):
        return False
    return state.began and not state.entered and not signals.stop_requested()


def remaining_epochs_until(num_epochs: int) -> Iterator[int]:
    """Iterate over the remaining epochs, from the interrupted one on.

    Example::

        for epoch in remaining_epochs_until(30):
            for inputs, targets in loader:
                ...

    A final checkpoint is written after the last epoch, so a script that is started again has
    nothing left to do. If it cannot be written, the script runs to its end, and the process then
    exits with status 73.

    Args:
        num_epochs: Epochs of the whole training, restarts included. A later call with a larger
            number continues from there.

    Yields:
        The epoch, counted from 0. An epoch that is left with ``break`` counts as done.

    Raises:
        ConfigurationError: The number is negative, or the call is inside another loop over epochs.
    """
    if isinstance(num_epochs, bool) or not isinstance(num_epochs, int) or num_epochs < 0:
        raise ConfigurationError(
            f"num_epochs={num_epochs!r}: a whole number of at least 0 is needed"
        )
    ctx = context()
    state = epoch_state(ctx)
    if state.entered:
        raise ConfigurationError(
            f"remaining_epochs_until({num_epochs}) began inside another loop over epochs (epoch "
            f"{state.epoch} is under way): end that one first"
        )
    state.num_epochs = num_epochs
    trained = state.epoch < num_epochs
    if not trained:
        _say_finished(ctx, state, num_epochs)
    boundary, began = StepBoundary(ctx), False
    state.began = True
    _catch_up(ctx, state)
    while state.epoch < num_epochs:
        if not began:
            boundary.begin_epochs()
        else:
            boundary.begin_epoch(state.epoch)
        state.entered = began = True
        try:
            yield state.epoch
        finally:
            state.entered = False
            state.advance()
            _catch_up(ctx, state)
    if trained:
        boundary.end_epochs()
        ctx.component(Metrics).finish_progress()
        save_last_states()


def _catch_up(ctx: JobContext, state: EpochState) -> None:
    learner = learner_of(ctx)
    if learner is not None and learner.place is not None:
        # The servers' place is the job's, whichever checkpoint this replica has. They know which
        # loops of the training are over, and evaluations run again.
        state.epoch, learner.place = learner.place[0], None
        state.loops_done = state.loops_to_skip = state.trainings = 0
    membership = elastic_membership(ctx)
    place = membership.job_place() if membership is not None and ctx.joins is not None else None
    if place is not None:
        state.go_on_at(place)


def _say_finished(ctx: JobContext, state: EpochState, num_epochs: int) -> None:
    restored_from = ctx.component(CheckpointManager).restored_from
    if ctx.env.leads and not state.began and restored_from is not None and num_epochs > 0:
        done, asked = _epochs(state.epoch), _epochs(num_epochs)
        were = "was" if state.epoch == 1 else "were"
        print(
            f"pipollux: nothing is left to train: the script asks for {asked}, and {done} {were} "
            f"done before this run ({restored_from}); ask for more, or {from_scratch()}",
            file=sys.stderr,
            flush=True,
        )


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' if count > 1 else ''}"


def current_epoch() -> int | None:
    """Return the current epoch, from 0; None outside of :func:`remaining_epochs_until`."""
    state = epoch_state(context())
    return state.epoch if state.entered else None
