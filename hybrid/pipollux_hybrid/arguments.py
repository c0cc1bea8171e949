"""What a model may be wrapped with and called with; everything else is refused in one sentence."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .context import JobContext
from .engine import CHECKPOINT_MODES
from .errors import ConfigurationError
from .modelstate import STATE_NAME
from .nest import Nest, tensors_of

__all__ = ["batch_size_of", "check_arguments", "check_single"]


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
    module: nn.Sequential, optimizer: torch.optim.Optimizer, checkpoint: str
) -> None:
    """Refuse what cannot be trained as a pipeline.

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
    if checkpoint not in CHECKPOINT_MODES:
        allowed = ", ".join(map(repr, CHECKPOINT_MODES))
        raise ConfigurationError(f"checkpoint={checkpoint!r}: {allowed} are allowed")
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
