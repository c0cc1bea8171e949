"""One forward of a batch through the stages, in GPipe's order.

The clock, the copies between devices and the worker threads are torchgpipe's (Kim et al., 2020).
Stages that share one device run in the caller's thread instead, one after the other as they would
in its worker.
Floating point tensors of a PyTree use its differentiable copies; other values are passed
separately. Micro-batch i is in stage j at tick i + j::

    tick      0      1      2      3
    stage 0  (0,0)  (1,0)  (2,0)
    stage 1         (0,1)  (1,1)  (2,1)
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torchgpipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.microbatch import Batch
from torchgpipe.pipeline import Pipeline, clock_cycles
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.tracker import use_skip_tracker
from torchgpipe.stream import AbstractStream, current_stream, use_device
from torchgpipe.worker import Task, spawn_workers

from .guards import StageGuards
from .lanes import copy, depend, wait
from .microbatch import PyTree, tensors_of
from .recompute import Recomputation
from .same_again import Kept
from .skip import SkipTracker
from .stage import Stage
from .thread_state import ThreadLocalState
from .transfer import Boundary, Tensors


class _Here:
    """Runs the tasks of a device in the caller's thread, in place of a worker and its queues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._results: deque[tuple[bool, Any]] = deque()

    def put(self, task: Task) -> None:
        """Run a task."""
        try:
            with use_device(self._device):
                batch = task.compute()
        except Exception:  # raised when its result is taken, as torchgpipe's workers do
            self._results.append((False, sys.exc_info()))
        else:
            self._results.append((True, (task, batch)))

    def get(self) -> tuple[bool, Any]:
        """Return whether the next task succeeded, and its result or error."""
        return self._results.popleft()


class StageCall:
    """A stage's work on one micro-batch, in the first forward and in its recomputation.

    Holds no reference to its run: the graph refers to it, and the run to the graph.
    """

    def __init__(
        self,
        stage: Stage,
        entering: Boundary,
        tracker: SkipTracker,
        guards: StageGuards,
        microbatch: int | None,
    ) -> None:
        self._stage, self._guards = stage, guards
        self._entering = entering
        self._tracker = tracker
        self._microbatch = microbatch
        """Its number, if its forwards are checked."""
        self._first: list[Kept] = []
        self.leaving: Boundary | None = None

    def __call__(self, tensors: Tensors) -> Tensors:
        """Run the stage's layers on a micro-batch."""
        stage = self._stage
        value = self._entering.restore(tensors, stage.device)
        with use_skip_tracker(self._tracker):
            output = self._run(value)
        if self._microbatch is not None:
            self._guards.check(value, output)
        if is_checkpointing():
            self._first = self._guards.same.keep(tensors_of(output))
        elif is_recomputing():
            self._guards.same.compare(self._first, tensors_of(output))
        what = stage.output_name
        if not is_recomputing():
            self.leaving = Boundary.of(output, what)
        assert self.leaving is not None  # noqa: S101  # the first time comes first
        return self.leaving.floating(output, stage.device, what)

    def _run(self, value: PyTree) -> PyTree:
        if self._microbatch is None or is_recomputing():
            return self._stage(value)
        return self._guards.changes.run(self._microbatch, value)


class Escape(Exception):  # noqa: N818  # not an error: it carries one out of a thread
    """A SystemExit or KeyboardInterrupt of a layer, passed through a worker thread.

    torchgpipe's workers only catch exceptions; others would end them and block the script.
    """

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


class PipelineRun(Pipeline):
    """Runs micro-batches, PyTrees of tensors [micro-batch, …] on the first device, through stages.

    Args:
        stages: The stages, each on its device.
        microbatches: The micro-batches.
        num_recomputed: Number of recomputed micro-batches, counted from the first.
        copy_streams: Per stage and micro-batch, the stream of its copies.
        layout: Destinations of stashed tensors.
        outer: The script's thread-local state around the forward.
        guards: Of each stage.
        separate: Whether the backward of each micro-batch must be independent of the others.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        microbatches: Sequence[PyTree],
        num_recomputed: int,
        copy_streams: list[list[AbstractStream]],
        layout: SkipLayout,
        outer: ThreadLocalState,
        guards: Sequence[StageGuards],
        *,
        separate: bool = False,
    ) -> None:
        devices = [stage.device for stage in stages]
        what = "the input of the model"
        self._boundaries = [Boundary.of(value, what, is_input=True) for value in microbatches]
        batches = [
            Batch(boundary.floating(value, devices[0], what))
            for boundary, value in zip(self._boundaries, microbatches, strict=True)
        ]
        super().__init__(batches, list(stages), devices, copy_streams, layout, num_recomputed)
        self._stages = list(stages)
        self._trackers: list[Any] = [SkipTracker(layout) for _ in microbatches]
        self._outer, self._guards, self._trains = outer, guards, torch.is_grad_enabled()
        for each in guards:
            each.contributions.begin(len(microbatches))
        self._separate = separate
        self._streams = [current_stream(device) for device in devices]

    def forward(self) -> list[PyTree]:
        """Run all micro-batches through all stages; return their outputs, on the last device."""
        with self._workers() as queues:
            for tick in clock_cycles(len(self.batches), len(self.partitions)):
                self._carry(tick)
                self._compute(tick, *queues)
        device = self.devices[-1]
        return [
            boundary.restore(tuple(batch), device)
            for boundary, batch in zip(self._boundaries, self.batches, strict=True)
        ]

    def _workers(self) -> AbstractContextManager[tuple[Sequence[Any], Sequence[Any]]]:
        """Return where tasks of each stage are put, and their results are taken from."""
        if any(device != self.devices[0] for device in self.devices):
            return spawn_workers(self.devices)
        here = [_Here(self.devices[0])] * len(self.devices)
        return nullcontext((here, here))

    def _carry(self, tick: Sequence[tuple[int, int]]) -> None:
        """Pass outputs to the next stage, like torchgpipe's fence."""
        for i, j in tick:
            if i > 0 and not self._separate:
                # The backward of this micro-batch precedes that of the previous one.
                depend(self.batches[i - 1], self.batches[i])
            streams = [self.copy_streams[k][i] for k in range(j + 1)]
            for source, namespace, name in self.skip_layout.copy_policy(j):
                self._trackers[i].copy(
                    self.batches[i], streams[source], streams[j], namespace, name
                )
            if j > 0:
                copy(self.batches[i], streams[j - 1], streams[j])

    def _compute(self, tick: Sequence[tuple[int, int]], entries: Any, exits: Any) -> None:
        begun = []
        for i, j in tick:
            if j > 0:
                wait(self.batches[i], self.copy_streams[j][i], self._streams[j])
            call, task = self._task(i, j)
            entries[j].put(task)
            begun.append((i, j, call))
        failure = None
        for i, j, call in begun:
            succeeded, result = exits[j].get()
            if succeeded and failure is None:
                self._take_over(i, j, call, *result)
            elif failure is None:
                failure = result
        if failure is not None:
            _raise(failure)

    def _task(self, i: int, j: int) -> tuple[StageCall, Task]:
        guards, is_cut = self._guards[j], len(self.batches) > 1
        # A stash or pop besides the layers' output must not run twice.
        checked = self._trains and is_cut and not self.skip_layout.by_ns_name
        call = StageCall(
            *(self._stages[j], self._boundaries[i], self._trackers[i], guards),
            i if checked else None,
        )
        inputs = tuple(self.batches[i])
        outer, buffers = self._outer, guards.buffers
        # With a single micro-batch without recomputation, attributes are those of the plain model.
        partial = self._trains and (is_cut or self.checkpoint_stop > 0)
        guarded = guards.attributes.guarded if partial else nullcontext
        if i >= self.checkpoint_stop:

            def compute() -> Batch:
                with _letting_escape(), outer.entered(), buffers.forward(i), guarded():
                    return Batch(call(inputs))

            return call, Task(self._streams[j], compute=compute, finalize=None)
        recomputation = Recomputation(call, self._stages[j], outer, guards)

        def compute_first() -> Batch:
            with _letting_escape(), outer.entered(), buffers.forward(i), guarded():
                return Batch(recomputation.forward(inputs))

        def schedule(batch: Batch) -> None:
            recomputation.schedule(batch, inputs)

        return call, Task(self._streams[j], compute=compute_first, finalize=schedule)

    def _take_over(self, i: int, j: int, call: StageCall, task: Task, batch: Batch) -> None:
        if j < len(self.partitions) - 1:
            wait(batch, self._streams[j], self.copy_streams[j][i])
        with use_device(self.devices[j]):
            task.finalize(batch)
        assert call.leaving is not None  # noqa: S101  # it has been called
        self._boundaries[i] = call.leaving
        self.batches[i] = batch


class _letting_escape:  # noqa: N801  # used like a function
    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: Any, error: BaseException | None, _traceback: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            raise Escape(error) from error


def _raise(failure: tuple[Any, BaseException, Any]) -> None:
    _, error, traceback = failure
    if isinstance(error, Escape):
        raise error.reason
    raise error.with_traceback(traceback)
