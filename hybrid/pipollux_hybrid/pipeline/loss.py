"""The loss of one step: over the whole batch, or micro-batch by micro-batch.

In a multi-process pipeline, the last stage computes the loss of every micro-batch as soon as its
forward is done, so that its backward may start (``"microbatch"``). Their mean, weighted by samples,
is the loss of the batch only if the loss is a mean over samples. Other losses are a sum and a
weight (:class:`WeightedLoss`), or need all outputs at once (``"batch"``).

The graph is cut at the model's output: the loss computes the gradients of the outputs, and the
backward of the layers starts with them::

    layers → output ┊ output, a leaf → loss_fn → loss
                    ┊ gradient of the leaf    ←

This detects a loss that reaches the layers other than through the output, and a loss that is not a
mean over samples: its value for two micro-batches together is compared with its values for each.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .host_random import HostGenerators, equal_states, host_states
from .microbatch import (
    PLAIN,
    PyTree,
    gather,
    map_tensors,
    microbatch_sizes,
    scatter,
    tensors_of,
    unmarked,
)
from .samples import PerSample, is_marked

LossScope: TypeAlias = Literal["microbatch", "batch"]
"""Input of the loss function: each micro-batch, or the whole batch of a replica."""
CHECKED_STEPS = 10
"""First steps of an attempt, in which every pair of neighbouring micro-batches is compared."""
CHECK_INTERVAL = 50
"""Interval of later steps in which the first pair is compared."""
REASONS = "(padding or ignore_index, class weights, a loss that compares samples, random numbers)"


class WeightedLoss(NamedTuple):
    """A loss as a sum and its weight, whose mean ``sum / weight`` is taken over the whole batch.

    Return it from the loss function of :meth:`HybridParallel.train_step` if samples, or their
    tokens, have different weights: sums and weights are added over micro-batches, accumulation
    steps and replicas, and the gradient is that of Σ sum / Σ weight.

    Example::

        def loss_fn(logits, labels):
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            return pipollux.WeightedLoss(loss, (labels != -100).sum())
    """

    sum: Tensor
    """A scalar with a graph."""
    weight: Tensor | float
    """A number without a gradient, such as the number of tokens that count."""


LossFunction: TypeAlias = Callable[[PyTree, PyTree], Tensor | WeightedLoss]
"""Returns the loss, a scalar, from the model's output and the targets."""


@dataclass(frozen=True)
class LossValue:
    """The result of a loss function."""

    root: Tensor
    """A scalar with a graph: the mean, or the sum of a :class:`WeightedLoss`."""
    weight: float | None
    """That of a :class:`WeightedLoss`; None for a mean."""

    def scaled(self, share: float, divisor: float) -> Tensor:
        """Return a scalar whose gradients sum to those of the batch, up to its weight: the mean
        times the ``share`` of the batch's samples, or the sum of a :class:`WeightedLoss` over
        ``divisor``.
        """
        if self.weight is not None:
            return self.root / divisor
        return self.root if share == 1.0 else self.root * share

    @property
    def mean(self) -> Tensor:
        """The mean, float64, without a graph."""
        mean = self.root.detach().double()
        return mean if self.weight is None else mean / self.weight


def check_scope(scope: object) -> LossScope | None:
    """Return the scope; raise a ConfigurationError if it is unknown."""
    if scope is None or scope in get_args(LossScope):
        return cast("LossScope | None", scope)
    raise ConfigurationError(
        f"loss_scope={scope!r}: None, 'microbatch' and 'batch' are allowed; 'batch' computes the "
        "loss once over the whole batch of a replica"
    )


def loss_value(returned: object) -> LossValue:
    """Return the loss from the result of the script's function. Raises a ConfigurationError unless
    it is a scalar tensor or :class:`WeightedLoss` of one, with a finite weight of at least 0.
    """
    root, weight = returned, None
    if isinstance(returned, WeightedLoss):
        root, weight = returned.sum, float(returned.weight)
        if not 0.0 <= weight < math.inf:
            raise ConfigurationError(
                f"loss_fn returned a WeightedLoss with the weight {weight}: a finite number of at "
                "least 0 is needed, such as the number of tokens that count"
            )
    if isinstance(root, Tensor) and root.numel() == 1:
        return LossValue(root.reshape(()), weight)
    shown = f"a tensor of shape {tuple(root.shape)}" if isinstance(root, Tensor) else None
    raise ConfigurationError(
        f"loss_fn returned {shown or f'a {type(root).__name__}'}: return the loss alone, a scalar "
        "tensor, or pipollux.WeightedLoss(sum, weight); keep other values in a variable of your own"
    )


class HalvesCheck:
    """Compares losses of whole batches with those of their halves, in the same steps as
    :class:`MicrobatchLoss`: where replicas or accumulation steps divide batches, the mean over
    their parts is trained.
    """

    def __init__(self) -> None:
        self._step = 0

    def check(self, loss_fn: LossFunction, output: PyTree, targets: PyTree) -> None:
        """Raise a ConfigurationError if the loss is not a mean over samples. Values that cannot be
        cut, losses that draw random numbers, and modules that change buffers are not compared.
        """
        step, self._step = self._step, self._step + 1
        targets = _with_lists(output, targets)
        rows = _common_rows(output, targets)
        if rows < 2 or not (step < CHECKED_STEPS or step % CHECK_INTERVAL == 0):
            return
        sizes = microbatch_sizes(rows, 2)
        with _same_random_numbers(output):
            before, buffers = _random_states(output), _Buffers(loss_fn)
            whole, gradients = _computed(loss_fn, output, targets, 1.0)
            if buffers.restore() or not _equal_states(_random_states(output), before):
                return
            parts = []
            for half, target, size in zip(
                scatter(output, sizes), scatter(targets, sizes), sizes, strict=True
            ):
                try:
                    parts.append(_computed(loss_fn, half, target, size / rows))
                except Exception:  # the script's function takes batches of one size only
                    return
        tolerance = _tolerance(output, whole.root)
        values = [_number(v.scaled(n / rows, 1.0)) for (v, _), n in zip(parts, sizes, strict=True)]
        expected, found = sum(values), _number(whole.scaled(1.0, 1.0))
        alike = _close(found, expected, tolerance * max(abs(found), *map(abs, values)))
        if whole.weight is not None:
            weight = sum(value.weight or 0.0 for value, _ in parts)
            alike = alike and _close(whole.weight, weight, tolerance * abs(weight))
        halves = zip(*(found for _, found in parts), strict=True)
        pairs = zip(gradients, halves, strict=True)
        if not (alike and all(_alike(_joined(two), one, 0, tolerance) for one, two in pairs)):
            raise ConfigurationError(
                f"the loss is not a mean over samples: for this replica's batch it is {found:.6g}, "
                f"and the mean of both halves is {expected:.6g}, or their gradients differ "
                f"{REASONS}, so dividing batches among replicas and accumulation steps changes "
                "it; return pipollux.WeightedLoss(sum, weight), or pass loss_scope='batch' to "
                "train_step if the mean over replicas and accumulation steps is intended"
            )


class _Cut(NamedTuple):
    """A micro-batch with a computed loss, kept for the comparison with its neighbour."""

    output: PyTree
    """Detached from the layers; tensors with gradients are leaves."""
    value: LossValue


class MicrobatchLoss:
    """The loss of one step in the process of the last stage; with 0 ``samples`` gradients are zero.

    ``step`` is the number of the step in this attempt; None: neighbours are not compared. A single
    micro-batch has no neighbour, and is compared by ``halves``. Gradients are multiplied by
    ``factor``, a scalar tensor; None: 1.
    """

    def __init__(
        self,
        loss_fn: LossFunction,
        sizes: Sequence[int],
        targets: PyTree,
        *,
        scope: LossScope,
        samples: int,
        step: int | None,
        names: Mapping[Any, str],
        factor: Tensor | None = None,
        halves: HalvesCheck | None = None,
    ) -> None:
        self._factor, self._halves = factor, halves if len(sizes) == 1 else None
        self._loss_fn, self._sizes, self._targets = loss_fn, sizes, targets
        self._scope, self._counted, self._names = scope, samples > 0, names
        self._rows = sum(sizes)
        self._divisor = samples or self._rows
        first = step is not None and step < CHECKED_STEPS
        rarely = step is not None and step % CHECK_INTERVAL == 0
        self._compared = len(sizes) - 1 if first else int(rarely)
        # Cloned before the loss function may change them in place.
        self._given = map_tensors(torch.clone, targets) if self._compared else targets
        self._before: _Cut | None = None
        self._outputs: list[PyTree] = []
        self._losses: list[Tensor] = []
        self._weights: list[float | None] = []
        self._has_gradient = False

    def add(self, index: int, output: PyTree, target: PyTree) -> list[list[tuple[Tensor, Tensor]]]:
        """Add the output of a micro-batch, with its graph; ``target`` is used if it is the scope.

        Returns the start of the backward of each micro-batch whose gradients are now known, in
        order: tensors of its output, and their gradients. Raises a ConfigurationError if the loss
        does not satisfy the requirements of its scope.
        """
        if self._scope == "batch":
            self._outputs.append(output)
            return self._of_batch() if len(self._outputs) == len(self._sizes) else []
        cut = map_tensors(_leaf, output)
        before = map_tensors(_copy_of_leaf, cut) if index <= self._compared else cut
        if self._halves is not None:
            self._halves.check(self._loss_fn, cut, target)
        value = loss_value(self._loss_fn(map_tensors(_changeable, cut), target))
        if index == 0:
            self._check_reach(value.root, cut)
        share = self._sizes[index] / self._rows
        self._note(value, share)
        gradients = self._gradients(value, share, cut)
        if self._before is not None and index <= self._compared and value.root.requires_grad:
            self._compare(index, _Cut(before, value), gradients)
        self._before = _Cut(before, value) if index < self._compared else None
        return [self._roots(output, gradients)]

    def summary(self) -> tuple[Tensor, float | None]:
        """Return the loss of the batch, and the weight of a :class:`WeightedLoss`. Raises a
        ConfigurationError if no gradient leads from the loss to the model, or the loss is a
        :class:`WeightedLoss` for some micro-batches only.
        """
        if not self._has_gradient and self._counted:
            raise ConfigurationError(
                "the loss has no graph that leads to the model's output, so nothing would be "
                "trained: return it without detach(), item() or torch.no_grad()"
            )
        total = torch.stack(self._losses).sum()
        weights = [weight for weight in self._weights if weight is not None]
        if not weights:
            return total, None
        if len(weights) < len(self._weights):
            raise ConfigurationError(
                "loss_fn returned a WeightedLoss for some micro-batches and a tensor for others: "
                "return the same for every micro-batch"
            )
        return total / sum(weights), sum(weights)

    def _of_batch(self) -> list[list[tuple[Tensor, Tensor]]]:
        cuts = [map_tensors(_leaf, output) for output in self._outputs]
        whole = map_tensors(_changeable, gather(cuts, self._sizes))
        value = loss_value(self._loss_fn(whole, unmarked(self._targets)))
        self._check_reach(value.root, cuts)
        self._note(value, 1.0)
        gradients = self._gradients(value, 1.0, cuts)
        roots = []
        for output, cut in zip(self._outputs, cuts, strict=True):
            count = len(tensors_of(cut))
            roots.append(self._roots(output, gradients[:count]))
            gradients = gradients[count:]
        self._outputs = []
        return roots

    def _gradients(self, value: LossValue, share: float, leaves: PyTree) -> list[Tensor | None]:
        root = value.scaled(share, self._divisor)
        return _gradients(root if self._factor is None else root * self._factor, leaves)

    def _note(self, value: LossValue, share: float) -> None:
        self._losses.append(value.scaled(share, 1.0).detach().double())
        self._weights.append(value.weight)
        self._has_gradient |= value.root.requires_grad

    def _roots(
        self, output: PyTree, gradients: Sequence[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        return [
            (tensor, gradient if self._counted else torch.zeros_like(gradient))
            for tensor, gradient in zip(tensors_of(output), gradients, strict=True)
            if gradient is not None
        ]

    def _check_reach(self, root: Tensor, cut: PyTree) -> None:
        """Reject a loss that reaches parameters other than through the model's output."""
        leaves = {id(leaf) for leaf in tensors_of(cut)}
        for variable in _reached(root):
            if id(variable) in leaves:
                continue
            name = self._names.get(variable)
            called = f"parameter {name!r}" if name else f"a tensor of shape {tuple(variable.shape)}"
            raise ConfigurationError(
                f"the loss depends on {called} in another way than through the model's output: "
                "in a multi-process pipeline, a penalty on parameters would only reach those of "
                "the last stage, and no optimizer would train other tensors; use weight_decay, "
                "return such terms as outputs of layers, or use a single-process pipeline"
            )

    def _joined_targets(self, index: int) -> PyTree:
        sizes = list(self._sizes)
        sizes[index - 1 : index + 1] = [sum(sizes[index - 1 : index + 1])]
        return map_tensors(torch.clone, scatter(self._given, sizes)[index - 1])

    def _compare(self, index: int, cut: _Cut, gradients: Sequence[Tensor | None]) -> None:
        """Reject a loss that differs between two micro-batches together and each of them."""
        before = self._before
        assert before is not None  # noqa: S101  # the caller has checked
        sizes = self._sizes[index - 1 : index + 1]
        outputs = [map_tensors(Tensor.detach, one.output) for one in (before, cut)]
        joined = map_tensors(_leaf_like(cut.output), gather(outputs, sizes))
        with _same_random_numbers(joined):
            changeable = map_tensors(_changeable, joined)
            together = loss_value(self._loss_fn(changeable, self._joined_targets(index)))
        total = sum(sizes)
        parts = [
            _number(one.value.scaled(count / total, 1.0))
            for one, count in zip((before, cut), sizes, strict=True)
        ]
        expected, found = sum(parts), _number(together.scaled(1.0, 1.0))
        tolerance = _tolerance(joined, together.root)
        alike = _close(found, expected, tolerance * max(abs(found), *map(abs, parts)))
        if together.weight is not None:
            weight = (before.value.weight or 0.0) + (cut.value.weight or 0.0)
            alike = alike and _close(together.weight, weight, tolerance * abs(weight))
        if alike:
            theirs = self._gradients(together, total / self._rows, joined)
            pairs = zip(gradients, theirs, strict=True)
            alike = all(_alike(mine, both, sizes[0], tolerance) for mine, both in pairs)
        if not alike:
            raise ConfigurationError(
                f"the loss is not a mean over samples: for micro-batches {index - 1} and {index} "
                f"together it is {found:.6g}, and the mean of both is {expected:.6g}, or their "
                f"gradients differ {REASONS}; return pipollux.WeightedLoss(sum, weight), or pass "
                "loss_scope='batch' to train_step to compute it over the whole batch, or "
                "loss_scope='microbatch' if the mean over micro-batches is intended"
            )


def _with_lists(output: PyTree, targets: PyTree) -> PyTree:
    """Return targets with lists marked that have an entry for each row of the output, such as the
    boxes of each image.
    """
    first = next((x.shape[0] for x in tensors_of(output) if x.dim()), 0)
    if isinstance(targets, list) and len(targets) == first:
        return PerSample(targets)
    if isinstance(targets, tuple) and type(targets) is tuple:
        return tuple(_with_lists(output, item) for item in targets)
    return targets


def _common_rows(output: PyTree, targets: PyTree) -> int:
    """Return the size of dimension 0 of all tensors in both; 0 if they cannot be cut along it."""
    leaves = [*pytree.tree_leaves(output), *pytree.tree_leaves(targets)]
    if not all(leaf is None or isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        return 0
    cut = [leaf for leaf in pytree.tree_leaves(targets, is_leaf=is_marked) if not is_marked(leaf)]
    tensors = [*tensors_of(output), *tensors_of(cut)]
    rows = {x.shape[0] if x.dim() else 0 for x in tensors}
    return rows.pop() if len(rows) == 1 else 0


def _computed(
    loss_fn: LossFunction, output: PyTree, targets: PyTree, share: float
) -> tuple[LossValue, list[Tensor | None]]:
    """Compute a loss, without effects on what is given, and its gradients for the output."""
    leaves = map_tensors(_copy_of_leaf, output)
    copies = map_tensors(torch.clone, unmarked(targets))
    value = loss_value(loss_fn(map_tensors(_changeable, leaves), copies))
    return value, _gradients(value.scaled(share, 1.0), leaves)


def _number(scalar: Tensor) -> float:
    return float(scalar.detach())


def _joined(halves: Sequence[Tensor | None]) -> Tensor | None:
    found = [half for half in halves if half is not None]
    return torch.cat(found) if len(found) == len(halves) else None


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copy_of_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Alias(torch.autograd.Function):
    """Identity whose result may be changed in place, unlike a leaf."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _changeable(tensor: Tensor) -> Tensor:
    """Return a tensor that a loss function may change in place, as in the plain model."""
    if not tensor.requires_grad:
        return tensor
    apply: Any = _Alias.apply  # torch does not annotate it
    changeable: Tensor = apply(tensor)
    return changeable


def _leaf_like(output: PyTree) -> Callable[[Tensor], Tensor]:
    wanted = iter([tensor.requires_grad for tensor in tensors_of(output)])
    return lambda tensor: tensor.detach().requires_grad_(next(wanted))


def _gradients(root: Tensor, leaves: PyTree) -> list[Tensor | None]:
    tensors = tensors_of(leaves)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not wanted or not root.requires_grad:
        return [None] * len(tensors)
    found = iter(torch.autograd.grad(root, wanted, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in tensors]


def _reached(root: Tensor) -> Iterator[Tensor]:
    """Return the leaves that the graph of a scalar leads to."""
    seen: set[Any] = set()
    waiting = [root.grad_fn] if root.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            yield variable
        waiting += [after for after, _ in node.next_functions if after is not None]


def _variables(function: FunctionType) -> Iterator[Any]:
    """Return what a function may use, but for its arguments; variables may have no value yet."""
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (function.__globals__.get(name) for name in function.__code__.co_names)
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents


class _Buffers:
    """The buffers of modules that a loss function uses, such as a running center."""

    def __init__(self, loss_fn: object) -> None:
        while isinstance(loss_fn, partial):
            loss_fn = loss_fn.func
        used = [loss_fn, getattr(loss_fn, "__self__", None)]
        if inspect.isfunction(loss_fn):
            used += _variables(loss_fn)
        self._kept = [
            (module, name, buffer, buffer.clone())
            for root in used
            if isinstance(root, nn.Module)
            for module in root.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> bool:
        """Restore them; return whether any had changed."""
        changed = False
        for module, name, buffer, value in self._kept:
            if module._buffers.get(name) is not buffer or not torch.equal(buffer, value):
                changed = True
                module._buffers[name] = buffer.copy_(value)
        return changed


@contextmanager
def _same_random_numbers(output: PyTree) -> Iterator[None]:
    with (
        torch.random.fork_rng(devices=_cuda_devices(output)),
        HostGenerators.replaced([host_states()]),
    ):
        yield


def _random_states(output: PyTree) -> tuple[list[Tensor], Any]:
    devices = [torch.cuda.get_rng_state(device) for device in _cuda_devices(output)]
    return [torch.get_rng_state(), *devices], host_states()


def _equal_states(some: tuple[list[Tensor], Any], others: tuple[list[Tensor], Any]) -> bool:
    pairs = zip(some[0], others[0], strict=True)
    return all(torch.equal(*pair) for pair in pairs) and equal_states(some[1], others[1])


def _cuda_devices(output: PyTree) -> list[int]:
    return sorted({x.device.index for x in tensors_of(output) if x.device.type == "cuda"})


def _tolerance(output: PyTree, root: Tensor) -> float:
    """Return the relative tolerance between two computations of the same values."""
    kinds = [root.dtype, *(x.dtype for x in tensors_of(output) if x.is_floating_point())]
    least = 3e-4 if root.is_cuda else 0.0  # matrix products may use TF32
    return max(least, *(0.3 * math.sqrt(torch.finfo(kind).eps) for kind in kinds))


def _close(found: float, expected: float, tolerance: float) -> bool:
    """Return whether numbers are close; non-finite ones are left to the script."""
    if not (math.isfinite(found) and math.isfinite(expected)):
        return True
    return abs(found - expected) <= tolerance


def _alike(mine: Tensor | None, both: Tensor | None, first: int, tolerance: float) -> bool:
    """Return whether a gradient equals that of two micro-batches together, from a row on."""
    if mine is None or both is None:
        return mine is None and (both is None or not both[first:].any())
    other = both[first:]
    if other.shape != mine.shape:
        return False
    scale = both.abs().max()
    if mine.numel() == 0 or not (torch.isfinite(mine).all() and torch.isfinite(scale)):
        return True
    return bool((mine - other).abs().max() <= tolerance * torch.maximum(scale, mine.abs().max()))
