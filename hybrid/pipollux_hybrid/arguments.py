"""What a model may be wrapped with and called with; everything else is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .allowed import Allowed, check_values, is_sequence, switch
from .balance import BALANCE_RULES
from .context import JobContext
from .engine import CHECKPOINT_MODES
from .errors import ConfigurationError
from .modelstate import STATE_NAME
from .nest import Nest, tensors_of

__all__ = ["batch_of", "batch_size_of", "check_arguments", "check_single"]


def _is_object_with(*methods: str) -> Callable[[Any], bool]:
    """A test for objects, not classes, that can do something."""
    return lambda value: (
        not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in methods)
    )


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


OPTIMIZER = {
    "optimizer": Allowed(
        lambda value: not isinstance(value, type) and hasattr(value, "param_groups"),
        "one optimizer over module.parameters() is needed, such as "
        "torch.optim.SGD(module.parameters(), lr=0.1)",
    )
}
"""What the optimizer of a model may be."""
OPTIONS = {
    "checkpoint": Allowed(
        lambda value: value in CHECKPOINT_MODES,
        f"{', '.join(map(repr, CHECKPOINT_MODES))} are allowed",
    ),
    "balance": Allowed(
        _or_none(lambda value: isinstance(value, str) or is_sequence(value)),
        "a list with the number of layers of each stage is allowed, as in [3, 2], or "
        f"{', '.join(map(repr, BALANCE_RULES))}; a number of stages is num_stages",
    ),
    "devices": Allowed(
        _or_none(is_sequence),
        "a list with one device for each stage is needed, as in ['cuda:0', 'cuda:1']",
    ),
    "memory_limit": Allowed(
        _or_none(lambda value: isinstance(value, (int, float))),
        "a number of bytes above 0 is needed, or None",
    ),
    "scaling_rule": Allowed(
        _or_none(_is_object_with("factor")),
        "an object with factor(state) is needed, such as AdaScale(), AdamScale(), LinearScale(), "
        "SquareRootScale() or LEGWScale(…), or None for the one that suits the optimizer",
    ),
    "lr_scheduler": Allowed(
        _or_none(_is_object_with("step", "state_dict", "load_state_dict")),
        "a scheduler over the optimizer is needed, such as "
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30), or None",
    ),
    "broadcast_buffers": switch(),
}
"""What the options of a model may be, as far as their kind goes."""


def batch_of(inputs: tuple[Nest, ...], keywords: Mapping[str, Nest]) -> Nest:
    """The batch that a model was called with: its argument, or the tuple of several.

    Raises:
        ConfigurationError: There are keyword arguments; it shows how to pass them.
    """
    if keywords:
        given = ", ".join(f"{name!r}: {name}" for name in keywords)
        raise ConfigurationError(
            "the model got keyword arguments, and its first layer takes one value: pass them as a "
            f"dict, model({{{given}}}); docs/models.md shows layers that hand them on"
        )
    return inputs[0] if len(inputs) == 1 else inputs


def batch_size_of(batch: Nest) -> int:
    """Samples of a batch: the size of dimension 0 of every tensor in it.

    Raises:
        ConfigurationError: There is no tensor, or the sizes differ.
    """
    tensors = tensors_of(batch)
    if not tensors:
        raise ConfigurationError(
            f"the model got a {type(batch).__name__} without a tensor in it: a batch is a tensor, "
            "or tuples, lists and dicts of tensors"
        )
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ConfigurationError("the model got a scalar: each input needs a batch dimension")
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigurationError(
            f"the inputs have batch dimensions of different size ({shapes}): the pipeline cuts all "
            "of them along dimension 0"
        )
    size = sizes.pop()
    if size == 0:
        raise ConfigurationError("the model got an empty batch: at least one sample is needed")
    return size


def check_single(ctx: JobContext) -> None:
    """Refuse a second model in the process.

    Raises:
        ConfigurationError: There is one already.
    """
    if STATE_NAME in ctx.states:
        raise ConfigurationError(
            "there is a HybridParallel in this process already: a job has one pipeline, one "
            "optimizer and one batch size; in a notebook call destroy_process_group() before "
            "wrapping anew"
        )


def check_arguments(
    module: nn.Sequential, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]
) -> None:
    """Refuse what cannot be trained as a pipeline.

    Args:
        module: The layers.
        optimizer: Over their parameters.
        options: The other arguments of ``HybridParallel`` that :data:`OPTIONS` tells of.

    Raises:
        ConfigurationError: Names the argument, its value and what is allowed.
    """
    if not isinstance(module, nn.Sequential):
        raise ConfigurationError(
            f"module is a {type(module).__name__}: an nn.Sequential is needed, as stages are "
            "cut from its layers; docs/models.md shows how to make one of a model"
        )
    if type(module).forward is not nn.Sequential.forward:
        raise ConfigurationError(
            f"module is a {type(module).__name__} with a forward of its own, which stages would "
            "not run: move what it does into layers of a plain nn.Sequential"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ConfigurationError(
            "module has hooks, which would never be called as stages run its layers one by one: "
            "register them on the layers"
        )
    if len(module) == 0:
        raise ConfigurationError("module is an empty nn.Sequential: there is nothing to train")
    check_values(OPTIMIZER, {"optimizer": optimizer})
    check_values(OPTIONS, options)
    _check_parameters(module, optimizer)
    _check_scheduler(optimizer, options["lr_scheduler"])


def _check_parameters(module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ConfigurationError(
                f"parameter {name!r} of module has no shape yet: run one batch through the module, "
                "and make the optimizer after that"
            )
    for name, layer in module.named_modules():
        sparse = isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
        if sparse and layer.weight.requires_grad:
            raise ConfigurationError(
                f"parameter '{name}.weight' would have a sparse gradient, which is not averaged "
                f"over replicas: create the {type(layer).__name__} with sparse=False"
            )
    known = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigurationError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not in module: make it from module.parameters()"
                )


def _check_scheduler(optimizer: torch.optim.Optimizer, lr_scheduler: Any) -> None:
    # Schedulers that are not PyTorch's need not tell what they are over.
    other = getattr(lr_scheduler, "optimizer", optimizer)
    if other is not optimizer:
        name = type(lr_scheduler).__name__
        raise ConfigurationError(
            f"lr_scheduler is a {name} over another optimizer ({type(other).__name__}) than the "
            f"{type(optimizer).__name__} that was given, whose learning rate would never change: "
            f"make it from that one, {name}(optimizer, …)"
        )
