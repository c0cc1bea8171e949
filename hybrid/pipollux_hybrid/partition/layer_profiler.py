"""Measurement of each layer's costs on its device: the profile for cutting stages.

Every layer runs alone, forward and backward, at several micro-batch sizes b. The minimum time of a
few runs counts for each size, as other load on the machine only adds time, and a line α + β·b is
fitted (:class:`pipollux_perfmodel.Layer`). Backwards include only what needs a gradient: a frozen
first part of a model has none. Layers are copied one at a time, so that parameters, gradients,
running statistics and random numbers stay unchanged, and a model that fits on no single device can
be profiled on one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.pipeline.microbatch import PyTree, map_tensors, num_samples, tensors_of
from pipollux_hybrid.pipeline.samples import PerSample, Whole, is_marked, plain_batch
from pipollux_perfmodel import Layer, LayerProfile

from .layer_memory import SavedBytes, kept_bytes, optimizer_bytes

ROUNDS = 7
"""Timed runs of a layer at each size."""
FEWEST_ROUNDS = 3
PATIENCE = 1.0
"""Seconds after which the timing of a layer ends, once it had the minimum number of rounds."""
SMALLEST_SAMPLE = 4
"""Smaller samples are repeated up to this size, so that there are two sizes for a line."""

Skips = dict[Any, Tensor | None]


def profile_layers(
    module: nn.Sequential,
    example_inputs: PyTree,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    rounds: int = ROUNDS,
) -> LayerProfile:
    """Measure the costs of each layer of a model.

    Example::

        profile = profile_layers(module, inputs[:32], optimizer=optimizer, device="cuda:0")
        balance = pipollux_perfmodel.partition(profile, num_stages=4, num_microbatches=8)

    Args:
        module: The layers, in the mode (training or evaluation) to measure. Supports skip
            connections of torchgpipe's ``skippable``.
        example_inputs: Inputs of the module, tensors of shape [batch, …], ideally with as many
            samples as a replica processes at once; times are measured at a quarter, half and all of
            them.
        optimizer: Optimizer of the module's parameters, for the bytes of its state.
        device: Device for the measurement; by default that of the first parameter, else the CPU.
        rounds: Timed runs of each layer at each size.

    Returns:
        Seconds and bytes by layer. ``parameter_bytes`` counts trained parameters;
        ``optimizer_bytes`` includes frozen parameters and buffers, which have no gradients.

    Raises:
        ConfigurationError: A layer cannot be copied or fails on the inputs; the message names it.
    """
    first = next(module.parameters(), None)
    where = torch.device(device if device is not None else "cpu" if first is None else first.device)
    guard: AbstractContextManager[Any] = (
        torch.cuda.device(where) if where.type == "cuda" else nullcontext()
    )
    cuda = [where] if where.type == "cuda" else []
    with guard, torch.random.fork_rng(devices=cuda), torch.enable_grad():
        # cuBLAS warns if its kernel is the first one of an autograd thread.
        torch.ones((), device=where, requires_grad=True).mul(1.0).backward()
        flows = _flows(example_inputs, where)
        largest = flows[-1]
        input_bytes = kept_bytes(tensors_of(largest.batch)) / largest.size
        rates = optimizer_bytes(optimizer) if optimizer is not None else {}
        layers, saved_before = [], SavedBytes()
        for name, layer in module.named_children():
            measured = _measure(name, layer, flows, where, rounds, saved_before)
            layers.append(_priced(name, layer, flows, measured, rates))
            saved_before = measured.saved
    return LayerProfile(tuple(layers), input_bytes)


@dataclass
class _Flow:
    size: int
    batch: PyTree
    skips: Skips


@dataclass
class _Measured:
    """Seconds by size, the minimum over all rounds, and the bytes kept at the largest size."""

    forward: list[float]
    backward: list[float]
    saved: SavedBytes


class _Skips(SkipTracker):
    """Skip connections of a layer that runs alone: pops are provided, stashes are recorded."""

    def __init__(self, arriving: Skips) -> None:
        super().__init__()
        self.arriving = arriving
        self.leaving: Skips = {}
        self.popped: set[Any] = set()

    def load(self, batch: object, ns: object, name: str) -> Tensor | None:  # noqa: ARG002  # torchgpipe's signature
        if (ns, name) in self.leaving:  # a layer of layers stashes and pops it
            return self.leaving.pop((ns, name))
        self.popped.add((ns, name))
        return self.arriving[ns, name]

    def save(self, batch: object, ns: object, name: str, tensor: Tensor | None) -> None:  # noqa: ARG002  # torchgpipe's signature
        self.leaving[ns, name] = tensor


class _Clock:
    """Times on a device: events on a GPU, without synchronization in between."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def _flows(sample: PyTree, device: torch.device) -> list[_Flow]:
    """Return the sample at its sizes, smallest first."""
    count = num_samples(sample)
    repeats = -(-SMALLEST_SAMPLE // count)
    count *= repeats
    # At least two samples: batch normalization rejects one.
    sizes = sorted({size for size in (count // 4, count // 2, count) if size > 1})

    def cut(leaf: Any, size: int) -> Any:
        if isinstance(leaf, Whole):
            return map_tensors(lambda tensor: tensor.detach().to(device), leaf.value)
        value = leaf.value if isinstance(leaf, PerSample) else leaf
        if isinstance(value, Tensor):
            return torch.cat([value.detach()] * repeats)[:size].to(device)
        return leaf if value is leaf else (value * repeats)[:size]

    batch = plain_batch(sample)
    return [
        _Flow(size, pytree.tree_map(partial(cut, size=size), batch, is_leaf=is_marked), {})
        for size in sizes
    ]


def _measure(
    name: str,
    layer: nn.Module,
    flows: Sequence[_Flow],
    device: torch.device,
    rounds: int,
    saved_before: SavedBytes,
) -> _Measured:
    try:
        worker = copy.deepcopy(layer).to(device)
        saved = SavedBytes(worker, saved_before)
        nexts = [
            _once(worker, flow, device, saved if flow is flows[-1] else None) for flow in flows
        ]
        runs = _rounds(worker, flows, device, rounds)
    except Exception as error:  # whatever the user's layer raises
        raise ConfigurationError(
            f"layer {name!r} ({type(layer).__name__}) fails on the inputs that layers are measured "
            f"on: {error}. Give example_inputs that the module takes, or balance=[…]"
        ) from error
    for flow, (_, after, popped) in zip(flows, nexts, strict=True):
        # A skip connection is popped once, so its tensor is not needed again.
        flow.skips = {k: t for k, t in flow.skips.items() if k not in popped} | after.skips
        flow.batch = after.batch
    forward, backward = ([min(run) for run in zip(*phase, strict=True)] for phase in runs)
    return _Measured(forward, backward, saved)


def _rounds(
    worker: nn.Module, flows: Sequence[_Flow], device: torch.device, rounds: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return seconds forward and backward, [round][size]; sizes alternate, as machines drift."""
    began = time.perf_counter()
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.perf_counter() - began > PATIENCE:
            break
        times = [_once(worker, flow, device, None)[0] for flow in flows]
        forward.append([f for f, _ in times])
        backward.append([b for _, b in times])
    return forward, backward


def _once(
    worker: nn.Module, flow: _Flow, device: torch.device, saved: SavedBytes | None
) -> tuple[tuple[float, float], _Flow, set[Any]]:
    """Run a layer; return its seconds, its output and stashes, and the skips that it popped."""
    inputs, arriving = map_tensors(_arrived, flow.batch), map_tensors(_arrived, flow.skips)
    tracker, clock = _Skips(arriving), _Clock(device)
    if saved is not None:
        given = [*tensors_of(flow.batch), *tensors_of(flow.skips)]
        saved.note_inputs(given, [*tensors_of(inputs), *tensors_of(arriving)])
    with use_skip_tracker(tracker), saved.hooks() if saved is not None else nullcontext():
        start = clock.mark()
        output = worker(inputs)
        middle = clock.mark()
    if saved is not None:
        saved.note_stashed(tensors_of(tracker.leaving))
    roots = [x for x in (*tensors_of(output), *tensors_of(tracker.leaving)) if x.requires_grad]
    ones = [torch.ones_like(x) for x in roots]
    begun = clock.mark()
    if roots:
        torch.autograd.backward(roots, ones)
    end = clock.mark()
    seconds = clock.seconds(start, middle), clock.seconds(begun, end) if roots else 0.0
    after = _Flow(flow.size, map_tensors(_left, output), map_tensors(_left, tracker.leaving))
    return seconds, after, tracker.popped


def _arrived(tensor: Tensor) -> Tensor:
    """Return a layer's input: a writable copy that is not a leaf, as in the pipeline."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _left(tensor: Tensor) -> Tensor:
    """Return a layer's output without its graph; `requires_grad` stays unchanged."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _priced(
    name: str,
    layer: nn.Module,
    flows: Sequence[_Flow],
    measured: _Measured,
    rates: Mapping[nn.Parameter, float],
) -> Layer:
    sizes, largest = [flow.size for flow in flows], flows[-1]
    forward, backward = _line(sizes, measured.forward), _line(sizes, measured.backward)
    trained = [p for p in layer.parameters() if p.requires_grad]
    still = [p for p in layer.parameters() if not p.requires_grad]
    return Layer(
        *forward,
        *backward,
        parameter_bytes=float(sum(p.nbytes for p in trained)),
        optimizer_bytes=sum(rates.get(p, 0.0) * p.nbytes for p in trained)
        + sum(x.nbytes for x in (*still, *layer.buffers())),
        activation_bytes=measured.saved.total / largest.size,
        output_bytes=kept_bytes([*tensors_of(largest.batch), *tensors_of(largest.skips)])
        / largest.size,
        # Gradients are sent in at least float32.
        copy_bytes=float(sum(p.numel() * max(p.element_size(), 4) for p in trained)),
        name=name,
    )


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return α and β ≥ 0 of the line α + β·b with the least squared relative errors."""
    x = torch.tensor(sizes, dtype=torch.float64)
    y = torch.tensor(seconds, dtype=torch.float64)
    if not bool((y > 0).all()):
        return 0.0, float((y / x).mean())
    rows = torch.stack([1 / y, x / y], dim=1)
    alpha, beta = torch.linalg.lstsq(rows, torch.ones_like(y)[:, None]).solution.flatten().tolist()
    if beta < 0:
        return float((1 / y).sum() / (1 / y).square().sum()), 0.0
    if alpha < 0:
        return 0.0, float((x / y).sum() / (x / y).square().sum())
    return alpha, beta
