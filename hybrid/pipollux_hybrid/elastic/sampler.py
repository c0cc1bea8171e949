"""The samples of each replica at each step.

An epoch is one permutation of the data set, drawn from the seed and the epoch alone. An iteration
takes the next range of it and cuts the range into one part for each micro-step of each replica. The
position in the permutation is the whole state, so any number of replicas and any batch size can
continue from it, with every sample taken exactly once in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.batch import BatchShape, BatchSlice

__all__ = ["ElasticSampler", "parts_of_iteration"]


class ElasticSampler:
    """The order of samples, and the share of a replica in it.

    Args:
        num_samples: Size of the data set.
        shuffle: Whether each epoch has its own order.
        seed: Seed of these orders.

    Example:
        >>> sampler = ElasticSampler(10, shuffle=False, seed=0)
        >>> shape = BatchShape(batch_size=4, num_replicas=2, accum_steps=0)
        >>> [part.indices for part in sampler.parts(epoch=0, index=0, shape=shape, rank=1)]
        [[2, 3], [6, 7], [9]]
    """

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        if num_samples < 1:
            raise ConfigurationError("the data set is empty: there is nothing to train on")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed

    def order(self, epoch: int) -> torch.Tensor:
        """Return the permutation of an epoch, shape [num_samples]."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        return torch.randperm(self.num_samples, generator=self.generator(epoch))

    def generator(self, epoch: int) -> torch.Generator:
        """Return the random generator of an epoch, independent of the model's."""
        generator = torch.Generator()
        generator.manual_seed((self.seed * 1_000_003 + epoch) % (1 << 63))
        return generator

    def parts(
        self, *, epoch: int, index: int, shape: BatchShape, rank: int
    ) -> Iterator[BatchSlice]:
        """Return the parts of replica ``rank`` from position ``index`` to the end of the epoch."""
        order = self.order(epoch)
        while index < self.num_samples:
            count = min(shape.batch_size, self.num_samples - index)
            is_last = index + count == self.num_samples
            for positions, part in parts_of_iteration(index, count, shape, rank, is_last=is_last):
                indices = order[positions.start : positions.stop].tolist()
                yield part._replace(indices=indices)
            index += count


def parts_of_iteration(
    index: int, count: int, shape: BatchShape, rank: int, *, is_last: bool
) -> Iterator[tuple[range, BatchSlice]]:
    """Yield the parts of one replica in one iteration: positions in the epoch, and the part, with
    positions for indices.

    Args:
        index: Position of the iteration in the epoch.
        count: Samples of the iteration; fewer than a batch at the end of an epoch.
        shape: Shape of a whole batch.
        rank: The replica.
        is_last: Whether the epoch ends with the iteration.
    """
    # A short last iteration has fewer parts, not smaller ones.
    accum_steps = min(-(-count // (shape.num_replicas * shape.atomic_bsz)) - 1, shape.accum_steps)
    small, larger = divmod(count, shape.num_replicas * (accum_steps + 1))
    for step in range(accum_steps + 1):
        # Part (step, rank): the replicas' shares of one micro-step are adjacent.
        i = step * shape.num_replicas + rank
        start, size = index + i * small + min(i, larger), small + (i < larger)
        # A replica without a share uses the iteration's first sample as padding.
        positions = range(start, start + size) if size else range(index, index + 1)
        yield (
            positions,
            BatchSlice(
                indices=positions,
                num_samples=size,
                is_optimizer_step=step == accum_steps,
                is_full=count == shape.batch_size,
                next_index=index + count,
                is_last=is_last,
            ),
        )
