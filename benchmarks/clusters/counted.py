"""Runs a training script as it stands, and accounts for every sample that it is trained on.

    python benchmarks/clusters/counted.py examples/digits.py --epochs 2

How often each sample was trained on in each epoch stands in an `Accumulator`, so it is saved and
rolled back together with the model and the position in the epoch. In the end it is written to
`counted.json` beside the checkpoints. Loaders that do not shuffle, such as those of held-out data,
are left alone.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import pipollux

COUNTED = "counted.json"
_loaders: list[CountingLoader] = []


class Numbered(Dataset[tuple[Any, int]]):
    """The samples of a data set with their numbers.

    Args:
        samples: the data set.
    """

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self._samples[number], number


class CountingLoader(pipollux.AdaptiveDataLoader[Any]):
    """The library's loader, which counts a batch once the loop is through with it.

    Args:
        dataset: with a length.
        batch_size: as for the library's loader.
        shuffle: whether this is the training data, which is counted.
        options: as for the library's loader.
    """

    def __init__(
        self, dataset: Any, batch_size: int = 1, shuffle: bool = False, **options: Any
    ) -> None:
        self._counts: pipollux.Accumulator | None = None
        super().__init__(Numbered(dataset), batch_size=batch_size, shuffle=shuffle, **options)
        self.num_samples = len(dataset)
        if shuffle:
            self._counts = pipollux.Accumulator()
            _loaders.append(self)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches, without the numbers."""
        for batch, numbers in super().__iter__():
            yield batch
            if self._counts is not None:
                epoch = f"epoch {pipollux.current_epoch()}"
                self._counts[epoch] += torch.bincount(numbers, minlength=self.num_samples)

    def counts(self) -> dict[str, list[int]]:
        """Return how often each sample was trained on, over all replicas, by epoch."""
        assert self._counts is not None
        with self._counts.synchronized():
            return {str(epoch): amount.tolist() for epoch, amount in self._counts.items()}


def fault(folder: Path, num_epochs: int) -> str | None:
    """Say what is wrong with the account that a complete job left; None if nothing is.

    Args:
        folder: where the job saved.
        num_epochs: that it was to train.
    """
    counted = json.loads((folder / COUNTED).read_text())
    if sorted(counted) != sorted(f"epoch {epoch}" for epoch in range(num_epochs)):
        return f"{num_epochs} epochs were to be trained, counted are {sorted(counted)}"
    wrong = {
        epoch: sum(count != 1 for count in counts)
        for epoch, counts in counted.items()
        if set(counts) != {1}
    }
    return f"samples that were not trained on once, by epoch: {wrong}" if wrong else None


def main() -> None:
    """Run the script; write the account from replica 0."""
    script = sys.argv[1]
    pipollux.AdaptiveDataLoader = CountingLoader  # type: ignore[misc]  # what the script uses
    sys.argv = sys.argv[1:]
    runpy.run_path(script, run_name="__main__")
    (loader,) = _loaders
    counts = loader.counts()
    if pipollux.replica_rank() == 0:
        folder = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
        (folder / "counted.part").write_text(json.dumps(counts))
        (folder / "counted.part").replace(folder / COUNTED)


if __name__ == "__main__":
    main()
