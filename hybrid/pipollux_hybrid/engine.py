"""The pipeline of one replica: torchgpipe, with its micro-batches free to change.

torchgpipe splits the batch, runs the stages as in GPipe (Huang et al., 2019; Kim et al., 2020) and
recomputes activations. Two of its assumptions do not hold here and are lifted: it caches its
copy streams at the first forward, so the number of micro-batches could not grow; and it counts the
micro-batches that were asked for, where a short batch has fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torchgpipe import GPipe

from .errors import ConfigurationError

__all__ = ["CHECKPOINT_MODES", "PipelineEngine", "Tensors", "microbatch_sizes"]

Tensors = Tensor | tuple[Tensor, ...]
CHECKPOINT_MODES = ("always", "except_last", "never")


class PipelineEngine:
    """A sequential module cut into stages, one device each.

    Args:
        module: The layers; they are moved to their stage's device.
        balance: Number of layers of each stage, from first to last.
        devices: One device per stage.
        checkpoint: When activations are recomputed: ``"always"``, ``"except_last"`` (all
            micro-batches but the last) or ``"never"``.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        devices: Sequence[torch.device],
        checkpoint: str,
    ) -> None:
        try:
            self._gpipe = GPipe(
                module, list(balance), devices=list(devices), chunks=1, checkpoint=checkpoint
            )
        except (ValueError, TypeError) as error:
            # The first line is the finding; the rest recommends tools that are not used here.
            raise ConfigurationError(str(error).splitlines()[0]) from error
        self.checkpoint = checkpoint

    @property
    def stages(self) -> list[nn.Sequential]:
        """The layers of each stage."""
        return cast("list[nn.Sequential]", list(self._gpipe.partitions))

    @property
    def devices(self) -> list[torch.device]:
        """The device of each stage."""
        return list(self._gpipe.devices)

    def checkpointed(self, num_microbatches: int, *, training: bool) -> int:
        """How many of the micro-batches are recomputed in the backward."""
        if not training or self.checkpoint == "never":
            return 0
        return num_microbatches - (self.checkpoint == "except_last")

    def run(self, inputs: Tensors, num_microbatches: int, *, training: bool) -> Tensors:
        """Forward of one batch, in as many micro-batches as were counted for it.

        Args:
            inputs: Tensor or tensors of shape [batch, …].
            num_microbatches: Actual number, ``len(microbatch_sizes(…))``.
            training: Whether the layers are in training mode.
        """
        gpipe = self._gpipe
        gpipe.training = training
        gpipe.chunks = num_microbatches
        streams = gpipe._copy_streams
        if streams and len(streams[0]) < num_microbatches:
            streams.clear()  # torchgpipe makes them anew, as many as there are chunks
        return cast("Tensors", gpipe(inputs))


def microbatch_sizes(batch_size: int, num_microbatches: int) -> list[int]:
    """Samples of each micro-batch, as :meth:`torch.Tensor.chunk` cuts them.

    Example:
        >>> microbatch_sizes(5, 4)
        [2, 2, 1]
    """
    size = -(-batch_size // num_microbatches)
    full, rest = divmod(batch_size, size)
    return [size] * full + ([rest] if rest else [])
