"""The measured timeline of one step: when each stage computes which micro-batch.

In a sampled step, hooks on every stage record the start and end of its forward, and hooks on its
boundary tensors record when gradients enter and leave. On CUDA devices the records are events on
the stage's stream, read some steps later, so that nothing waits for them; on others they are clock
times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torchgpipe.checkpoint import is_checkpointing, is_recomputing

from pipollux_perfmodel import StageEvent

__all__ = ["Recording", "StageTimer", "stage_times"]

Mark = float | torch.cuda.Event
Phase = Literal["forward", "backward"]


@dataclass
class _Span:
    stage: int
    microbatch: int
    phase: Phase
    start: Mark
    end: Mark | None = None


@dataclass
class _Counts:
    forward: int = 0
    recomputed: int = 0
    open: list[_Span] = field(default_factory=list)


class Recording:
    """A timed step, to be read when its devices are done with it; each span has an end."""

    def __init__(self, spans: Sequence[_Span], devices: Sequence[torch.device]) -> None:
        self._spans = list(spans)
        self._devices = list(devices)

    def done(self) -> bool:
        """Return whether :meth:`events` can be read without waiting."""
        marks = (mark for span in self._spans for mark in (span.start, span.end))
        return all(mark.query() for mark in marks if isinstance(mark, torch.cuda.Event))

    def events(self) -> list[StageEvent]:
        """Return the timeline, in seconds from its first event, sorted by start."""
        origins: dict[torch.device, Mark] = {}
        events = []
        for span in self._spans:
            # Only events of one device can be compared.
            origin = origins.setdefault(self._devices[span.stage], span.start)
            start, end = _seconds(origin, span.start), _seconds(origin, span.end)
            events.append(StageEvent(span.stage, span.microbatch, span.phase, start, end))
        if all(isinstance(origin, torch.cuda.Event) for origin in origins.values()):
            events = align(events, self._devices)
        first = min(event.start for event in events)
        shifted = (e._replace(start=e.start - first, end=e.end - first) for e in events)
        return sorted(shifted, key=lambda event: event.start)


class StageTimer:
    """Times one step of a pipeline; ``clock`` is for devices without timing events."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        devices: Sequence[torch.device],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._stages = list(stages)
        self._devices = list(devices)
        self._handles: list[RemovableHandle] = []
        self._spans: list[_Span] = []
        self._counts: list[_Counts] = []
        self._num_recomputed = 0

    @property
    def running(self) -> bool:
        """Whether a step is being timed."""
        return bool(self._handles)

    def start(self, num_recomputed: int) -> None:
        """Time the next forward and backward, with this number of recomputed micro-batches."""
        self.cancel()
        self._num_recomputed = num_recomputed
        self._counts = [_Counts() for _ in self._stages]
        for k, stage in enumerate(self._stages):
            self._handles.append(stage.register_forward_pre_hook(self._before(k)))
            self._handles.append(stage.register_forward_hook(self._after(k)))

    def gradient_arrived(self, k: int) -> None:
        """Record a gradient of stage ``k``: its backward lasted at least until now. As the first
        stage's input needs no gradient, this determines the end of its backward.
        """
        if self._handles and k == 0 and self._counts[0].open:
            self._counts[0].open[-1].end = self._mark(0)

    def stop(self) -> Recording | None:
        """End the step and return its timing; None if it was not timed."""
        spans = [span for span in self._spans if span.end is not None]
        self.cancel()
        return Recording(spans, self._devices) if spans else None

    def cancel(self) -> None:
        """Discard the step being timed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._spans = []

    def _mark(self, k: int) -> Mark:
        device = self._devices[k]
        if device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _open(self, k: int, microbatch: int, phase: Phase) -> _Span:
        span = _Span(k, microbatch, phase, self._mark(k))
        self._spans.append(span)
        self._counts[k].open.append(span)
        return span

    def _before(self, k: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            counts = self._counts[k]
            if is_recomputing():
                microbatch = self._num_recomputed - 1 - counts.recomputed
                counts.recomputed += 1
                self._open(k, microbatch, "backward")
            else:
                microbatch = counts.forward
                counts.forward += 1
                self._open(k, microbatch, "forward")
            if torch.is_grad_enabled() and not is_checkpointing():
                self._close_with_gradient_of(k, args, microbatch)

        return hook

    def _after(self, k: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            span = self._counts[k].open[-1]
            span.end = self._mark(k)
            outputs = output if isinstance(output, tuple) else (output,)
            carrier = next((x for x in outputs if isinstance(x, Tensor) and x.requires_grad), None)
            if carrier is not None and torch.is_grad_enabled():
                carrier.register_hook(lambda _: self._begin_backward(k, span.microbatch))
                if k == 0 and _carrier(args) is None:
                    self._close_with_first_nodes(carrier, span.microbatch)

        return hook

    def _begin_backward(self, k: int, microbatch: int) -> None:
        if self._handles:
            self._open(k, microbatch, "backward").end = self._mark(k)

    def _close_with_gradient_of(self, k: int, args: tuple[Any, ...], microbatch: int) -> None:
        carrier = _carrier(args)
        if carrier is not None:
            carrier.register_hook(lambda _: self._end_backward(k, microbatch))

    def _close_with_first_nodes(self, output: Tensor, microbatch: int) -> None:
        """End a backward of the first stage at its last node, if no input needs a gradient.
        Gradients of parameters do not: without recomputation there is one for all micro-batches
        together.
        """
        for node in _first_nodes(output):
            node.register_hook(lambda *_: self._end_backward(0, microbatch))

    def _end_backward(self, k: int, microbatch: int) -> None:
        if not self._handles:
            return
        for span in reversed(self._counts[k].open):
            if span.microbatch == microbatch and span.phase == "backward":
                span.end = self._mark(k)
                return


def _carrier(args: tuple[Any, ...]) -> Tensor | None:
    """Return the first input of a stage that receives a gradient, if any."""
    inputs = args[0] if isinstance(args[0], tuple) else args[:1]
    return next((x for x in inputs if isinstance(x, Tensor) and x.requires_grad), None)


def _first_nodes(output: Tensor) -> list[Node]:
    """Return the nodes of a graph whose inputs are leaves only."""
    found, seen = [], set()
    todo = [output.grad_fn] if output.grad_fn is not None else []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        before = [n for n, _ in node.next_functions if n is not None and n.next_functions]
        todo += before
        if not before:
            found.append(node)
    return found


def stage_times(
    events: Sequence[StageEvent], num_stages: int, num_microbatches: int
) -> tuple[list[float], list[float]]:
    """Return mean seconds of a micro-batch's forward and backward, which includes recomputation, in
    each stage, [K] and [K].
    """
    totals = {"forward": [0.0] * num_stages, "backward": [0.0] * num_stages}
    for event in events:
        totals[event.phase][event.stage] += event.end - event.start
    forward, backward = (
        [total / num_microbatches for total in totals[phase]] for phase in ("forward", "backward")
    )
    return forward, backward


def align(events: Sequence[StageEvent], devices: Sequence[torch.device]) -> list[StageEvent]:
    """Align events of several devices, each with its own clock, to one clock.

    A stage cannot start a micro-batch before the previous stage has ended it. Over all
    micro-batches this gives lower bounds for the offset of a device's clock; the largest one is
    used, for which the tightest handover takes no time. Unlike a common origin, this requires no
    synchronization of devices.
    """
    shifts = {devices[0]: 0.0}
    starts, ends = (
        {(e.stage, e.microbatch): getattr(e, field) for e in events if e.phase == "forward"}
        for field in ("start", "end")
    )
    for k in range(1, len(devices)):
        if devices[k] in shifts:
            continue
        before = shifts[devices[k - 1]]
        bounds = [
            ends[k - 1, i] + before - start
            for (stage, i), start in starts.items()
            if stage == k and (k - 1, i) in ends
        ]
        shifts[devices[k]] = max(bounds, default=0.0)
    shifted = ((event, shifts[devices[event.stage]]) for event in events)
    return [e._replace(start=e.start + shift, end=e.end + shift) for e, shift in shifted]


def _seconds(origin: Mark, mark: Mark | None) -> float:
    if isinstance(origin, torch.cuda.Event):
        assert isinstance(mark, torch.cuda.Event)  # noqa: S101  # one clock a pipeline
        return float(origin.elapsed_time(mark)) / 1000.0
    assert isinstance(mark, float)  # noqa: S101  # one clock a pipeline
    return mark - origin
