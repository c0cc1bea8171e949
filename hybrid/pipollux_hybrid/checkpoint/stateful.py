"""Objects with ``state_dict`` and ``load_state_dict`` in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pipollux_hybrid.errors import CheckpointError, ConfigurationError
from pipollux_hybrid.job.context import context, current

from .manager import load_state
from .remembering import REMEMBERED_BYTES, copied, size_of, unchanged
from .state import State, check_loadable

__all__ = ["Stateful", "register_for_checkpointing"]


class Stateful(Protocol):
    """The interface of PyTorch's optimizers, schedulers, scalers and modules."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Continue from the result of :meth:`state_dict`."""


S = TypeVar("S", bound=Stateful)


class ObjectState(State):
    """The state of an object, in a file ``name.pt``."""

    def __init__(self, name: str, obj: Stateful) -> None:
        super().__init__(f"{name}.pt")
        self._object = obj
        self._checked = False
        # A module, such as an average of the parameters, has its stage's layers.
        self.in_parts = isinstance(obj, nn.Module)
        self._tensors = [*obj.parameters(), *obj.buffers()] if isinstance(obj, nn.Module) else []
        if isinstance(obj, AveragedModel) and context().control.losses.expected:
            obj.__dict__["update_parameters"] = partial(_update_unless_void, obj)

    @property
    def may_hold_schedule(self) -> bool:
        """Whether it may include the script's learning-rate scheduler."""
        return not isinstance(self._object, (torch.amp.GradScaler, nn.Module))

    def save(self, fileobj: BinaryIO) -> None:
        """Write the object's state with ``torch.save``."""
        torch.save(self.content(), fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Load the output of :meth:`save` into the object, with tensors on the CPU."""
        self.load_parts([fileobj])

    def load_parts(self, files: Sequence[BinaryIO]) -> None:
        """Load the output of several stages; the object loads the entries that it has itself."""
        parts = [torch.load(x, map_location="cpu", weights_only=True) for x in files]
        content = parts[0]
        if self.in_parts and (len(parts) > 1 or context().mesh is not None):
            whole = {name: x for part in parts for name, x in part.items()}
            content = {name: whole[name] for name in self._object.state_dict() if name in whole}
        self.adopt(content)

    def content(self) -> Any:
        """Return the object's ``state_dict()``."""
        content = self._object.state_dict()
        if not self._checked:  # it may have new entries since it was registered
            check_loadable(self.name, content)
            self._checked = True
        return content

    def adopt(self, content: Any) -> None:
        """Load the result of :meth:`content` into the object."""
        self._object.load_state_dict(content)

    def remember(self) -> Callable[[], None]:
        """Copy a small state; of a module only changes are detected: a void iteration updates no
        average of the parameters, nor a GradScaler.
        """
        if isinstance(self._object, (torch.amp.GradScaler, AveragedModel)):
            return lambda: None
        if self._tensors:
            return unchanged(self.name, self._tensors)
        content = self._object.state_dict() if not self._is_large else {}
        self._is_large = self._is_large or size_of(content) > REMEMBERED_BYTES
        if self._is_large:
            return self._refuse_to_return
        copy = copied(content)
        return lambda: self._put_back(copy)

    def _put_back(self, content: dict[str, Any]) -> None:
        self._object.load_state_dict(content)


def _update_unless_void(average: AveragedModel, model: nn.Module) -> None:
    """Skip updates of an average in a void iteration."""
    ctx = current()
    if ctx is None or not ctx.control.losses.void:
        type(average).update_parameters(average, model)


def register_for_checkpointing(name: str, obj: S) -> S:
    """Add an object's state to checkpoints, and restore it now if there is one.

    For objects that training needs besides the model and its optimizer: a ``GradScaler``, an
    exponential average of the parameters, a second learning-rate scheduler. Rank 0's state is
    saved; of a module in a multi-process pipeline, that of all stages.

    Example::

        scaler = pipollux.register_for_checkpointing("scaler", pipollux.GradScaler("cuda"))
        average = pipollux.register_for_checkpointing("ema", AveragedModel(module))

    Args:
        name: Unique in the job, and a plain file name.
        obj: Any object with ``state_dict()`` and ``load_state_dict()``.

    Returns:
        The object.

    Raises:
        ValueError: Another state has this name, or it is no file name; or the object lacks one of
            the two methods (a ConfigurationError).
        CheckpointError: Its state cannot be saved, or it rejects the state in the checkpoint.
    """
    _check(name, obj)
    load_state(ObjectState(name, obj))
    return obj


def _check(name: str, obj: Stateful) -> None:
    """Refuse now an object that the first save could not write."""
    missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(obj, m, None))]
    if missing or isinstance(obj, type):
        raise ConfigurationError(
            f"register_for_checkpointing({name!r}, …) was given a {type(obj).__name__} "
            "that cannot be kept: an object with the methods state_dict() and load_state_dict() is "
            "needed, or a State of your own that is restored with load_state()"
        )
    try:
        content = obj.state_dict()
    except Exception as error:  # the user's own code
        raise CheckpointError(
            f"the state of {name} cannot be kept in a checkpoint: state_dict() of "
            f"{type(obj).__name__} fails with {type(error).__name__}: {error}"
        ) from error
    check_loadable(name, content)
