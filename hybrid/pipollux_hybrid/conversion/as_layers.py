"""``as_layers``: any model as the layers of a pipeline, exactly or not at all."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.pipeline.microbatch import map_tensors
from pipollux_hybrid.pipeline.samples import plain_batch

from . import unify, verify
from .blocks import choose_blocks, opened_by
from .inputs import LOSS_INPUTS, Inputs, arguments
from .lengths import LengthProbe, plain_contexts, without_caches
from .model_layers import ModelLayers
from .pieces import (
    MisshapedError,
    Piece,
    RecordedLayer,
    Scope,
    attach,
    can_check_sizes,
    modules_of,
    pieces_of,
    states_of,
    write_forward,
)
from .recorder import Recording, UnrecordableError, record
from .watch import SettingsWatch, has_hooks

BATCH_SIZES = (2, 3)
"""Samples of the recorded batches."""
OTHER_BATCH_SIZE = 5
"""Samples of a batch that is recorded to check the result."""
LONGEST_PROBE = 1024
"""Tokens of the longest sequences that are recorded to see whether longer ones are allowed."""


def as_layers(
    model: nn.Module,
    example_inputs: Any,
    *,
    cut_at: Sequence[str] | None = None,
    verify: bool = True,
) -> ModelLayers:
    """Return a model as layers that :class:`HybridParallel` can cut into stages.

    Blocks, such as the layers of a transformer, and other modules stay the model's own. The
    operations between them are recorded, while the model runs on a few samples of the example in
    evaluation and training mode. The layers are then compared with the model: outputs and gradients
    on other samples, other batch sizes and lengths, with and without padding.

    Example::

        model = AutoModelForCausalLM.from_pretrained(path)
        layers = pipollux.as_layers(model, {"input_ids": ids, "attention_mask": mask})
        print(layers.describe())

    Args:
        model: Any module. Layers share its parameters, buffers and modules.
        example_inputs: A batch: a tensor, a tuple of the forward's arguments, or a dict of its
            keyword arguments, without labels. Batches need the same entries. They may have any
            number of samples, and any length of token ids and masks at which the model does the
            same, which is verified at the first batch of each length.
        cut_at: Names of the modules before which the model is cut, or of an ``nn.ModuleList`` for
            all of its members; modules in it run as they are. By default the members of the
            outermost lists of modules with a common class.
        verify: Whether to compare the layers with the model, to rounding.

    Returns:
        The layers, with the names of the model's parameters and the model's own output class.

    Raises:
        ConfigurationError: Layers cannot repeat what the model does; the message has the file and
            line, and the remedy.
    """
    _check_model(model, example_inputs)
    with plain_contexts(_device(model)):
        return _made(model, example_inputs, cut_at, check=verify)


def _made(
    model: nn.Module, example_inputs: Any, cut_at: Sequence[str] | None, *, check: bool
) -> ModelLayers:
    device = _device(model)
    example_inputs = map_tensors(lambda tensor: tensor.to(device), plain_batch(example_inputs))
    blocks = choose_blocks(model, _calls(model, example_inputs), cut_at)
    lengths = ["any", "recorded", "fixed"]
    while True:
        allowed = lengths.pop(0)
        inputs = Inputs(example_inputs, lengths_vary=allowed != "fixed")
        if allowed != "fixed" and len(inputs.dimensions) == 1:
            continue
        try:
            return _converted(model, inputs, blocks, check=check, any_length=allowed == "any")
        except Exception as error:  # recording calls the model's code at sizes it may not expect
            if not lengths:
                raise _as_error(model, error) from error
            if not isinstance(error, MisshapedError):
                lengths = ["fixed"]


def _as_error(model: nn.Module, error: Exception) -> ConfigurationError:
    return UnrecordableError(f"{type(model).__name__} cannot be made into layers: {error}")


def _check_model(model: nn.Module, example_inputs: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {type(model).__name__}: an nn.Module is needed")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ConfigurationError(
            f"model is a {type(model).__name__}, and replicas are HybridParallel's task: pass the "
            "model in it, model.module"
        )
    _check_compiled({"": model})
    if example_inputs is None:
        raise ConfigurationError(
            f"{type(model).__name__} is no plain nn.Sequential, and is recorded on an example: "
            "pass example_inputs, a batch as the data loader returns it, without labels"
        )
    given = arguments(example_inputs)[1]
    labels = next((name for name in given if name in LOSS_INPUTS), None)
    if labels is not None:
        raise ConfigurationError(
            f"example_inputs has {labels!r}, with which the model computes its loss, one number "
            "for a whole batch: pass the labels as targets, and compute the loss in "
            "loss_fn(output, targets)"
        )


def _check_compiled(modules: Mapping[str, nn.Module]) -> None:
    """Refuse modules whose operations cannot be recorded, as they were compiled."""
    for name, module in modules.items():
        # The class of torch.compile's result is in a package that takes seconds to import.
        wrapped = isinstance(module._modules.get("_orig_mod"), nn.Module)
        if wrapped or module._compiled_call_impl is not None:
            shown = f"module {name!r}" if name else "the model"
            raise ConfigurationError(
                f"{shown} is compiled, so its operations cannot be recorded: convert the model "
                "without torch.compile, and then compile its layers in place, as in "
                "layers[2].compile()"
            )


def _converted(
    model: nn.Module, inputs: Inputs, blocks: Sequence[str], *, check: bool, any_length: bool
) -> ModelLayers:
    with verify.unchanged(model), without_caches(model):
        model.eval()
        if not blocks:
            raise UnrecordableError("it has no modules to cut between")
        opened = opened_by(model, blocks)
        _check_compiled(opened)
        _check_hooks(opened)
        _check_modes(model, opened)
        model.eval()
        programs, refuses_autocast = _programs(model, inputs, list(opened.values()))
    names, pieces = pieces_of(programs[False], blocks)
    other, training = pieces_of(programs[True], blocks)
    if names != other:
        raise UnrecordableError("it calls other blocks in training than in evaluation")
    _check_changes(model, ["first", *names, "last"], pieces, training)
    with verify.unchanged(model), without_caches(model):
        if any_length and can_check_sizes(pieces) and can_check_sizes(training):
            any_length = _allow_lengths(model, inputs, opened, programs)
        else:
            any_length = False
        if not any_length:
            _limit_lengths(model, inputs, list(opened.values()), programs)
            pieces, training = ([replace(x, forms={}) for x in mode] for mode in (pieces, training))
    layers = _layers(model, inputs, names, pieces, training)
    for layer in layers:
        layer.refuses_autocast = refuses_autocast  # type: ignore[assignment]  # all are RecordedLayers
    layers.watch(SettingsWatch(opened))
    layers.original = type(model)
    if check:
        with verify.unchanged(model), without_caches(model):
            _verify(model, layers, inputs)
    for module in layers.modules():
        if isinstance(module, (ModelLayers, Scope)):  # the model's own keep their modes
            module.training = model.training
    inputs.forget_values()
    return layers


def _check_changes(model: nn.Module, names: Sequence[str], *programs: Sequence[Piece]) -> None:
    """Refuse buffers that one layer changes and another uses: each may have its own copy.

    Raises:
        UnrecordableError: There is one.
    """
    found = dict(model.named_modules())
    states = dict(_tensors(model))
    used: dict[Tensor, set[str]] = {}
    changed: dict[Tensor, str] = {}
    for program in programs:
        for name, piece in zip(names, program, strict=True):
            here = {x for called in modules_of(piece) for x in found[called].buffers()}
            here |= {states[x] for x in states_of(piece)}
            for tensor in here:
                used.setdefault(tensor, set()).add(name)
            for call in piece.calls:
                changed |= {states[x]: x for x in call.changes}
    for tensor, name in changed.items():
        if len(used.get(tensor, ())) > 1:
            raise UnrecordableError(
                f"buffer {name!r} is changed in one layer and used in others "
                f"({', '.join(sorted(used[tensor]))}), which may be in other processes: cut "
                "around them with cut_at="
            )


def _check_hooks(opened: Mapping[str, nn.Module]) -> None:
    for name, module in opened.items():
        if has_hooks(module):
            raise UnrecordableError(
                f"module {name!r} has hooks, which would never be called, as layers repeat "
                "only its operations: register them on a block or on a module between blocks"
            )


def _check_modes(model: nn.Module, opened: Mapping[str, nn.Module]) -> None:
    """Refuse a ``train()`` that keeps modules in another mode, as the layers do not call it."""
    around = set(opened.values())
    for mode in (True, False):
        model.train(mode)
        found = {name: x.training for name, x in model.named_modules()}
        for module in around:
            module.training = mode
            for child in module.children():
                if child not in around:
                    child.train(mode)
        for name, module in model.named_modules():
            if module.training != found[name]:
                raise UnrecordableError(
                    f"its train() leaves module {name!r} in another mode, and would never be "
                    "called, as layers repeat only operations: override train() in a block or in a "
                    "module between blocks"
                )


def _calls(model: nn.Module, example_inputs: Any) -> Counter[str]:
    """Return how often a forward calls each module. Errors of the model are raised as they are."""
    counts: Counter[str] = Counter()
    paths = {module: name for name, module in model.named_modules()}

    def count(module: nn.Module, _args: Any) -> None:
        if module in paths:
            counts[paths[module]] += 1

    inputs = Inputs(example_inputs, lengths_vary=False)
    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        args, kwargs = inputs.resized(_corner(inputs))
        with verify.unchanged(model), without_caches(model), torch.no_grad():
            model.eval()
            model(*args, **kwargs)
    finally:
        handle.remove()
    return counts


def _corner(inputs: Inputs) -> tuple[int, ...]:
    return (BATCH_SIZES[0], *(x.size for x in inputs.dimensions[1:]))


def _grid(inputs: Inputs) -> list[tuple[int, ...]]:
    grid: list[tuple[int, ...]] = [(size,) for size in BATCH_SIZES]
    for dimension in inputs.dimensions[1:]:
        grid = [(*x, size) for x in grid for size in (dimension.size, dimension.size - 1)]
    return grid


def _programs(
    model: nn.Module, inputs: Inputs, opened: Sequence[nn.Module]
) -> tuple[dict[bool, Recording], str | None]:
    """Return the recordings for evaluation and training, and why autocast is refused."""
    corner = _corner(inputs)
    programs = {}
    programs[False] = _over_sizes(model, inputs, opened)
    for sizes in _grid(inputs):
        inputs.know(sizes, training=False)
    model.train()
    once = _recorded(model, inputs, opened, corner)
    sizes = (BATCH_SIZES[1], *(x.size - 1 for x in inputs.dimensions[1:]))
    try:
        both = unify.with_training(programs[False], once, corner)
        # A number of one mode may depend on sizes.
        unify.check_size(both, _recorded(model, inputs, opened, sizes), sizes, training=True)
        programs = {False: both, True: both}
    except unify.DifferentCallsError:
        programs[True] = _over_sizes(model, inputs, opened)
    refused = None
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            disabled = _recorded(model, inputs, opened, corner)
        unify.check_without_gradients(programs[training], disabled, corner, training=training)
        try:
            with torch.autocast(_device(model).type, torch.bfloat16):
                under = _recorded(model, inputs, opened, corner)
            programs[training] = unify.with_autocast(programs[training], under, corner)
        except (ConfigurationError, RuntimeError, ValueError) as error:
            refused = str(error)
    return programs, refused


def _over_sizes(model: nn.Module, inputs: Inputs, opened: Sequence[nn.Module]) -> Recording:
    """Record at the corners of a grid of sizes, and see for which numbers of samples it holds."""
    made = unify.over_sizes(
        {sizes: _recorded(model, inputs, opened, sizes) for sizes in _grid(inputs)}
    )
    if not _holds(model, inputs, opened, made, 0, OTHER_BATCH_SIZE):
        raise UnrecordableError(
            "its operations depend on the number of samples in another way than by sums of "
            "products: move the code into a block"
        )
    single = _holds(model, inputs, opened, made, 0, 1)
    inputs.limit(0, 1 if single else BATCH_SIZES[0])
    return made


def _holds(
    model: nn.Module,
    inputs: Inputs,
    opened: Sequence[nn.Module],
    made: Recording,
    place: int,
    size: int,
) -> bool:
    """Return whether a model does at another size what a recording says."""
    corner = _corner(inputs)
    sizes = (*corner[:place], size, *corner[place + 1 :])
    try:
        found = _recorded(model, inputs, opened, sizes)
        unify.check_size(made, found, sizes, training=model.training)
    except (ConfigurationError, RuntimeError, ValueError, IndexError):
        return False
    return True


def _allow_lengths(
    model: nn.Module,
    inputs: Inputs,
    opened: Mapping[str, nn.Module],
    programs: Mapping[bool, Recording],
) -> bool:
    """Let lengths be verified at their first use, if that finds the recorded calls again."""
    if len(inputs.dimensions) == 1:
        return False
    try:
        probe = LengthProbe(model, opened, programs, inputs)
    except Exception:  # a model may have what cannot be copied
        return False
    if any(probe(training, _corner(inputs)[1:]) is not None for training in (False, True)):
        return False
    inputs.know(_corner(inputs), training=True)
    inputs.verify_lengths_by(probe)
    return True


def _limit_lengths(
    model: nn.Module,
    inputs: Inputs,
    opened: Sequence[nn.Module],
    programs: Mapping[bool, Recording],
) -> None:
    """Allow the lengths for which recordings hold.

    Two lengths do not tell a length from its remainder, or from the smaller of it and a limit.
    """
    for training in (False, True) if programs[False] is not programs[True] else (False,):
        model.train(training)
        for place, dimension in enumerate(inputs.dimensions[1:], 1):
            shorter, longer = (
                _fitting(model, inputs, opened, programs[training], place, sizes)
                for sizes in (_shorter(dimension.size), _longer(dimension.size))
            )
            shortest = min(shorter, default=dimension.size - 1)
            inputs.limit(place, shortest, max(longer, default=dimension.size))


def _fitting(
    model: nn.Module,
    inputs: Inputs,
    opened: Sequence[nn.Module],
    made: Recording,
    place: int,
    sizes: Iterable[int],
) -> list[int]:
    """Return the sizes before the first at which a recording does not hold."""
    return [*itertools.takewhile(lambda x: _holds(model, inputs, opened, made, place, x), sizes)]


def _shorter(length: int) -> Iterator[int]:
    """Yield smaller lengths down to 1, which get closer together."""
    yield length - 2
    while (length := length // 2) >= 1:
        yield length


def _longer(length: int) -> Iterator[int]:
    """Yield larger lengths that are cheap to run, and no multiples of the length."""
    yield from (x for x in (2 * length - 3, 4 * length - 3) if length < x <= LONGEST_PROBE)


def _recorded(
    model: nn.Module, inputs: Inputs, opened: Sequence[nn.Module], sizes: tuple[int, ...]
) -> Recording:
    args, kwargs = inputs.resized(sizes)
    return record(model, opened, args, kwargs)


def _device(model: nn.Module) -> torch.device:
    return next((x.device for x in model.parameters()), torch.device("cpu"))


# --- layers ------------------------------------------------------------------------------------


def _layers(
    model: nn.Module,
    inputs: Inputs,
    blocks: Sequence[str],
    pieces: Sequence[Piece],
    training: Sequence[Piece],
) -> ModelLayers:
    names = ["first", *blocks, "last"]
    layers: dict[str, RecordedLayer] = {}
    for place, name in enumerate(names):
        layer = RecordedLayer(inputs if place == 0 else None)
        for mode, chosen in ((False, pieces), (True, training)):
            following = chosen[place + 1] if place + 1 < len(chosen) else None
            write_forward(layer, chosen[place], following, training=mode, title=name)
        layers[name if name not in layers else f"{name}#{place}"] = layer
    _attach_called(model, list(layers.values()), pieces, training)
    order = list(model.state_dict())
    _attach_rest(model, list(layers.values()))
    made = ModelLayers(layers, pieces, order)
    difference = set(order) ^ set(made.state_dict())
    if difference:
        raise UnrecordableError(
            f"its state_dict has entries that are no parameters or buffers: {sorted(difference)}"
        )
    return made


def _attach_called(
    model: nn.Module,
    layers: Sequence[RecordedLayer],
    *programs: Sequence[Piece],
) -> None:
    """Give each layer the modules and tensors that it uses, under all of their names."""
    modules: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(module, []).append(name)
    tensors: dict[Tensor, list[str]] = {}
    for name, tensor in _tensors(model):
        tensors.setdefault(tensor, []).append(name)
    found = dict(model.named_modules())
    states = dict(_tensors(model))
    persistent = set(model.state_dict())
    order = {name: i for i, name in enumerate(states)}
    for layer, *pieces in zip(layers, *programs, strict=True):
        called = {found[x] for piece in pieces for x in modules_of(piece)}
        used = {states[x] for piece in pieces for x in states_of(piece)}
        used |= {x for module in called for _, x in _tensors(module)}
        names = {x: module for module in called for x in modules[module]}
        inside = tuple(f"{x}." for x in names)
        wanted: dict[str, nn.Module | Tensor] = {
            x: module for x, module in names.items() if not x.startswith(inside)
        }
        wanted |= {x: t for t in used for x in tensors[t] if not x.startswith(inside)}
        # In the model's order, so that the first name of a tensor is the model's.
        for name in sorted(wanted, key=lambda x: _place(order, x)):
            attach(layer, name, wanted[name], persistent=name in persistent)


def _place(order: Mapping[str, int], name: str) -> int:
    """Return the place of a tensor, or of a module's first one."""
    inside = (i for x, i in order.items() if x == name or x.startswith(f"{name}."))
    return min(inside, default=len(order))


def _attach_rest(model: nn.Module, layers: Sequence[RecordedLayer]) -> None:
    """Give the last layer the parameters and buffers that no forward uses."""
    here = {name for layer in layers for name in layer.state_dict()}
    here |= {name for layer in layers for name, _ in layer.named_parameters(remove_duplicate=False)}
    for name in model.state_dict():
        if name not in here:
            attach(layers[-1], name, _tensor(model, name))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found = getattr(model.get_submodule(owner), last, None)
    if not isinstance(found, Tensor):
        raise UnrecordableError(f"its state_dict has {name!r}, which is no parameter or buffer")
    return found


# --- verification ------------------------------------------------------------------------------


def _verify(model: nn.Module, layers: ModelLayers, inputs: Inputs) -> None:
    """Compare the layers with the model on other samples, sizes and padding."""
    full = tuple(x.size for x in inputs.dimensions[1:])
    shorter = _shorter_lengths(inputs)
    least = inputs.dimensions[0].minimum
    _verify_case(model, layers, inputs, (least, *shorter), training=False, padded=False)
    _verify_case(model, layers, inputs, (least, *shorter), training=False, padded=True)
    _verify_case(model, layers, inputs, (3, *full), training=True, padded=True)
    if least > 1:
        _verify_single(model, layers, inputs, shorter)


def _shorter_lengths(inputs: Inputs) -> tuple[int, ...]:
    """Return lengths below the example's that are allowed; those less by 1 were recorded."""
    for less in (2, 1):
        lengths = tuple(max(x.minimum, x.size - less) for x in inputs.dimensions[1:])
        if inputs.refusal((1, *lengths), training=False) is None:
            break
    return lengths


def _verify_single(
    model: nn.Module, layers: ModelLayers, inputs: Inputs, lengths: tuple[int, ...]
) -> None:
    """Allow batches of one sample where other operations give equal values.

    Strides of a dimension of size 1 mean nothing, and models look at them before they copy.
    """
    inputs.set_minimum(0, 1)
    try:
        for training, padded in itertools.product((False, True), repeat=2):
            _verify_case(model, layers, inputs, (1, *lengths), training=training, padded=padded)
    except (ConfigurationError, RuntimeError, ValueError, IndexError):
        inputs.set_minimum(0, BATCH_SIZES[0])


def _verify_case(
    model: nn.Module,
    layers: ModelLayers,
    inputs: Inputs,
    sizes: tuple[int, ...],
    *,
    training: bool,
    padded: bool,
) -> None:
    args, kwargs = inputs.resized(sizes, roll=sizes[0])
    if masks := _masks(kwargs):
        kwargs = {**kwargs, **{name: _mask_like(x, padded) for name, x in masks.items()}}
    elif padded and not training:
        return
    model.train(training)
    layers.train(training)
    given = kwargs or (args if len(args) > 1 else args[0])
    mode = "training" if training else "evaluation"
    verify.compare(
        model,
        lambda: model(*args, **kwargs),
        lambda: _run_apart(layers, given),
        f"in {mode} on a batch of sizes {', '.join(map(str, sizes))}"
        + (" with padding" if padded and masks else ""),
    )


def _run_apart(layers: ModelLayers, value: Any) -> Any:
    for layer in layers:
        value = verify.separate(layer(value))
    return value


def _masks(kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the padding masks among keyword arguments: 1 or 0 for each token."""
    return {
        name: x
        for name, x in kwargs.items()
        if name.endswith("mask") and isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] > 1
        if not x.is_floating_point() and bool(((x == 0) | (x == 1)).all())
    }


def _mask_like(mask: Tensor, padded: bool) -> Tensor:
    """Return a mask of ones, or one that ends with zeros in each second sample."""
    made = torch.ones_like(mask)
    if padded:
        made[::2, -(mask.shape[1] // 3 or 1) :] = 0
    return made
