"""Counts the micro-batches that contribute to the gradient of each weight.

All contribute, except in conditional layers: an expert that some samples do not reach, or a layer
that is skipped at random. The first steps are counted by the graphs of the stage's outputs, and
weights that only some micro-batches reach are logged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .microbatch import PyTree, tensors_of
from .stage import Stage

CHECKED_STEPS = 3
"""First batches, which are counted."""
LOG = logging.getLogger(__name__)


class Contributions:
    """Counts the micro-batches whose output depends on each weight of a stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._batches = 0
        self._wanted = 0
        self._graphs = 0
        self._reached: Counter[int] = Counter()

    def begin(self, num_microbatches: int) -> None:
        """Start a batch; the counts of an unfinished one are discarded."""
        self._batches += 1
        self._wanted, self._graphs = num_microbatches, 0
        self._reached.clear()

    def add(self, value: PyTree, output: PyTree) -> None:
        """Count a micro-batch, if it has a graph; log the counts at the end of a batch."""
        if self._batches > CHECKED_STEPS:
            return
        roots = [x for x in tensors_of(output) if x.requires_grad]
        if not roots or not torch.is_grad_enabled():
            return
        for node in nodes_between(tensors_of(value), roots):
            if (weight := getattr(node, "variable", None)) is not None:
                self._reached[id(weight)] += 1
        self._graphs += 1
        if self._graphs == self._wanted:
            self._report()

    def partial(self) -> dict[str, int]:
        """Return the weights that some, but not all, micro-batches reach, with their counts."""
        counts = {name: self._reached[id(x)] for name, x in self._stage.named_parameters()}
        return {name: count for name, count in counts.items() if 0 < count < self._wanted}

    def _report(self) -> None:
        partial = self.partial()
        if partial:
            LOG.info(
                "batch %d: %d weights of stage %d get a gradient from some of the %d micro-batches "
                "only, as those of experts do: %s",
                *(self._batches - 1, len(partial), self._stage.index, self._wanted),
                ", ".join(f"{name} from {count}" for name, count in list(partial.items())[:3]),
            )


def nodes_between(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph of outputs, up to those that produced the inputs."""
    ends = {id(x) for x in inputs if x.grad_fn is None}
    seen: set[Any] = {x.grad_fn for x in inputs if x.grad_fn is not None}
    waiting: list[Any] = [x.grad_fn for x in outputs if x.grad_fn not in seen]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) not in ends:
            yield node
        waiting += [after for after, _ in node.next_functions]
