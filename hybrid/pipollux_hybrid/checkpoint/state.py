"""Pieces of state that outlive restarts: the interface of AdaptDL's ``State``.

``save``, ``load`` and ``sync`` are AdaptDL's; :mod:`pipollux_hybrid.checkpoint.manager` calls them.
What is saved must be readable without running code from the file.
"""

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

__all__ = ["State", "States", "check_loadable", "snapshot_of"]


class States(dict[str, "State"]):
    """Everything that a checkpoint of the job holds, by name.

    Args:
        ctx: The job's context.
    """

    def __init__(self, ctx: JobContext) -> None:  # noqa: ARG002  # a component of the job's
        super().__init__()


class State:
    """A piece of state that outlives restarts.

    Subclasses define how to write and read it; :func:`~pipollux_hybrid.load_state` restores it
    after a restart. Bytes are read back on machines that must not run them, so never unpickle in
    ``load`` (use ``torch.load(..., weights_only=True)`` or JSON).

    Replicas that join a running job load what replica 0 saves. A state with
    large tensors may define ``content`` and ``adopt``, too: its tensors are sent as they lie in
    memory, then.

    Args:
        name: Unique in the job, and a plain file name.

    Raises:
        ValueError: Another state has this name, or it is no file name; or the subclass does not
            define how to save and load (a ConfigurationError).
    """

    takes_over = True
    """Whether a replica that is a step behind, when another one has died, takes the state over from
    one that is ahead; not where it says how far a replica itself is."""
    live = True
    """Whether replicas can join while others train; set it to False in a subclass that cannot be
    taken over then."""
    shrinks = False
    """Whether replicas can still leave where :attr:`live` is False."""
    in_parts = False
    """Whether each stage saves what it has, where stages have processes of their own; the first one
    saves the other states. Such a state has ``load_parts``, too."""
    common = ""
    """What every replica must have in common of it, where a name alone does not say so."""
    equal = False
    """Whether :meth:`content` is the same on all replicas to the last bit, so that each can send a
    part of it; else replica 0 sends it."""

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
        """Whether it may be, or hold, the script's learning-rate scheduler."""
        return not type(self).__module__.startswith(__name__.partition(".")[0])

    def save(self, fileobj: BinaryIO) -> None:
        """Write the state; called on rank 0."""
        raise NotImplementedError

    def load(self, fileobj: BinaryIO) -> None:
        """Read what :meth:`save` wrote; called on every rank."""
        raise NotImplementedError

    def load_parts(self, files: Sequence[BinaryIO]) -> None:
        """Read what :meth:`save` wrote in the processes of several stages, in their order.

        Args:
            files: One of each stage.
        """
        raise NotImplementedError

    def content(self) -> Any:
        """Return the state in nested dicts, lists and tuples of tensors, numbers and strings.

        Called after :meth:`sync` on surviving replicas, and on those that join: tensors of these
        may be overwritten in place by those of the others.

        Returns:
            What :meth:`adopt` takes; None, as here, where :meth:`save` says what there is.
        """
        return None

    def check(self, content: Any) -> None:
        """Refuse what :meth:`adopt` could not take; called before anything is changed.

        Args:
            content: Another replica's, with tensors on the device "meta", that have no elements.

        Raises:
            CheckpointError: Names the first difference.
        """

    def adopt(self, content: Any) -> None:
        """Go on from the :meth:`content` of another replica.

        Args:
            content: With tensors that are this replica's own, overwritten, where type and shape
                are the same, and else on the CPU.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state the same on all replicas; called on every rank before a save."""

    def spread(self) -> None:
        """Have on all replicas what is saved; called on every rank before some come or go.

        By default :meth:`sync`; a state of which replicas hold parts does more.
        """
        self.sync()

    def lost(self) -> str:
        """Return what could not be had again if another replica had died, one clause; empty: all.

        Those that are left then go on from the checkpoint, and say why.
        """
        return ""

    def rejoined(self) -> None:
        """Do to what is not saved what a restart does; called on every rank.

        That is after replicas have joined or left, when those that joined have loaded the state.
        """

    def regrouped(self) -> None:
        """Do what :meth:`rejoined` does, where replicas were lost and none has joined."""
        self.rejoined()

    def is_pending(self) -> bool:
        """Return whether this replica holds something that the others get by :meth:`sync` only."""
        return False

    def remember(self) -> Callable[[], None]:
        """Return what puts the state back, should the step that begins now turn out to be void.

        Called on all replicas at every step boundary of a job whose replicas come and go. By
        default :meth:`save` writes into memory, if that is little; a state that knows a cheaper
        way, or whether it changes at all, may do better.

        Returns:
            A function. It raises a CheckpointError where it cannot: the job then goes on from its
            checkpoint.
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
        """Copy the state as it is now, for a thread to write while training goes on.

        Called on rank 0 instead of :meth:`save` when a checkpoint is written in the background.
        By default :meth:`save` writes into memory; large states may copy faster than that.

        Returns:
            What writes the copy to a file.
        """
        copy = io.BytesIO()
        self.save(copy)
        return lambda fileobj: _write_all(fileobj, copy)


def snapshot_of(state: State) -> Callable[[BinaryIO], None]:
    """Return what a state's ``snapshot`` does.

    Raises:
        CheckpointError: It fails, whatever the reason.
    """
    try:
        return state.snapshot()
    except Exception as error:  # it is the script's own code
        failure = StateError.of(state.name, error)
        raise CheckpointError(
            f"no checkpoint is written: {failure}; earlier checkpoints are untouched"
        ) from error


def _write_all(fileobj: BinaryIO, copy: io.BytesIO) -> None:
    fileobj.write(copy.getbuffer())


def check_loadable(name: str, content: Any) -> None:
    """Refuse content that ``torch.load(..., weights_only=True)`` would not read.

    Better before training than at the first restart.

    Args:
        name: What the content is, for the message.
        content: What a ``state_dict()`` gave; it is written to memory and read back, without the
            elements of its tensors.

    Raises:
        CheckpointError: There is something other than tensors and plain Python in it.
    """
    copy = io.BytesIO()
    try:
        torch.save(_without_elements(content), copy)
        copy.seek(0)
        torch.load(copy, weights_only=True)
    except Exception as error:  # objects may do whatever they like when they are pickled
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"the state of {name} cannot be kept in a checkpoint: its state_dict() must hold "
            f"tensors, numbers, strings, lists and dicts only ({reason})"
        ) from error


def _without_elements(value: Any) -> Any:
    """Return the same PyTree with empty tensors: large tensors are not written twice."""
    if type(value) in (Tensor, nn.Parameter):
        return torch.empty(0, dtype=value.dtype)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _without_elements(x)) for key, x in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_without_elements, value))
    return value
