"""An independent comparison of layers with the model that they were made of.

It shares no code with the library's own. Each layer is a copy of its own, as if in a process of its
own, and what it receives is cloned. The original is a copy made before the conversion.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipollux_hybrid.conversion.as_layers import as_layers
from pipollux_hybrid.conversion.blocks import choose_blocks
from pipollux_hybrid.errors import ConfigurationError

from .architectures import ORDINARY, Case, NotBuiltError, tensors_of, without_caches

TOLERANCE = 1e-12
"""Allowed difference, relative to the largest value of a tensor."""


@dataclass
class Result:
    """What became of a row."""

    result: str
    """exact, rejected, wrong or not tried"""
    detail: str = ""
    layers: int = 0
    lengths: str = ""
    """Whether sequences may be shorter or longer than the example's: any, limited, or empty."""
    carried: int = 0
    shared: int = 0
    """Parameters in more than one layer."""
    notes: list[str] = field(default_factory=list)


class WrongError(Exception):
    """Layers and model differ."""


def check(case: Case) -> Result:
    """Convert a model and compare its layers with it."""
    model = case.model.train()
    original = copy.deepcopy(model)
    without_caches(original)
    original.eval()  # which may change itself in its first forward, as the model does
    for size in (1, 2, 3):  # some models have several rows of inputs for each sample
        with torch.no_grad():
            _expected(original, _batch(case.example, size, size), f"{size} samples")
    original.train()
    try:
        layers = as_layers(model, case.example)
    except ConfigurationError as error:
        return Result("rejected", str(error))
    result = Result("exact", layers=len(layers))
    result.carried = max((len(x.returns) for x in layers._pieces), default=0)
    try:
        _same_state(layers, model, original)
        reference = copy.deepcopy(original)
        copies = [copy.deepcopy(layer) for layer in layers.children()]
        for cases in (_evaluations(case.example), _trainings(case.example)):
            for what, batch, training in cases:
                model.train(training)  # which the layers compare with their own mode
                if "longer" in what and not _runs(reference, batch):
                    continue
                try:
                    _compare(reference, copies, batch, training=training, what=what)
                except ConfigurationError as error:
                    if ("shorter" in what or "longer" in what) and "recorded for" in str(error):
                        result.lengths = "limited"
                        continue
                    return dataclasses.replace(result, result="rejected", detail=f"{what}: {error}")
        model.eval()
        _interleaved(original, layers, case.example)
    except WrongError as error:
        result.result, result.detail = "wrong", str(error)
        if not _is_deterministic(original, case.example):
            result.result = "not tried"
            result.detail = "the original differs from itself under the same seed"
    result.lengths = result.lengths or ("any" if _masks(case.example) else "")
    owners: dict[Tensor, set[int]] = {}
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            owners.setdefault(parameter, set()).add(number)
    result.shared = sum(len(x) > 1 for x in owners.values())
    return result


def _same_state(layers: nn.Module, model: nn.Module, original: nn.Module) -> None:
    before, after, ours = original.state_dict(), model.state_dict(), layers.state_dict()
    if list(ours) != list(before):
        raise WrongError(f"state_dict: {sorted(set(ours) ^ set(before))[:4]} or another order")
    for name, value in before.items():
        if not torch.equal(value, after[name]) or not torch.equal(value, ours[name]):
            raise WrongError(f"the conversion changes {name}")
    if {n for n, _ in model.named_parameters()} != {n for n, _ in layers.named_parameters()}:
        raise WrongError("named_parameters differ")
    if not all(x.training for x in model.modules()):
        raise WrongError("the conversion changes the mode of a module")


# --- batches -----------------------------------------------------------------------------------


def _evaluations(example: Any) -> Iterator[tuple[str, Any, bool]]:
    masked = bool(_masks(example))
    yield "1 sample", _batch(example, 1, 11), False
    if masked:
        yield "1 sample, right padding", _batch(example, 1, 12, pad="right"), False
        yield "3 samples, right padding", _batch(example, 3, 13, pad="right"), False
        yield "3 samples, left padding", _batch(example, 3, 14, pad="left"), False
        yield "4 samples, shorter", _batch(example, 4, 15, shorter=1), False
        yield "4 samples, shorter, left padding", _batch(example, 4, 16, "left", 3), False
        yield "3 samples, longer, right padding", _batch(_longer(example, 4), 3, 25, "right"), False
        yield "2 samples, much longer", _batch(_longer(example, 40), 2, 26), False
    else:
        yield "3 samples", _batch(example, 3, 17), False
        yield "4 samples", _batch(example, 4, 18), False


def _trainings(example: Any) -> Iterator[tuple[str, Any, bool]]:
    yield "3 samples in training", _batch(example, 3, 19), True
    if _masks(example):
        yield "4 samples in training, right padding", _batch(example, 4, 20, pad="right"), True
        yield "1 sample in training, left padding", _batch(example, 1, 21, pad="left"), True
    else:
        yield "4 samples in training", _batch(example, 4, 22), True


def _longer(example: Any, count: int) -> Any:
    """Return an example with more tokens."""
    length = next(example[name].shape[1] for name in _masks(example))

    def repeated(x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != length:
            return x
        return x[:, torch.arange(length + count) % length]

    return {name: repeated(x) for name, x in example.items()}


def _runs(model: nn.Module, batch: Any) -> bool:
    """Return whether a model takes a batch: positions, for example, may be limited."""
    try:
        with torch.no_grad():
            _called(copy.deepcopy(model).eval(), batch)
    except Exception:  # models raise many classes
        return False
    return True


def _masks(example: Any) -> list[str]:
    if not isinstance(example, dict):
        return []
    return [name for name in example if name.endswith("attention_mask")]


def _batch(example: Any, size: int, seed: int, pad: str = "", shorter: int = 0) -> Any:
    """Return another batch, with tokens and values that the example does not have."""
    random = torch.Generator().manual_seed(seed)

    def fresh(name: str, tensor: Tensor) -> Tensor:
        shape = [size, *tensor.shape[1:]]
        if name.endswith("attention_mask"):
            return _padded(torch.ones(*shape, dtype=tensor.dtype), pad)
        if tensor.is_floating_point():
            return torch.randn(*shape, generator=random)
        if name.endswith("input_ids"):
            return torch.randint(ORDINARY.start, ORDINARY.stop, tuple(shape), generator=random)
        return tensor[torch.randint(0, len(tensor), (size,), generator=random)]

    if not isinstance(example, dict):
        return fresh("", example)
    made = {name: fresh(name, x) for name, x in example.items()}
    for name in _masks(example):
        tokens = made.get(name.replace("attention_mask", "input_ids"))
        if tokens is not None and tokens.shape == made[name].shape:
            tokens[made[name] == 0] = 0  # pad_token_id
    if shorter:
        length = next(example[name].shape[1] for name in _masks(example))
        made = {
            name: x[:, : length - shorter] if x.dim() > 1 and x.shape[1] == length else x
            for name, x in made.items()
        }
    return made


def _padded(mask: Tensor, side: str) -> Tensor:
    for row, sample in enumerate(mask):
        count = (2, 0, 3, 1)[row % 4]
        if side == "right" and count:
            sample[-count:] = 0
        elif side == "left" and count:
            sample[:count] = 0
    return mask


# --- comparison --------------------------------------------------------------------------------


def _compare(
    reference: nn.Module, copies: list[nn.Module], batch: Any, *, training: bool, what: str
) -> None:
    for module in (reference, *copies):
        module.train()  # some keep what they compute, with its graph, until this is called
        module.train(training)
        module.zero_grad()
    torch.manual_seed(5)
    expected = _expected(reference, batch, what)
    torch.manual_seed(5)
    value = batch
    for layer in copies:
        value = _cloned(layer(value))
    _same_output(expected, value, what)
    weights = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(6)) for x in _roots(expected)
    ]
    _backward(expected, weights)
    _backward(value, weights)
    _same_gradients(reference, copies, what)
    _same_buffers(reference, copies, what)


def _expected(model: nn.Module, batch: Any, what: str) -> Any:
    try:
        return _called(model, batch)
    except Exception as error:  # models raise many classes
        raise NotBuiltError(f"the original fails, {what}: {error}") from error


def _called(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def _roots(output: Any) -> list[Tensor]:
    return [x for x in tensors_of(output) if x.requires_grad]


def _backward(output: Any, weights: list[Tensor]) -> None:
    roots = _roots(output)
    torch.autograd.backward(roots, [w.to(x.dtype) for w, x in zip(weights, roots, strict=True)])


def _cloned(value: Any) -> Any:
    """Return a copy of a value in memory of its own, as another process would receive it."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if type(value) is tuple:
        return tuple(_cloned(x) for x in value)
    return value


def _same_output(expected: Any, found: Any, what: str) -> None:
    if type(expected) is not type(found):
        raise WrongError(f"{what}: a {type(found).__name__}, not {type(expected).__name__}")
    if isinstance(expected, dict) and list(expected) != list(found):
        raise WrongError(f"{what}: outputs {list(found)}, not {list(expected)}")
    ours, theirs = tensors_of(found), tensors_of(expected)
    if len(ours) != len(theirs):
        raise WrongError(f"{what}: {len(ours)} tensors, not {len(theirs)}")
    for place, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        if one.requires_grad != other.requires_grad:
            raise WrongError(f"{what}: output {place} has a gradient in one only")
        _close(one, other, f"{what}: output {place}")


def _same_gradients(reference: nn.Module, copies: list[nn.Module], what: str) -> None:
    names = _names(reference.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    for layer in copies:
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None:
                name = names[name]
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    largest = max(
        (
            float(x.grad.nan_to_num(0, 0, 0).abs().max())
            for x in reference.parameters()
            if x.grad is not None and x.numel()
        ),
        default=0.0,
    )
    for name, parameter in reference.named_parameters():
        if (parameter.grad is None) != (name not in found):
            raise WrongError(f"{what}: gradient of {name} is there in one only")
        if parameter.grad is not None:
            # Some gradients are zero but for rounding, as of the biases of keys in attention.
            rounding = 1e-14 * largest
            _close(parameter.grad, found[name], f"{what}: gradient of {name}", rounding)


def _names(named: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the first name of each tensor, by all of its names."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(tensor, name) for name, tensor in named}


def _same_buffers(reference: nn.Module, copies: list[nn.Module], what: str) -> None:
    expected = dict(reference.named_buffers(remove_duplicate=False))
    for layer in copies:
        for name, buffer in layer.named_buffers():
            _close(expected[name], buffer, f"{what}: buffer {name}")


def _close(expected: Tensor, found: Tensor, what: str, rounding: float = 1e-18) -> None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise WrongError(
            f"{what}: {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} "
            f"{expected.dtype}"
        )
    one, other = expected.detach(), found.detach()
    if not one.is_floating_point() or not one.numel():
        if not torch.equal(one, other):
            raise WrongError(f"{what}: differs")
        return
    regular = one.isfinite()
    if not torch.equal(one[~regular].nan_to_num(), other[~regular].nan_to_num()):
        raise WrongError(f"{what}: differs in infinities")
    one, other = one[regular].double(), other[regular].double()
    if not one.numel():
        return
    scale, gap = float(one.abs().max()), float((one - other).abs().max())
    if not gap <= max(scale * TOLERANCE, rounding):
        raise WrongError(f"{what}: differs by {gap:.2g} of {scale:.2g}")


def _interleaved(original: nn.Module, layers: nn.Module, example: Any) -> None:
    """Run two batches through each layer in turn, as micro-batches of a pipeline are."""
    reference = copy.deepcopy(original).eval()
    copies = [copy.deepcopy(layer).eval() for layer in layers.children()]
    batches = [_batch(example, 3, 23), _batch(example, 4, 24, pad="right")]
    with torch.no_grad():
        expected = [_called(reference, x) for x in batches]
        values: list[Any] = list(batches)
        for layer in copies:
            values = [_cloned(layer(x)) for x in values]
    for one, other in zip(expected, values, strict=True):
        _same_output(one, other, "two batches in turn")


def _is_deterministic(original: nn.Module, example: Any) -> bool:
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append(tensors_of(_called(copy.deepcopy(original).train(), example)))
    return all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


# --- torch's pipeline() ------------------------------------------------------------------------


def check_pipeline(case: Case) -> str:
    """Say at which sizes ``torch.distributed.pipelining.pipeline`` equals the original."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = case.model.eval()
    without_caches(model)
    original = copy.deepcopy(model)
    blocks = choose_blocks(model, _calls(model, case.example), None)
    middle = blocks[len(blocks) // 2]
    args, kwargs = ((), case.example) if isinstance(case.example, dict) else ((case.example,), {})
    try:
        pipe: Callable[..., Any] = pipeline(
            model, args, kwargs, split_spec={middle: SplitPoint.BEGINNING}
        )
        exact = []
        for size in (4, 3):
            batch = _batch(case.example, size, 31)
            given = ((), batch) if isinstance(batch, dict) else ((batch,), {})
            expected = tensors_of(_called(original, batch))
            found = tensors_of(pipe(*given[0], **given[1]))
            if len(expected) != len(found):
                return f"fails: {len(found)} outputs of {len(expected)}"
            for one, other in zip(expected, found, strict=True):
                _close(one, other, "output")
            exact.append(size)
    except Exception as error:  # torch's exporter raises many classes
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        return f"traced size only ({text})" if "exact" in locals() and exact else f"fails: {text}"
    return "both sizes"


def _calls(model: nn.Module, example: Any) -> Counter[str]:
    """Return how often a forward calls each module."""
    counts: Counter[str] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        _called(model, example)
    for handle in handles:
        handle.remove()
    return counts
