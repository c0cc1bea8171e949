"""Runs an unchanged training script, and counts how often it trains on each sample.

    python benchmarks/clusters/counted.py examples/digits.py --epochs 2

The counts by epoch are in an `Accumulator`, so they are saved and rolled back together with the
model and the position in the epoch. At the end they are written to `counted.json` beside the
checkpoints. Loaders that do not shuffle, such as those of held-out data, are not counted.
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
    """The samples of a data set with their numbers."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self._samples[number], number


class CountingLoader(pipollux.AdaptiveDataLoader[Any]):
    """The library's loader, which counts a batch after the loop has processed it.

    With `shuffle`, its samples are training data, which are counted.
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
    """Return the error in the counts of a complete job of `num_epochs`; None: there is none."""
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
    """Run the script; replica 0 writes the counts."""
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
