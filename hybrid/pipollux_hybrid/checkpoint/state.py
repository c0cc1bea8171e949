"""States that survive restarts: the interface of AdaptDL's ``State``."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import CheckpointError, ConfigurationError
from pipollux_hybrid.job.context import JobContext, context

from .remembering import REMEMBERED_BYTES
from .storage import MANIFEST, StateError


class States(dict[str, "State"]):
    """All states of a job's checkpoint, by name."""

    def __init__(self, ctx: JobContext) -> None:  # noqa: ARG002  # a component of the job's
        super().__init__()


class State:
    """A state that survives restarts.

    Subclasses define how to write and read it; :func:`~pipollux_hybrid.load_state` restores it
    after a restart. Checkpoints must not be able to run code, so never unpickle in ``load`` (use
    ``torch.load(..., weights_only=True)`` or JSON).

    Replicas that join a running job load the output of ``save`` on replica 0. A state with large
    tensors may also define ``content`` and ``adopt``: its tensors are then sent directly from
    memory.

    Args:
        name: Unique in the job, and a plain file name.

    Raises:
        ValueError: Another state has this name, or it is no file name; or the subclass does not
            define how to save and load (a ConfigurationError).
    """

    takes_over = True
    """Whether a replica that is a step behind after a loss receives this state from one that is
    ahead; False for a replica's own progress."""
    elastic = True
    """Whether replicas can join while others train; a subclass whose state cannot be transferred
    sets it to False."""
    shrinks = False
    """Whether replicas can still leave if :attr:`elastic` is False."""
    in_parts = False
    """Whether each stage of a multi-process pipeline saves its part; the first stage saves other
    states. Such a state defines ``load_parts``, too."""
    common = ""
    """A description that must be equal on every replica, besides the name."""
    equal = False
    """Whether :meth:`content` is bitwise equal on all replicas, so that each can send a part of it;
    else replica 0 sends it."""

    def __init__(self, name: str) -> None:
        states = context().component(States)
        if Path(name).name != name or name.startswith(".") or name in ("", MANIFEST):
            raise ValueError(f"state name {name!r} must be a plain file name")
        for method in ("save", "load"):
            if getattr(type(self), method) is getattr(State, method):
                raise ConfigurationError(
                    f"{type(self).__name__} has no {method}(fileobj): a State of your own needs "
                    "both save and load"
                )
        if name in states:
            raise ValueError(f"a state named {name!r} exists already; names must be unique")
        self.name = name
        self._is_large = False
        states[name] = self

    @property
    def may_hold_schedule(self) -> bool:
        """Whether it may include the script's learning-rate scheduler."""
        return not type(self).__module__.startswith(__name__.partition(".")[0])

    def save(self, fileobj: BinaryIO) -> None:
        """Write the state; called on rank 0."""
        raise NotImplementedError

    def load(self, fileobj: BinaryIO) -> None:
        """Read the output of :meth:`save`; called on every rank."""
        raise NotImplementedError

    def load_parts(self, files: Sequence[BinaryIO]) -> None:
        """Read the outputs of :meth:`save` of all stages, in order."""
        raise NotImplementedError

    def content(self) -> Any:
        """Return the state in nested dicts, lists and tuples of tensors, numbers and strings.

        Called after :meth:`sync` on surviving and on joining replicas: the tensors of the latter
        may be overwritten in place. None, as here: :meth:`save` is used instead.
        """
        return None

    def check(self, content: Any) -> None:
        """Refuse an invalid argument of :meth:`adopt`, before anything is changed.

        Its tensors have no elements, on the device "meta". A CheckpointError names the first
        difference.
        """

    def adopt(self, content: Any) -> None:
        """Continue from the :meth:`content` of another replica: its tensors are this replica's own,
        overwritten, where type and shape are equal, and else on the CPU.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state equal on all replicas; called on every rank before a save."""

    def spread(self) -> None:
        """Make all replicas hold the whole state, on every rank before an elastic resize."""
        self.sync()

    def lost(self) -> str:
        """Return which state is lost with another replica, one clause; empty: none. If some is
        lost, the surviving replicas continue from the checkpoint, with this reason.
        """
        return ""

    def rejoined(self) -> None:
        """Reset unsaved state as a restart does; called on every rank after an elastic resize, when
        joining replicas have loaded the state.
        """

    def regrouped(self) -> None:
        """The same as :meth:`rejoined` after a loss, when no replica has joined."""
        self.rejoined()

    def is_pending(self) -> bool:
        """Return whether this replica holds data that the others only get by :meth:`sync`."""
        return False

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the current state if the next iteration becomes void, or
        raises a CheckpointError: the job then continues from its checkpoint.

        Called on all replicas at every step boundary of an elastic job. By default :meth:`save`
        writes small states to memory; a state may define a cheaper way, or detect that it does not
        change.
        """
        copy = io.BytesIO()
        if not self._is_large:
            self.save(copy)
            self._is_large = copy.getbuffer().nbytes > REMEMBERED_BYTES
        return self._refuse_to_return if self._is_large else lambda: self._return(copy)

    def _return(self, copy: io.BytesIO) -> None:
        copy.seek(0)
        self.load(copy)

    def _refuse_to_return(self) -> None:
        raise CheckpointError(
            f"the state {self.name} is too large to be copied at every step, and the step that is "
            "void may have changed it"
        )

    def snapshot(self) -> Callable[[BinaryIO], None]:
        """Return a function that writes a copy of the current state to a file during training.

        Called on rank 0 instead of :meth:`save` for a checkpoint in the background. By default
        :meth:`save` writes to memory; large states may have a faster way.
        """
        copy = io.BytesIO()
        self.save(copy)
        return lambda fileobj: _write_all(fileobj, copy)


def snapshot_of(state: State) -> Callable[[BinaryIO], None]:
    """Call a state's ``snapshot``; raise a CheckpointError if it fails, whatever the reason."""
    try:
        return state.snapshot()
    except Exception as error:  # the script's own code
        failure = StateError.of(state.name, error)
        raise CheckpointError(
            f"no checkpoint is written: {failure}; earlier checkpoints are untouched"
        ) from error


def _write_all(fileobj: BinaryIO, copy: io.BytesIO) -> None:
    fileobj.write(copy.getbuffer())


def check_loadable(name: str, content: Any) -> None:
    """Raise a CheckpointError for a ``state_dict()`` that ``torch.load(..., weights_only=True)``
    would not read, by writing and reading it without its tensors' elements: before training instead
    of at the first restart.
    """
    copy = io.BytesIO()
    try:
        torch.save(_without_elements(content), copy)
        copy.seek(0)
        torch.load(copy, weights_only=True)
    except Exception as error:  # pickling may run any code of an object
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"the state of {name} cannot be kept in a checkpoint: its state_dict() must hold "
            f"tensors, numbers, strings, lists and dicts only ({reason})"
        ) from error


def _without_elements(value: Any) -> Any:
    """Return the same PyTree with empty tensors, so that large tensors are not written."""
    if type(value) in (Tensor, nn.Parameter):
        return torch.empty(0, dtype=value.dtype)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_elements(x)) for key, x in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_without_elements, value))
    return value
