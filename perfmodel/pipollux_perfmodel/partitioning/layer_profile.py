"""The costs of a model's layers, from which any cut into stages is predicted.

One micro-batch of b samples takes forward_alpha + forward_beta·b seconds in a layer's forward, and
backward_alpha + backward_beta·b in its backward, without recomputation. A stage is a contiguous
range of layers, so its times and memory are linear in b as well.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

VERSION = 1


class Layer(NamedTuple):
    """One layer: seconds per micro-batch (alpha) and per sample (beta), and bytes.

    >>> Layer(forward_alpha=1e-4, forward_beta=1e-5, backward_alpha=1e-4, backward_beta=2e-5)
    ... # doctest: +ELLIPSIS
    Layer(forward_alpha=0.0001, ..., name='')
    """

    forward_alpha: float
    forward_beta: float
    backward_alpha: float
    """Without recomputation, as `backward_beta`."""
    backward_beta: float
    parameter_bytes: float = 0.0
    """Bytes of the parameters; their gradients take the same amount."""
    optimizer_bytes: float = 0.0
    """Bytes of optimizer state (Adam: twice the parameters)."""
    activation_bytes: float = 0.0
    """Bytes per sample that autograd keeps for the layer's backward."""
    output_bytes: float = 0.0
    """Bytes per sample that cross a cut after the layer: its output, and skip connections."""
    copy_bytes: float = 0.0
    """Bytes of a copy of the gradients: sent to other replicas, or compared with the next ones."""
    name: str = ""


_NUMBERS = Layer._fields[:-1]


@dataclass(frozen=True)
class Link:
    """The link between consecutive stages, for activations and gradients.

    >>> Link(latency=1e-5, bandwidth=1e10).seconds(1e8)
    0.01001

    Raises ValueError for a negative latency, a bandwidth that is not positive, or infinity.
    """

    latency: float
    """Seconds of a copy, independent of its size."""
    bandwidth: float
    """Bytes per second."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency is {self.latency}; give finite seconds >= 0")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ValueError(f"bandwidth is {self.bandwidth}; give finite bytes per second > 0")

    def seconds(self, num_bytes: Any) -> Any:
        """Return the duration of a copy; float or array, like `num_bytes`."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class LayerProfile:
    """The layers of a model in order, at least one; compares by value.

    Raises ValueError without layers, or if a number is negative or not finite.

    >>> profile = LayerProfile.from_layers([Layer(0.0, 1.0, 0.0, 2.0), Layer(0.5, 1.0, 1, 2.0)])
    >>> profile.num_layers, profile.forward_seconds(4.0).tolist()
    (2, [4.0, 4.5])
    >>> LayerProfile.from_json_object(profile.to_json_object()) == profile
    True
    """

    layers: tuple[Layer, ...]
    input_bytes: float = 0.0
    """Bytes per sample of the model's input, which the first stage keeps for recomputation."""
    optimizer_shards: int = 1
    """Replicas that shard the optimizer's state of each stage; not part of the JSON."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; give at least one layer")
        for index, layer in enumerate(self.layers):
            for field in _NUMBERS:
                _check_number(f"{_where(index, layer.name)}.{field}", getattr(layer, field))
        _check_number("input_bytes", self.input_bytes)
        if self.optimizer_shards < 1:
            raise ValueError(f"optimizer_shards is {self.optimizer_shards}; give at least 1")

    def sharded(self, num_replicas: int) -> LayerProfile:
        """Return the same layers with the optimizer's state sharded among replicas."""
        return replace(self, optimizer_shards=num_replicas)

    @classmethod
    def from_layers(cls, layers: Iterable[Layer], input_bytes: float = 0.0) -> LayerProfile:
        """Make a profile of any iterable of layers."""
        return cls(tuple(layers), input_bytes)

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.layers)

    def column(self, field: str) -> Floats:
        """Return one number of all layers, shape (L,)."""
        return np.array([getattr(layer, field) for layer in self.layers], dtype=float)

    def forward_seconds(self, micro_bsz: float) -> Floats:
        """Return the forward of b samples by layer, shape (L,)."""
        return self.column("forward_alpha") + self.column("forward_beta") * micro_bsz

    def backward_seconds(self, micro_bsz: float) -> Floats:
        """Return the backward of b samples by layer, without recomputation, shape (L,)."""
        return self.column("backward_alpha") + self.column("backward_beta") * micro_bsz

    def boundary_bytes(self) -> Floats:
        """Return bytes per sample before each layer and after the last, shape (L + 1,)."""
        return np.concatenate(([self.input_bytes], self.column("output_bytes")))

    def by_stage(self, field: str, balance: Sequence[int]) -> Floats:
        """Return the sum of one number over the layers of each stage, shape (K,)."""
        return stage_sums(self.column(field), balance)

    def to_json_object(self) -> dict[str, Any]:
        """Return the profile as a dict for `json.dumps`."""
        layers = []
        for layer in self.layers:
            entry: dict[str, Any] = {"name": layer.name} if layer.name else {}
            entry.update((field, float(getattr(layer, field))) for field in _NUMBERS)
            layers.append(entry)
        return {"version": VERSION, "input_bytes": float(self.input_bytes), "layers": layers}

    @classmethod
    def from_json_object(cls, value: Mapping[str, Any]) -> LayerProfile:
        """Read a profile from decoded JSON; ValueError with the first wrong key, and its value."""
        _check_keys("the profile", value, ("version", "layers"), ("input_bytes",))
        version = value["version"]
        if version != VERSION or isinstance(version, bool):
            raise ValueError(f"layer profile: version is {version!r}; this reads {VERSION}")
        entries = value["layers"]
        if not isinstance(entries, list):
            raise ValueError(f"layer profile: layers is {entries!r:.60}; give a list of objects")
        layers = tuple(_read_layer(index, entry) for index, entry in enumerate(entries))
        return cls(layers, _read_number("input_bytes", value.get("input_bytes", 0.0)))


def stage_ranges(balance: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first layer of each stage, and the index after its last layer.

    >>> stage_ranges([2, 1, 3])
    [(0, 2), (2, 3), (3, 6)]
    """
    return list(itertools.pairwise(itertools.accumulate(balance, initial=0)))


def stage_sums(values: Floats, balance: Sequence[int]) -> Floats:
    """Return the sum over each stage of one number per layer, shape (K,)."""
    return np.add.reduceat(values, [start for start, _ in stage_ranges(balance)])


def check_balance(balance: Sequence[int], num_layers: int) -> None:
    """Raise ValueError if a stage has no layer, or the balance does not sum to `num_layers`."""
    for stage, count in enumerate(balance):
        if count < 1:
            raise ValueError(f"balance[{stage}] is {count}; give each stage at least one layer")
    if sum(balance) != num_layers:
        raise ValueError(
            f"balance {list(balance)} covers {sum(balance)} layers but the profile has "
            f"{num_layers}; give a balance that sums to {num_layers}"
        )


def _where(index: int, name: str) -> str:
    return f"layers[{index}] ({name})" if name else f"layers[{index}]"


def _check_number(where: str, number: float) -> None:
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{where} is {number}; give a finite number >= 0")


def _read_layer(index: int, entry: Any) -> Layer:
    where = f"layers[{index}]"
    if not isinstance(entry, Mapping):
        raise ValueError(f"layer profile: {where} is {entry!r:.60}; give an object")
    optional = tuple(Layer._field_defaults)
    required = tuple(field for field in Layer._fields if field not in optional)
    _check_keys(where, entry, required, optional)
    name = entry.get("name", "")
    if not isinstance(name, str):
        raise ValueError(f"layer profile: {where}.name is {name!r:.60}; give a string")
    numbers = {
        field: _read_number(f"{where}.{field}", number)
        for field, number in entry.items()
        if field != "name"
    }
    return Layer(**numbers, name=name)


def _read_number(where: str, number: Any) -> float:
    wrong = isinstance(number, bool) or not isinstance(number, int | float)
    if wrong or not (math.isfinite(number) and number >= 0):
        raise ValueError(f"layer profile: {where} is {number!r:.60}; give a finite number >= 0")
    return float(number)


def _check_keys(
    where: str, value: Mapping[str, Any], required: Sequence[str], optional: Sequence[str]
) -> None:
    for key in required:
        if key not in value:
            raise ValueError(f"layer profile: {where} has no {key}; give it")
    known = [*required, *optional]
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
            raise ValueError(f"layer profile: {where} has the unknown key {key!r}; {fix}")
