"""Arguments and results of recorded calls, and their Python source.

An expression is a tensor of the program, a tensor of the model, a plain value, or a container of
expressions. Plain values that depend on the batch size, on a length, on training mode or on
autocast have their own kinds, which :mod:`.unify` finds by comparing recordings.
"""

from __future__ import annotations

import enum
import keyword
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that mean the same wherever a layer runs."""


@dataclass(frozen=True)
class Value:
    """A tensor that the program receives or computes, by its number."""

    index: int


@dataclass(frozen=True)
class State:
    """A parameter or buffer of the model, by its name."""

    name: str


@dataclass(frozen=True)
class Constant:
    """A tensor of a module that is neither parameter nor buffer."""

    tensor: Tensor = field(compare=False)
    identity: int


@dataclass(frozen=True)
class Literal:
    """A plain value."""

    value: Any


@dataclass(frozen=True)
class Opaque:
    """An object that calls receive as it is, such as a model's configuration or a function."""

    value: Any = field(compare=False)
    identity: Any


@dataclass(frozen=True)
class Polynomial:
    """An integer that depends on sizes: a sum of coefficients times products of dimensions."""

    terms: tuple[tuple[tuple[int, ...], int], ...]
    """Numbers of the dimensions of each product, with its coefficient."""


@dataclass(frozen=True)
class ByMode:
    """A plain value that differs between evaluation and training."""

    evaluation: Literal
    training: Literal


@dataclass(frozen=True)
class AutocastType:
    """A dtype that is autocast's where autocast is enabled."""

    otherwise: torch.dtype


@dataclass(frozen=True)
class Tree:
    """A container of expressions; kind and context are those of its PyTree node."""

    items: tuple[Expression, ...]
    kind: Any
    context: Any


@dataclass(frozen=True)
class Slice:
    """A slice of an index."""

    items: tuple[Expression, Expression, Expression]


@dataclass(frozen=True)
class Form:
    """What a tensor of the program is, besides its elements."""

    shape: tuple[Expression, ...]
    """Literals, and polynomials where a size depends on those of the batch."""
    dtype: torch.dtype
    requires_grad: bool

    def sizes(self, batch: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape for a batch of these sizes."""
        return tuple(
            evaluate(x, batch) if isinstance(x, Polynomial) else x.value  # type: ignore[union-attr]  # a Literal
            for x in self.shape
        )

    def bytes(self, batch: tuple[int, ...]) -> int:
        """Return the memory for a batch of these sizes."""
        return math.prod(self.sizes(batch)) * self.dtype.itemsize


Expression: TypeAlias = (
    Value | State | Constant | Literal | Opaque | Polynomial | ByMode | AutocastType | Tree | Slice
)


def leaves_of(expression: Expression) -> Iterator[Expression]:
    """Yield the expressions in a container, or the expression itself."""
    if isinstance(expression, (Tree, Slice)):
        for item in expression.items:
            yield from leaves_of(item)
    else:
        yield expression


def rebuilt(expression: Expression, function: Callable[[Expression], Expression]) -> Expression:
    """Return an expression with a function applied to its leaves."""
    if isinstance(expression, Tree):
        items = tuple(rebuilt(x, function) for x in expression.items)
        return Tree(items, expression.kind, expression.context)
    if isinstance(expression, Slice):
        start, stop, step = (rebuilt(x, function) for x in expression.items)
        return Slice((start, stop, step))
    return function(expression)


def polynomial(values: Mapping[tuple[int, ...], int]) -> Literal | Polynomial | None:
    """Return the multilinear function through the values at the corners of a grid of sizes.

    None if it has a coefficient that is no integer.

    Example:
        >>> polynomial({(2,): 8, (3,): 12})
        Polynomial(terms=(((0,), 4),))
    """
    points = sorted(values)
    if len(set(values.values())) == 1:
        return Literal(values[points[0]])
    exact: dict[tuple[int, ...], dict[tuple[int, ...], Fraction]] = {
        point: {(): Fraction(value)} for point, value in values.items()
    }
    for dimension in reversed(range(len(points[0]))):
        merged: dict[tuple[int, ...], dict[tuple[int, ...], Fraction]] = {}
        for point in {point[:dimension] for point in exact}:
            merged[point] = _line(dimension, exact, point)
        exact = merged
    terms = exact[()]
    if any(value.denominator != 1 for value in terms.values()):
        return None
    return Polynomial(tuple(sorted((key, int(x)) for key, x in terms.items() if x)))


def _line(
    dimension: int,
    exact: Mapping[tuple[int, ...], Mapping[tuple[int, ...], Fraction]],
    point: tuple[int, ...],
) -> dict[tuple[int, ...], Fraction]:
    """Return the terms of the line through two points that differ in one dimension."""
    low, high = sorted(other for other in exact if other[:dimension] == point)
    terms: dict[tuple[int, ...], Fraction] = {}
    for key in exact[low].keys() | exact[high].keys():
        first, second = (exact[x].get(key, Fraction(0)) for x in (low, high))
        slope = (second - first) / (high[dimension] - low[dimension])
        terms[key] = first - slope * low[dimension]
        terms[(dimension, *key)] = slope
    return terms


def evaluate(number: Polynomial, sizes: tuple[int, ...]) -> int:
    """Return a polynomial's value."""
    total = 0
    for dimensions, coefficient in number.terms:
        product = coefficient
        for dimension in dimensions:
            product *= sizes[dimension]
        total += product
    return total


class Names:
    """The objects that generated source refers to, by name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def of(self, value: Any, prefix: str) -> str:
        """Return the name of an object."""
        if id(value) not in self._known:
            name = self._known[id(value)] = f"{prefix}_{len(self.values)}"
            self.values[name] = value
        return self._known[id(value)]


def source(expression: Expression, names: Names) -> str:
    """Return the Python source of an expression, in a layer's forward."""
    match expression:
        case Value(index):
            return f"v{index}"
        case State(name):
            owner, _, last = name.rpartition(".")
            scope = f"self{path(owner)}" if owner else "self"
            return f"{scope}.{last}" if is_name(last) else f"getattr({scope}, {last!r})"
        case Constant(tensor):
            return f"constant({names.of(tensor, 'tensor')}, device)"
        case Literal(value):
            return _literal(value, names)
        case Opaque(value):
            return names.of(value, "object")
        case Polynomial(terms):
            return " + ".join(
                "*".join([str(coefficient), *(f"sizes[{i}]" for i in dimensions)])
                for dimensions, coefficient in terms
            )
        case ByMode(evaluation, training):
            given = [_literal(x.value, names) for x in (training, evaluation)]
            return f"({given[0]} if self.training else {given[1]})"
        case AutocastType(otherwise):
            return f"autocast_type(device, {_literal(otherwise, names)})"
        case Slice(items):
            return f"slice({', '.join(source(x, names) for x in items)})"
        case Tree():
            return _container(expression, names)


def _literal(value: Any, names: Names) -> str:
    if isinstance(value, torch.device):
        return "device"
    if type(value) is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if type(value) in (bool, int, float, complex, str, bytes):  # NumPy's numbers are others
        return repr(value)
    if value is None or value is Ellipsis:
        return repr(value)
    return names.of(value, "literal")


def _container(tree: Tree, names: Names) -> str:
    items = [source(item, names) for item in tree.items]
    kind, context = tree.kind, tree.context
    if kind is tuple:
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if kind is list:
        return f"[{', '.join(items)}]"
    if kind is dict:
        pairs = zip(context, items, strict=True)
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in pairs) + "}"
    rebuild = names.of(pytree.SUPPORTED_NODES[kind].unflatten_fn, "rebuild")
    return f"{rebuild}([{', '.join(items)}], {names.of(context, 'context')})"


def path(name: str) -> str:
    """Return the source that reads a module of a layer.

    Example:
        >>> path("h.0.attn")
        ".h._modules['0'].attn"
    """
    return "".join(f".{x}" if is_name(x) else f"._modules[{x!r}]" for x in name.split("."))


def is_name(text: str) -> bool:
    """Return whether a text can be an attribute or a keyword argument in source."""
    return text.isidentifier() and not keyword.iskeyword(text)
