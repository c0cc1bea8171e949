"""Checks of the wrapped model and its calls, and the plain model's interface on the wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipollux_hybrid.checkpoint.model_state import STATE_NAME
from pipollux_hybrid.checkpoint.parameter_groups import plain_name
from pipollux_hybrid.checkpoint.state import States
from pipollux_hybrid.conversion.as_layers import as_layers
from pipollux_hybrid.conversion.model_layers import ModelLayers
from pipollux_hybrid.errors import Allowed, ConfigurationError, check_values, is_sequence, switch
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.partition.placement import BALANCE_RULES
from pipollux_hybrid.pipeline.engine import CHECKPOINT_MODES
from pipollux_hybrid.pipeline.microbatch import PyTree
from pipollux_hybrid.pipeline.samples import plain_batch


class ModuleWrapper(nn.Module):
    """A module around an ``nn.Sequential`` that saves and loads its state like the original.

    Names are independent of stages and of ``torch.compile``, so state can be transferred between
    any numbers of stages, and from and to the plain module.
    """

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        """Say where the attributes of a converted model are."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if isinstance(module, ModelLayers):
                module.explain_missing(name, error)
            raise

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.module)

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer by its index."""
        return self.module[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Return the layers in order."""
        return iter(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain module's state, keyed by its own layer names whatever the balance."""
        state = self.module.state_dict(*args, **kwargs)
        for name in list(state):  # all are reinserted to keep their order
            state[plain_name(name)] = state.pop(name)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the plain module's state, whether its layers were compiled or not."""
        if assign:
            raise ConfigurationError(
                "assign=True would put other tensors in the place of parameters that the optimizer "
                "and the synchronization hold: load before wrapping, or with assign=False"
            )
        ours = {plain_name(name): name for name in self.module.state_dict()}
        renamed = {ours.get(plain_name(n), n): value for n, value in state_dict.items()}
        return self.module.load_state_dict(renamed, strict=strict)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Change the dtype of parameters and buffers; devices are fixed.

        Raises:
            ConfigurationError: A device was given.
        """
        try:
            device = torch._C._nn._parse_to(*args, **kwargs)[0]
        except RuntimeError:  # a device index on a machine without devices
            _refuse_to_move()
        if device is not None:
            _refuse_to_move()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:  # noqa: ARG002  # the base class's signature
        """Refuse the move: stages have fixed devices."""
        _refuse_to_move()

    def cpu(self) -> NoReturn:
        """Refuse the move: stages have fixed devices."""
        _refuse_to_move()


def _refuse_to_move() -> NoReturn:
    raise ConfigurationError(
        "a pipeline's layers cannot be moved, as each stage has its own device: pass "
        "HybridParallel(…, devices=[…]), one for each stage, and remove the call"
    )


def _is_object_with(*methods: str) -> Callable[[Any], bool]:
    """Return a test for objects, not classes, with these methods."""
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
"""Allowed values of a model's optimizer."""
OPTIONS = {
    "activation_checkpoint": Allowed(
        lambda value: (
            value in CHECKPOINT_MODES
            or (is_sequence(value) and all(mode in CHECKPOINT_MODES for mode in value))
        ),
        f"{', '.join(map(repr, CHECKPOINT_MODES))} are allowed, or in a multi-process pipeline a "
        "list with one of them for each stage",
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
    "shard_optimizer": switch(
        "True, for replicas that each hold a part of the optimizer's state, or False is needed"
    ),
}
"""Allowed values of a model's options, by type."""


def layers_of(module: nn.Module, example_inputs: PyTree | None) -> nn.Sequential:
    """Return a module's layers: itself, or those that :func:`as_layers` makes of it."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return module
    if not isinstance(module, nn.Module):
        raise ConfigurationError(
            f"module is a {type(module).__name__}: an nn.Module is needed, as stages are cut from "
            "its layers"
        )
    return as_layers(module, example_inputs)


def batch_of(
    module: nn.Module, inputs: tuple[PyTree, ...], keywords: Mapping[str, PyTree]
) -> PyTree:
    """Return the batch of a call: its argument, or the tuple of several, or the dict of keywords
    of a converted model.

    Raises:
        ConfigurationError: Layers that are not converted got keyword arguments.
    """
    if isinstance(module, ModelLayers) and keywords and not inputs:
        return plain_batch(dict(keywords))
    if keywords:
        given = ", ".join(f"{name!r}: {name}" for name in keywords)
        raise ConfigurationError(
            "the model got keyword arguments, and its first layer takes one value: pass them as a "
            f"dict, model({{{given}}}); docs/howto/layers.md shows layers that pass them on"
        )
    return plain_batch(inputs[0] if len(inputs) == 1 else inputs)


def check_single(ctx: JobContext) -> None:
    """Refuse a second model in the process.

    Raises:
        ConfigurationError: There is one already.
    """
    if STATE_NAME in ctx.component(States):
        raise ConfigurationError(
            "there is a HybridParallel in this process already: a job has one pipeline, one "
            "optimizer and one batch size; in a notebook call destroy_process_group() before "
            "wrapping again"
        )


def check_arguments(
    module: nn.Sequential, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]
) -> None:
    """Refuse arguments that cannot be trained as a pipeline.

    Args:
        module: The layers.
        optimizer: Over their parameters.
        options: The other arguments of ``HybridParallel`` that :data:`OPTIONS` lists.

    Raises:
        ConfigurationError: Names the argument, its value and the allowed values.
    """
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise ConfigurationError(
            "module has hooks, which would never be called as stages run its layers one by one: "
            "register them on the layers"
        )
    if len(module) == 0:
        raise ConfigurationError("module is an empty nn.Sequential: there is nothing to train")
    check_values(OPTIMIZER, {"optimizer": optimizer})
    _check_step(optimizer)
    check_values(OPTIONS, options)
    _check_parameters(module, optimizer)
    _check_scheduler(optimizer, options["lr_scheduler"])


def _check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that evaluates the loss by itself, such as L-BFGS."""
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [x.name for x in parameters if x.default is x.empty and x.kind in plain]
    if needed:
        raise ConfigurationError(
            f"optimizer is a {type(optimizer).__name__}, whose step({', '.join(needed)}) evaluates "
            "the loss more than once an iteration, which a pipeline does not: use one whose step() "
            "needs no argument, such as torch.optim.AdamW(module.parameters())"
        )


def _check_parameters(module: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ConfigurationError(
                f"parameter {name!r} of module has no shape yet: run one batch through the module, "
                "and make the optimizer after that"
            )
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if layer.max_norm is not None:
            raise ConfigurationError(
                f"layer {name!r} is an {type(layer).__name__} with max_norm={layer.max_norm}: its "
                "forward changes the weights of its samples, which are others on each replica; "
                "leave max_norm out, and renormalise after optimizer.step(), as by "
                f"weight.data.renorm_({layer.norm_type:g}, 0, {layer.max_norm:g})"
            )
        if layer.sparse and layer.weight.requires_grad:
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
                    "not in module: make it from module.parameters(); have the last layer return "
                    "parameters of a loss (docs/howto/losses.md#parameters-of-the-loss)"
                )


def _check_scheduler(optimizer: torch.optim.Optimizer, lr_scheduler: Any) -> None:
    # Custom schedulers need not have the attribute.
    other = getattr(lr_scheduler, "optimizer", optimizer)
    if other is not optimizer:
        name = type(lr_scheduler).__name__
        raise ConfigurationError(
            f"lr_scheduler is a {name} over another optimizer ({type(other).__name__}) than the "
            f"{type(optimizer).__name__} that was given, whose learning rate would never change: "
            f"make it from that one, {name}(optimizer, …)"
        )
