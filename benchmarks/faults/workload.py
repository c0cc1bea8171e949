"""The jobs that run during the faults, and their account of samples."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

COUNTING = Path(__file__).with_name("counting_job.py")
TRAINING = Path(__file__).with_name("training_job.py")
STEP_SAMPLES = 32
"""Samples of a step of the counting job."""
EPOCH_SAMPLES = 256
"""Samples of an epoch of the training job."""
MOST_TRAINING = 2
"""Maximum training jobs under way: importing torch keeps a core busy for seconds."""

KINDS: tuple[Mapping[str, Any], ...] = (
    {"script": COUNTING, "num_stages": 1},
    {"script": TRAINING, "num_stages": 1},
    {"script": COUNTING, "num_stages": 2},
    {"script": COUNTING, "num_stages": 1, "min_replicas": 2},
    {"script": TRAINING, "num_stages": 2, "stage_choices": [1, 2]},
    {"script": COUNTING, "num_stages": 1, "preemptible": False, "max_replicas": 1},
)
"""Kinds of jobs, submitted in turn."""


class Work(NamedTuple):
    """The work of a job."""

    script: Path
    amount: int
    """Steps of the counting job, epochs of the training job."""

    @classmethod
    def drawn(cls, script: Path, rng: random.Random) -> Work:
        """About a minute of work."""
        return cls(script, rng.randrange(300, 800) if script == COUNTING else rng.randrange(20, 50))

    @property
    def arguments(self) -> list[str]:
        """Arguments of the script."""
        name = "--steps" if self.script == COUNTING else "--epochs"
        return [name, str(self.amount)]

    @property
    def samples(self) -> int:
        """Samples, each counted as often as it is to be trained on."""
        return self.amount * (STEP_SAMPLES if self.script == COUNTING else EPOCH_SAMPLES)

    def fault(self, folder: Path) -> str | None:
        """Return the error in the account of the complete job; None: there is none."""
        return self._counting(folder) if self.script == COUNTING else self._training(folder)

    def _counting(self, folder: Path) -> str | None:
        """Steps must be counted once each, by attempts in order."""
        saved = json.loads((folder / "checkpoint.json").read_text())
        counted = sorted(saved["counted"], key=lambda entry: entry[1])
        ends = [0, *(end for _, _, end in counted)]
        tiled = all(begin == end for (_, begin, _), end in zip(counted, ends, strict=False))
        if saved["step"] != self.amount or not tiled or ends[-1] != self.amount:
            return f"{saved['step']} of {self.amount} steps, counted {counted}"
        attempts = [attempt for attempt, _, _ in counted]
        if attempts != sorted(set(attempts)):
            return f"attempts out of order: {counted}"
        return None

    def _training(self, folder: Path) -> str | None:
        """Every sample must be trained on once in every epoch."""
        counted = json.loads((folder / "counted.json").read_text())["epochs"]
        wanted = {f"epoch {epoch}" for epoch in range(self.amount)}
        if counted.keys() != wanted:
            return f"{self.amount} epochs were to be trained, counted are {sorted(counted)}"
        wrong = {
            epoch: [(number, count) for number, count in enumerate(counts) if count != 1]
            for epoch, counts in counted.items()
            if counts != [1] * EPOCH_SAMPLES
        }
        return f"samples (number, times): {wrong}" if wrong else None
