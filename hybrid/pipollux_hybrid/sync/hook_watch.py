"""Rejects hooks of the script that train within a backward, or need the whole gradient.

PyTorch has recipes that step an optimizer as soon as a parameter's gradient has arrived, and drop
the gradient (``register_post_accumulate_grad_hook``). In a pipeline that gradient is of one
micro-batch and one replica, and the step would precede the sum. So parameters with a hook of the
script are compared before and after it.

Hooks may also return another gradient (``register_hook``). A result proportional to the gradient,
such as a mask, is the same whether the hook runs on the parts or on their sum; clipping or adding
is not. So such hooks are called once more, with a multiple of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipollux_hybrid.errors import SynchronizationError

COMPARED_BACKWARDS = 3
"""Backwards, from the first with hooks, that also compare values."""
HALF = 65504.0


class HookWatch:
    """Watches the parameters that have hooks of the script."""

    def __init__(self, stages: Sequence[Sequence[tuple[str, nn.Parameter]]]) -> None:
        self._named = [item for named in stages for item in named]
        self._own: list[object] = [None] * len(self._named)
        """For each parameter, copies of its hooks when they last were this package's only."""
        self._names: dict[nn.Parameter, str] = {}
        self._handles: list[RemovableHandle] = []
        self._before: dict[nn.Parameter, tuple[int, Tensor | None]] = {}
        self._given: dict[nn.Parameter, Tensor] = {}
        self._backwards = 0

    def begin(self, *, in_parts: bool) -> None:
        """Begin a backward; ``in_parts``: hooks are called with parts of the gradient."""
        self.release()
        self._names = self._hooked()
        if not self._names:
            return
        self._backwards += 1
        for parameter in self._names:
            hooks: Any = parameter._backward_hooks or {}
            present = dict(hooks)
            # Hooks run in registration order, so the others are registered again after this one.
            hooks.clear()
            first = parameter.register_hook(self._note(parameter))
            hooks.update(present)
            # The hook registered last runs last.
            last = parameter.register_post_accumulate_grad_hook(self._compare)
            self._handles += [first, last]
            if in_parts and self._backwards <= COMPARED_BACKWARDS:
                changing = [hook for hook in present.values() if not _is_own(hook)]
                self._handles.append(parameter.register_hook(self._check(parameter, changing)))

    def _hooked(self) -> dict[nn.Parameter, str]:
        """Return the parameters with hooks of the script, and their names."""
        hooked = {}
        for index, (name, parameter) in enumerate(self._named):
            before = parameter._backward_hooks
            after = parameter._post_accumulate_grad_hooks
            # Comparing with the last time takes no calls, in every step of every parameter.
            if not (before or after) or (before, after) == self._own[index]:
                continue
            if _is_hooked(parameter):
                hooked[parameter] = name
            else:
                self._own[index] = before and dict(before), after and dict(after)
        return hooked

    def end(self) -> None:
        """End a backward; raise a SynchronizationError if a gradient that had arrived is gone."""
        for parameter in self._before:
            self._compare(parameter)
        self.release()

    def release(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._before.clear()
        self._given.clear()

    def _note(self, parameter: nn.Parameter) -> Any:
        def note(gradient: Tensor) -> None:
            compared = self._backwards <= COMPARED_BACKWARDS
            copy = parameter.detach().clone() if compared else None
            self._before[parameter] = parameter._version, copy
            if compared:
                self._given[parameter] = gradient.detach().clone()

        return note

    def _check(self, parameter: nn.Parameter, hooks: Sequence[Any]) -> Any:
        def check(gradient: Tensor) -> None:
            given = self._given.pop(parameter, gradient)
            if torch.equal(given, gradient):
                return
            multiple = 2.0**20 if torch.finfo(gradient.dtype).max > HALF else 2.0**4
            expected, found = gradient * multiple, given * multiple
            for hook in hooks:
                returned = hook(found)
                found = found if returned is None else returned
            if torch.allclose(found, expected, rtol=1e-3, equal_nan=True):
                return
            self.release()
            raise SynchronizationError(
                f"a hook on parameter {self._names[parameter]!r} returns a gradient that is not "
                "proportional to the one it gets, which is that of one micro-batch, and of one "
                "replica: clip with model.clip_grad_norm_(…), or change parameter.grad after the "
                "backward"
            )

        return check

    def _compare(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)  # noqa: S101  # hooks are on parameters only
        version, copy = self._before[parameter]
        changed = parameter._version != version
        if copy is not None and not changed:
            # As bytes, so that a NaN equals itself.
            changed = not torch.equal(_bytes(copy), _bytes(parameter.detach()))
        if not changed and parameter.grad is not None:
            return
        self.release()
        done = "changed it" if changed else "removed its gradient"
        raise SynchronizationError(
            f"a hook on parameter {self._names[parameter]!r} {done} in the backward, where "
            "gradients are those of single micro-batches, and not yet averaged over replicas: call "
            "optimizer.step() and optimizer.zero_grad() after the backward"
        )


def _is_hooked(parameter: nn.Parameter) -> bool:
    hooks: Sequence[Mapping[int, Any] | None] = (
        parameter._backward_hooks,
        parameter._post_accumulate_grad_hooks,
    )
    return any(not _is_own(hook) for some in hooks if some for hook in some.values())


def _is_own(hook: Any) -> bool:
    owner = getattr(getattr(hook, "func", hook), "__self__", None)
    return type(owner).__module__.startswith(__name__.partition(".")[0])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
