"""Comparing what a recomputation gives with what the first forward gave.

If they differ, the gradients are those of another function than the loss is of. It happens where
layers depend on something that nobody restores: a counter, the time, a file. So the outputs of a
stage's first forwards are kept as three sums for each tensor, and compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError

from .microbatch import PyTree, tensors_of
from .stage import Stage

__all__ = ["RecomputedOutputs", "another_output", "outputs_agree", "sums_of"]

CHECKED_FORWARDS = 16
"""Recomputed forwards, from the first one of a stage on, that are compared."""


class RecomputedOutputs:
    """The outputs of a stage's first forwards.

    Args:
        stage: The layers.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._forwards = 0

    @property
    def is_comparing(self) -> bool:
        """Whether the next first forward is compared."""
        return self._forwards < CHECKED_FORWARDS

    def first(self, output: PyTree) -> list[Tensor] | None:
        """Return what identifies the output of a first forward; None if it is not to be compared.

        Args:
            output: PyTree of tensors.
        """
        if not self.is_comparing:
            return None
        self._forwards += 1
        return sums_of(output)

    def compare(self, first: list[Tensor] | None, output: PyTree) -> None:
        """Compare a recomputed output.

        Args:
            first: What :meth:`first` has returned.
            output: PyTree of tensors.

        Raises:
            ConfigurationError: It is another one, by more than rounding.
        """
        if first is not None and not outputs_agree(first, sums_of(output), output):
            raise another_output(self._stage.index)


def another_output(stage: int) -> ConfigurationError:
    """Return the error of a stage that computes something else when it is recomputed."""
    return ConfigurationError(
        f"stage {stage} gave another output when it was recomputed than at first, so its gradients "
        "would be wrong: its layers depend on something that changes from call to call, such as a "
        "counter, a clock or a random generator of their own; use torch's, Python's or numpy's "
        "global generators, change counters in the training loop, or pass "
        "activation_checkpoint='never'"
    )


def outputs_agree(first: list[Tensor], second: list[Tensor], output: PyTree) -> bool:
    """Return whether two outputs are the same but for rounding.

    Args:
        first: Sums of one output.
        second: Sums of the other one.
        output: The other one.
    """
    tensors = _compared(output)
    if len(first) != len(second):
        return False
    for one, other, tensor in zip(first, second, tensors, strict=True):
        tolerance = torch.finfo(tensor.dtype).eps ** 0.5
        bound = tolerance * torch.maximum(one[2], other[2]) + torch.finfo(tensor.dtype).tiny
        near = (one - other).abs() <= bound
        alike = near | ~(torch.isfinite(one) | torch.isfinite(other))
        if not bool(alike.all()):
            return False
    return True


@torch.no_grad()
def sums_of(output: PyTree) -> list[Tensor]:
    """Return of each tensor its sum, one with weights that tell places apart, and of magnitudes."""
    sums = []
    for tensor in _compared(output):
        x = tensor.detach().reshape(-1)
        x = torch.view_as_real(x).reshape(-1) if x.is_complex() else x
        x = x.double()
        weights = torch.arange(1, x.numel() + 1, device=x.device, dtype=x.dtype).cos_()
        sums.append(torch.stack([x.sum(), x.dot(weights), x.abs().sum()]))
    return sums


def _compared(output: PyTree) -> list[Tensor]:
    """Return the tensors of an output that are compared."""
    return [
        x
        for x in tensors_of(output)
        if (x.is_floating_point() or x.is_complex())
        and x.layout is torch.strided
        and not (x.is_nested or x.is_meta)
    ]
