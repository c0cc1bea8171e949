"""A server's files: one per layer and one of the ledger, from which any servers can start again.

Each file is consistent by itself (see :mod:`~pipollux_hybrid.push_pull.key_range`), so they need
not be of one moment. The number of servers and the partition may change between runs.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipollux_hybrid.errors import CheckpointError

from .key_range import LayerState, layer_content, restored
from .ledger import Ledger
from .shard import Shard

LEDGER = "ledger.json"


class KeptState:
    """The folder of a job's servers."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._saved: dict[int, tuple[int, int]] = {}
        """Of each layer, what was saved last: the revision and the credited samples."""
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"--directory {folder}: {error.strerror}") from error

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to start from."""
        return self.folder is None or not any(self.folder.glob("layer-*.pt"))

    def has_begun(self) -> bool:
        """Return whether a training with all layers had begun when the ledger was saved."""
        book = self.ledger()
        return book is not None and book.place is not None

    def save(self, shard: Shard) -> None:
        """Write what has changed since the last call; a CheckpointError if that fails."""
        if self.folder is None:
            return
        for key, state in shard.keys.layers.items():
            mark = state.revision, len(state.credits)
            if self._saved.get(key) != mark:
                aside = self.folder / f".{_name(key)}"
                copy = io.BytesIO()
                torch.save(layer_content(state), copy)
                _replace(aside, copy.getbuffer())
                self._saved[key] = mark
        if shard.ledger is not None:
            book = {"options": shard.options, "ledger": shard.ledger.content()}
            aside = self.folder / f".{LEDGER}"
            _replace(aside, json.dumps(book).encode())

    def layer(self, key: int) -> LayerState | None:
        """Return a layer's saved state, in the next generation; None if there is none."""
        path = None if self.folder is None else self.folder / _name(key)
        if path is None or not path.is_file():
            return None
        try:
            return restored(torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # torch.load has no narrower class for a damaged file
            raise _damaged(path, error) from error

    def ledger(self) -> Ledger | None:
        """Return the saved ledger; None if there is none."""
        path = None if self.folder is None else self.folder / LEDGER
        if path is None or not path.is_file():
            return None
        try:
            content: Mapping[str, Any] = json.loads(path.read_bytes())
            return Ledger.of(content["ledger"]).restored()
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    # torch.load's own text is a page.
    return CheckpointError(
        f"{path} cannot be read ({type(error).__name__}): put back a copy of the servers' folder, "
        "or start them with an empty one"
    )


def _replace(aside: Path, content: bytes | memoryview) -> None:
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(aside.with_name(aside.name.removeprefix(".")))


def _name(key: int) -> str:
    return f"layer-{key:05d}.pt"
