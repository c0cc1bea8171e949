"""Comparison of a converted model with the original, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .recorder import UnrecordableError, own_attributes

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed difference of outputs and gradients, relative to the largest value of the tensor."""


def compare(
    model: nn.Module, original: Callable[[], Any], layers: Callable[[], Any], what: str
) -> None:
    """Compare outputs, gradients and changes of buffers of a model and its layers.

    Both run from the same random state and the same buffers, which are restored.

    Raises:
        UnrecordableError: They differ; ``what`` names the batch.
    """
    trained = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    expected, gradients, buffers = _run(model, original, trained)
    found, ours, changed = _run(model, layers, trained)
    if len(found) != len(expected):
        raise UnrecordableError(
            f"{what}, the layers return {len(found)} tensors, and the model {len(expected)}"
        )
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        if not _equal(one, other):
            raise _different(what, f"output {place} of the layers", _by(one, other))
    # Some gradients are zero but for rounding, such as those of the biases of keys in attention.
    largest = max(
        (
            float(x.nan_to_num(0.0, 0.0, 0.0).abs().max())
            for x in gradients
            if x is not None and x.numel()
        ),
        default=0.0,
    )
    for (name, _), mine, theirs in zip(trained, ours, gradients, strict=False):
        if (mine is None) != (theirs is None):
            raise _different(what, f"the gradient of {name!r}", ", as only one of them has one")
        if mine is not None and theirs is not None and not _equal(theirs, mine, largest):
            raise _different(what, f"the gradient of {name!r}", _by(theirs, mine))
    for name, value in buffers.items():
        if not _equal(value, changed[name]):
            raise _different(what, f"buffer {name!r}", _by(value, changed[name]))


def _different(what: str, value: str, by: str) -> UnrecordableError:
    return UnrecordableError(
        f"{what}, {value} differs from the model's{by}: write its layers by hand, see "
        "docs/howto/layers.md"
    )


def _run(
    model: nn.Module,
    function: Callable[[], Any],
    trained: Sequence[tuple[str, nn.Parameter]],
) -> tuple[list[Tensor], Sequence[Tensor | None], dict[str, Tensor]]:
    """Return the outputs, the gradients of a fixed sum of them, and the buffers afterwards."""
    with unchanged(model):
        outputs = [x for x in pytree.tree_leaves(function()) if isinstance(x, Tensor)]
        buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
        roots = [x for x in outputs if x.requires_grad]
        gradients: Sequence[Tensor | None] = []
        if roots and trained:
            torch.manual_seed(0)
            weights = [torch.randn_like(x) for x in roots]
            parameters = [x for _, x in trained]
            gradients = torch.autograd.grad(roots, parameters, weights, allow_unused=True)
    return [x.detach() for x in outputs], gradients, buffers


def separate(value: Any) -> Any:
    """Return a value as another stage receives it: in memory of its own."""
    return pytree.tree_map_only(Tensor, lambda x: x.clone(), value)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers, attributes and modes, and random generators, after the body."""
    buffers = [
        (module, name, x, x.detach().clone())
        for module in model.modules()
        for name, x in module._buffers.items()
        if x is not None
    ]
    modes = {x: x.training for x in model.modules()}
    attributes = [(x, *_attributes(x)) for x in model.modules()]
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
        for module in model.modules():
            module.training = modes.get(module, modes[model])  # a forward may make modules
        replaced = modes.keys() != set(model.modules())
        for module, known, contents in attributes:
            if not replaced and _has_kept_only(module, known):
                _restore(module, known, contents)
            _drop_graphs(module)
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer  # some models replace their buffers


CONTAINERS = (dict, list, set)


def _attributes(module: nn.Module) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """Return a module's own attributes, and the containers among them with their contents."""
    known = own_attributes(module)
    containers = (x for x in known.values() if isinstance(x, CONTAINERS))
    return known, [(x, x.copy()) for x in containers]


def _has_kept_only(module: nn.Module, known: Mapping[str, Any]) -> bool:
    """Return whether a forward has changed no attributes besides what it keeps for the next one.

    Kept tensors do not fit other parameters. A module that sets a flag as well is left as it is:
    the flag may tell that hooks are installed, or modules replaced.
    """
    found = own_attributes(module)
    changed = [x for x in found.keys() | known.keys() if found.get(x) is not known.get(x)]
    values = [each.get(name) for name in changed for each in (found, known)]
    return all(x is None or isinstance(x, (Tensor, *CONTAINERS)) for x in values)


def _drop_graphs(module: nn.Module) -> None:
    """Delete tensors with a graph, with which no module could be copied."""
    for name, value in own_attributes(module).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            delattr(module, name)


def _restore(
    module: nn.Module, known: Mapping[str, Any], contents: Sequence[tuple[Any, Any]]
) -> None:
    for name in own_attributes(module):
        del vars(module)[name]
    vars(module).update(known)
    for container, content in contents:
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)


def random_state() -> tuple[Tensor, list[Tensor]]:
    """Return the states of torch's generators."""
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    )


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Set the states of torch's generators."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


def same_random_state(state: tuple[Tensor, list[Tensor]]) -> bool:
    """Return whether torch's generators are in this state."""
    found = random_state()
    pairs = zip([state[0], *state[1]], [found[0], *found[1]], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _equal(one: Tensor, other: Tensor, largest: float = 0.0) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite, dtype = torch.isfinite(one), one.dtype
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    one, other = one[finite].double(), other[finite].double()
    if not one.numel():
        return True
    allowed = TOLERANCE.get(dtype, 1e-4) * float(one.abs().max())
    rounding = 64 * torch.finfo(dtype).eps * largest
    return float((one - other).abs().max()) <= max(allowed, rounding, 1e-30)


def _by(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f" in shape, {tuple(other.shape)} and {tuple(one.shape)}"
    return f" by up to {float((one.double() - other.double()).abs().max()):.3g}"
