"""Checks that the optimizers of all processes take the same steps with the same hyperparameters.

Replicas average gradients but step separately, so one that skips a step diverges.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job.agreement import by_value

from .adaptive_optimizer import adaptive_of

TOLERANCE = 1e-5
"""Relative difference of a hyperparameter that rounding may cause on another machine."""
NAMED = 3


class OptimizerCheck:
    """The steps of an optimizer in this membership, and its hyperparameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._steps = 0
        self._values: list[Any] = []
        self._present = self._used = 0
        """Digests of the current hyperparameters, and of those of the last step."""
        self._words: dict[str, str] = {}
        self._used_words: dict[str, str] = {}
        """The same as text."""

    def stepped(self) -> None:
        """Record a step of the optimizer."""
        self._steps += 1
        self._used, self._used_words = self._digest(), self._words

    def rejoined(self) -> None:
        """Restart counting, as joining replicas do."""
        self._steps = self._used = 0
        self._used_words = {}

    def digest(self) -> int:
        """Return a digest of steps and hyperparameters."""
        return zlib.crc32(f"{self._steps} {self._used} {self._digest()}".encode())

    def content(self) -> bytes:
        """Return both as JSON."""
        self._digest()
        fields = {"steps": self._steps, "used": self._used_words, "now": self._words}
        return json.dumps(fields).encode()

    def compare(self, contents: Sequence[bytes], word: str) -> None:
        """Raise a SynchronizationError, with the difference and a remedy, if optimizers differ."""
        everyone = [json.loads(content) for content in contents]
        steps = [fields["steps"] for fields in everyone]
        if len(set(steps)) > 1:
            raise SynchronizationError(
                f"optimizer.step() did not run on all {word}s alike (steps taken: "
                f"{by_value(steps, word)}): step on all of them or on none. A loss that the script "
                "computes is each replica's own: decide by the loss that model.train_step returns, "
                "which is finite on all replicas or on none, or by a sum over the replicas "
                "(pipollux.all_reduce_sum)"
            )
        for when in ("now", "used"):
            differences = _differences([fields[when] for fields in everyone], word)
            if differences:
                more = f"; and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
                raise SynchronizationError(
                    f"the optimizers of the {word}s differ: {'; '.join(differences[:NAMED])}{more}"
                    ": set hyperparameters alike in all processes, and give a scheduler such as "
                    "ReduceLROnPlateau a value that all share, such as a total of a "
                    "pipollux.Accumulator, and not a local loss"
                )

    def _digest(self) -> int:
        values = list(self._hyperparameters())
        if values != self._values:  # rare
            self._values = values
            self._words = {f"{name} of group {k}": _word(value) for k, name, value in values}
            self._present = zlib.crc32(json.dumps(self._words).encode())
        return self._present

    def _hyperparameters(self) -> Iterator[tuple[int, str, Any]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    yield index, name, _plain(value)
        adaptive = adaptive_of(self._optimizer)
        if adaptive is not None and adaptive.loss_scale is not None:
            yield 0, "loss scale", adaptive.loss_scale


def _plain(value: Any) -> Any:
    """Return a comparable value; reading a tensor on a GPU would wait for it."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    plain = isinstance(value, (bool, int, float, str)) or value is None
    return value if plain else type(value).__name__


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_word, value))})"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"{value:.6g}" if is_number else str(value)


def _differences(everyone: Sequence[dict[str, str]], word: str) -> list[str]:
    names = dict.fromkeys(name for words in everyone for name in words)
    rows = {name: [words.get(name, "missing") for words in everyone] for name in names}
    return [f"{name} is {by_value(row, word)}" for name, row in rows.items() if not _alike(row)]


def _alike(row: Sequence[str]) -> bool:
    if len(set(row)) == 1:
        return True
    try:
        numbers = [float(text) for text in row]
    except ValueError:
        return False
    return max(numbers) - min(numbers) <= TOLERANCE * max(map(abs, numbers))
