"""Tensors of a batch that another stage has loaded: shape, dtype and device, without values.

A loop body runs in every process of a multi-process pipeline, also where a part of the batch is not
loaded. It may read sizes there, slice, compare and move: results of unloaded tensors are unloaded.
What would need values is refused, and so is what would be different in the process that has them: a
change of a loaded tensor, and random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

REMEDY = (
    "this process has not loaded (AdaptiveDataLoader(…, load_per_stage=True): the inputs are in "
    "the first stage and the targets in the last one); use it without load_per_stage where every "
    "process needs the values, for example for evaluation"
)
NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded)


class Unloaded(Tensor):
    """A tensor without values; see the module."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device) -> Unloaded:
        """Return one of the size and type of a tensor, as if it was on a device."""
        strides = like.stride() if like.layout is torch.strided else None
        made: Unloaded = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=strides, dtype=like.dtype, device=device
        )
        return made

    # All is done in __torch_dispatch__; torch annotates both with the types of its placeholders.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # mypy drops the names of arguments of such methods.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return shape and dtype."""
        return f"tensor(loaded by another stage, size={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be written to a file."""
        raise refusal("writing a tensor")

    def tolist(self) -> Any:
        """Refuse to be read."""
        raise refusal("tolist()")

    def numpy(self, **_: Any) -> Any:
        """Refuse to be read."""
        raise refusal("numpy()")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # see above
        cls,
        function: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute the size of a result on torch's meta device."""
        kwargs = dict(kwargs or {})
        name = function._schema.name
        if any(tag in function.tags for tag in NEEDS_VALUES):
            raise refusal(name)
        changed = list(_changed(function, args, kwargs))
        if not all(isinstance(tensor, Unloaded) for tensor in changed):
            raise refusal(f"{name}, which changes a tensor,")
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise refusal(f"{name} with a gradient")
        device = next(tensor for tensor in tensors if isinstance(tensor, Unloaded)).device
        if kwargs.get("device") is not None:
            device, kwargs["device"] = torch.device(kwargs["device"]), torch.device("meta")
        args, kwargs = pytree.tree_map_only(Tensor, _meta, (args, kwargs))
        try:
            found = function(*args, **kwargs)
        except NotImplementedError as error:
            raise refusal(name) from error
        if changed:
            return changed[0]
        return pytree.tree_map_only(Tensor, lambda like: Unloaded(like, device), found)


def refusal(what: str) -> ConfigurationError:
    """Return the error of something that needs values."""
    return ConfigurationError(f"{what} needs a part of the batch that {REMEDY}")


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _changed(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a call writes to."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


def is_loaded(batch: Any) -> bool:
    """Return whether this process has the values of all tensors of a PyTree."""
    return not any(isinstance(leaf, Unloaded) for leaf in pytree.tree_leaves(batch))
