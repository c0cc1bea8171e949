"""Progress of the training: a live bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from .step_record import StepRecord

__all__ = ["ProgressDisplay"]

SAY_INTERVAL = 5.0
"""Seconds between lines in a log."""


class ProgressDisplay:
    """Shows points on standard error, separate from the script's standard output: on a terminal as
    a bar below the script's output; in a pipe or a file as a line every few seconds.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._lock = threading.Lock()
        self._next_line = 0.0
        self._latest: StepRecord | None = None
        self._shown: StepRecord | None = None
        self._paused = 0.0

    def on_step(self, point: StepRecord) -> None:
        """Show a point, unless it is older than the last pause; called by the reporting thread."""
        with self._lock:
            self._latest = point
            if point.time <= self._paused:
                return
            if self._console.is_terminal:
                self._move_bar(point)
            elif time.monotonic() >= self._next_line:
                self._say(point)

    def pause(self) -> None:
        """Stop showing earlier steps, as the script is about to print its own output."""
        with self._lock:
            self._paused = time.time()

    def finish(self, last: StepRecord | None) -> None:
        """Show the final state, with a last point that :meth:`on_step` did not get; the bar stays
        above the script's later output.
        """
        with self._lock:
            self._paused = time.time()
            last = last or self._latest
            if last is not None and last is not self._shown:
                (self._move_bar if self._console.is_terminal else self._say)(last)
            self._stop_bar()

    def close(self) -> None:
        """Leave the bar unchanged."""
        with self._lock:
            self._stop_bar()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, point: StepRecord) -> None:
        self._next_line = time.monotonic() + SAY_INTERVAL
        self._shown = point
        print(f"pipollux: {describe(point)}", file=self._console.file, flush=True)

    def _move_bar(self, point: StepRecord) -> None:
        self._shown = point
        if self._bar is None or self._task is None:
            self._bar = Progress(
                TextColumn("{task.fields[epoch]}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
                console=self._console,
                # Redirect standard output only if it goes to the terminal.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", epoch="", figures="")
            self._bar.start()
        self._bar.update(
            self._task,
            completed=point.epoch_samples,
            total=max(point.epoch_size, 1),
            epoch=_epoch(point),
            figures=figures(point),
        )


def describe(point: StepRecord) -> str:
    """Return a point as one line.

    Example: ``epoch 2/30 step 1042 loss 0.1234 batch size 64 throughput 512 goodput 480 samples/s``
    """
    loss = "" if point.loss is None else f" loss {point.loss:.4f}"
    goodput = "" if point.goodput is None else f" goodput {point.goodput:.0f}"
    share = f" {100 * point.epoch_samples / point.epoch_size:.0f}%" if point.epoch_size else ""
    return (
        f"{_epoch(point)}{share} step {point.step}{loss} batch size {point.batch_size} "
        f"throughput {point.throughput:.0f}{goodput} samples/s"
    )


def figures(point: StepRecord) -> str:
    """Return the text after the bar, with the batch as samples × accumulation × replicas."""
    parts = [] if point.loss is None else [f"loss {point.loss:.4f}"]
    parts.append(f"{point.throughput:.0f} samples/s")
    if point.goodput is not None:
        parts.append(f"goodput {point.goodput:.0f}")
    accumulated = f" × s={point.accum_steps + 1}" if point.accum_steps else ""
    batch = f"batch {point.atomic_bsz} × R={point.num_replicas}{accumulated}"
    schedule = f", {point.schedule}" if point.schedule else ""
    parts.append(f"{batch} (M={point.num_microbatches}{schedule})")
    left = seconds_left(point)
    if left is not None:
        parts.append(f"{timedelta(seconds=round(left))} left")
    return " · ".join(parts)


def seconds_left(point: StepRecord) -> float | None:
    """Return the seconds to the end of the training, or of the epoch if that is unknown."""
    if point.throughput <= 0.0 or point.epoch_size == 0:
        return None
    epochs = 0 if point.num_epochs is None else point.num_epochs - point.epoch - 1
    samples = point.epoch_size - point.epoch_samples + epochs * point.epoch_size
    return max(samples, 0) / point.throughput


def _epoch(point: StepRecord) -> str:
    of = "" if point.num_epochs is None else f"/{point.num_epochs}"
    return f"epoch {point.epoch}{of}"
