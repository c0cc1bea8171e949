"""Checks that all replicas have the same data set, which the loader divides among them.

A data set that each replica has already sharded by its rank would be divided twice, and most
samples never used, without an error. Of streams a few samples of each iteration are compared; data
sets in memory are compared when a loop over them begins.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job.agreement import by_value
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.warning import warn

Marks: TypeAlias = dict[str, list[Any]]
"""Values of some samples: scalars, integers of arrays, and real numbers of arrays."""

SAMPLES = 4
"""Number of samples to compare per iteration."""
VALUES = 32
"""Number of values to compare per array."""
ALIKE = 0.5
"""Share of equal integers from which two arrays count as random maskings of one sample."""


class StreamCheck:
    """Compares the samples that replicas read from a stream, in the exchange of each iteration.

    Samples that each replica augments or masks at random pass, if scalars in them, such as labels,
    are equal.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._leads = ctx.env.leads
        self._marks: Marks | None = None
        self._compared = ["singles", "integers", "reals"]
        ctx.control.checks.append(self)
        ctx.rejoined.append(self._rejoined)

    def note(self, marks: Marks) -> None:
        """Set the marks of the current iteration."""
        self._marks = marks

    def _rejoined(self) -> None:
        """Reset: replicas that have joined have not read these samples."""
        self._marks, self._compared = None, ["singles", "integers", "reals"]

    def digest(self) -> int:
        """Return a digest of the marks."""
        return zlib.crc32(self.content())

    def content(self) -> bytes:
        """Return the marks as JSON."""
        marks = self._marks or {}
        return json.dumps({kind: marks.get(kind, []) for kind in self._compared}).encode()

    def compare(self, contents: Sequence[bytes], word: str) -> None:
        """Refuse different streams, with a SynchronizationError."""
        if len(set(contents)) == 1:
            return
        everyone: list[Marks] = [json.loads(content) for content in contents]
        first = everyone[0]
        if all(_alike(first, other) for other in everyone):
            self._compared = ["singles"]
            return
        digests = [f"samples {zlib.crc32(content):08x}" for content in contents]
        sentence = (
            f"the {word}s read different samples from the iterable data set of an "
            f"AdaptiveDataLoader ({by_value(digests, word)})"
        )
        if not any(first[kind] for kind in ("singles", "integers") if kind in first):
            if self._leads:
                warn(
                    f"{sentence}: if it is sharded by rank, most samples are lost, as the loader "
                    "divides them itself; if samples are only turned at random, do that in "
                    "collate_fn",
                )
            self._compared = ["singles"]
            return
        raise SynchronizationError(
            f"{sentence}: the loader divides the samples itself, so a stream that is sharded or "
            "shuffled by rank loses most of them: have the data set give all samples, in the same "
            "order on every replica, and transform them at random in collate_fn"
        )


def marks_of(samples: Sequence[Any] | Tensor | np.ndarray[Any, Any]) -> Marks:
    """Return marks of some samples of an iteration, given those of all replicas in order."""
    marks: Marks = {"singles": [], "integers": [], "reals": []}
    step = -(-len(samples) // SAMPLES)
    for sample in samples[::step]:
        for leaf in pytree.tree_leaves(sample):
            _mark(leaf, marks)
    return marks


def _mark(leaf: Any, marks: Marks) -> None:
    if isinstance(leaf, (bool, int, float, str)):
        marks["singles"].append(leaf)
    elif isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized:
        # Select rows first: flattening copies a tensor that is not contiguous.
        flat = (_few(leaf.detach()) if leaf.dim() > 1 else leaf.detach()).reshape(-1)
        exact = not (leaf.is_floating_point() or leaf.is_complex())
        values = [str(value) if leaf.is_complex() else value for value in _few(flat).tolist()]
        marks["singles" if leaf.numel() == 1 else "integers" if exact else "reals"] += values
    elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biuf":
        values = _few((_few(leaf) if leaf.ndim > 1 else np.asarray(leaf)).reshape(-1)).tolist()
        exact = leaf.dtype.kind != "f"
        marks["singles" if leaf.size == 1 else "integers" if exact else "reals"] += values


def _few(flat: Any) -> Any:
    return flat[:: max(-(-len(flat) // VALUES), 1)]


def _alike(one: Marks, other: Marks) -> bool:
    """Return whether samples may be equal up to random augmentation."""
    if one["singles"] or other["singles"]:
        return bool(one["singles"] == other["singles"])
    here, there = one.get("integers", []), other.get("integers", [])
    if here and len(here) == len(there):
        equal = sum(bool(a == b) for a, b in zip(here, there, strict=True))
        return equal >= ALIKE * len(here)
    return not (here or there) and one.get("reals") == other.get("reals")


def content_of(dataset: Any) -> int | None:
    """Return a digest of a map-style data set in memory; None for others, which are not read."""
    parts = list(_contents(dataset))
    return None if None in parts else zlib.crc32(b"".join(part for part in parts if part))


def _contents(dataset: Any) -> Iterator[bytes | None]:
    match dataset:
        case TensorDataset():
            yield json.dumps(marks_of([dataset.tensors])).encode()
        case Subset():
            yield json.dumps([int(index) for index in dataset.indices]).encode()
            inner = content_of(dataset.dataset)
            if inner is not None:
                yield inner.to_bytes(4, "little")
        case ConcatDataset():
            for part in dataset.datasets:
                yield from _contents(part)
        case list() | tuple() | Tensor() | np.ndarray():
            yield json.dumps(marks_of(dataset)).encode()
        case _:
            yield None
