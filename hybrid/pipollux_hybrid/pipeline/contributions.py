"""How many micro-batches of a batch contribute to the gradient of each weight.

All of them do, unless layers are conditional: an expert that some samples do not reach, a layer
that is skipped at random. That is counted in the first steps, from the graphs of the stage's
outputs, and logged where a weight is reached by some micro-batches only. It is how a script's
author sees that a layer takes part in fewer micro-batches than meant.
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

__all__ = ["Contributions", "nodes_between"]

CHECKED_STEPS = 3
"""Batches, from the first one on, that are counted."""
LOG = logging.getLogger(__name__)


class Contributions:
    """Counts the micro-batches whose output depends on each weight of a stage.

    Args:
        stage: The layers.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._batches = 0
        self._wanted = 0
        self._graphs = 0
        self._reached: Counter[int] = Counter()

    def begin(self, num_microbatches: int) -> None:
        """Begin with a batch; what was counted of an unfinished one is dropped."""
        self._batches += 1
        self._wanted, self._graphs = num_microbatches, 0
        self._reached.clear()

    def add(self, value: PyTree, output: PyTree) -> None:
        """Count a micro-batch, if there is a graph; log what all of a batch have come to.

        Args:
            value: Input of the stage.
            output: Output of the stage.
        """
        roots = [x for x in tensors_of(output) if x.requires_grad]
        if self._batches > CHECKED_STEPS or not roots or not torch.is_grad_enabled():
            return
        for node in nodes_between(tensors_of(value), roots):
            if (weight := getattr(node, "variable", None)) is not None:
                self._reached[id(weight)] += 1
        self._graphs += 1
        if self._graphs == self._wanted:
            self._report()

    def partial(self) -> dict[str, int]:
        """Return the weights that some, but not all, micro-batches reach, and how many do."""
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
    """Yield the nodes of the graph of outputs, up to those that gave the inputs.

    Args:
        inputs: Where the walk ends.
        outputs: Where it begins.
    """
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
