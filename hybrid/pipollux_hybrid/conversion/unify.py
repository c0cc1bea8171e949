"""Comparison of recordings at several sizes, and with dropout or autocast.

All must have the same calls. Integers that differ become polynomials in the sizes; plain values
that differ in training become a choice by mode; dtypes that differ under autocast follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .expressions import (
    AutocastType,
    ByMode,
    Constant,
    Expression,
    Form,
    Literal,
    Opaque,
    Polynomial,
    Slice,
    Tree,
    evaluate,
    polynomial,
)
from .recorder import Call, Recording, UnrecordableError, requires_grad_of

Merge = Callable[[Sequence[Expression], str], Expression]
"""Joins one leaf of all recordings, with the place for messages."""


class DifferentCallsError(UnrecordableError):
    """Two recordings have different operations."""


def over_sizes(recordings: Mapping[tuple[int, ...], Recording]) -> Recording:
    """Return a recording for all sizes from those at the corners of a grid of sizes.

    Raises:
        UnrecordableError: Sizes decide which operations run, or a value is no polynomial of them.
    """
    corners = list(recordings)

    def merge(leaves: Sequence[Expression], where: str) -> Expression:
        values = [x.value for x in leaves if isinstance(x, Literal)]
        if len(values) < len(leaves) or not all(type(x) is int for x in values):
            raise DifferentCallsError(
                f"{where}: a value differs between batches of other sizes, and is no integer "
                f"({_shown(leaves)}): compute it from tensors, or move the code into a block"
            )
        found = polynomial(dict(zip(corners, values, strict=True)))
        if found is None:
            raise DifferentCallsError(
                f"{where}: {_shown(leaves)} for batches of sizes {corners} is no sum of "
                "products of sizes: move the code into a block"
            )
        return found

    made = _merged(list(recordings.values()), merge, "batches of other sizes")
    return replace(made, forms=_forms(recordings))


def _forms(recordings: Mapping[tuple[int, ...], Recording]) -> dict[int, Form]:
    """Return the forms of tensors whose sizes are polynomials of those of the batch."""
    found = {}
    for index, form in next(iter(recordings.values())).forms.items():
        if not all(index in x.forms for x in recordings.values()):
            continue
        shapes = {sizes: x.forms[index].sizes(sizes) for sizes, x in recordings.items()}
        if len({len(shape) for shape in shapes.values()}) > 1:
            continue
        columns = [{sizes: x[dim] for sizes, x in shapes.items()} for dim in range(len(form.shape))]
        fitted = [polynomial(column) for column in columns]
        known = tuple(x for x in fitted if x is not None)
        if len(known) == len(fitted):
            found[index] = replace(form, shape=known)
    return found


def check_size(
    recording: Recording, other: Recording, sizes: tuple[int, ...], *, training: bool = False
) -> None:
    """Compare a recording for all sizes with one at sizes that it was not made from.

    Raises:
        DifferentCallsError: It would do something else there.
    """

    def merge(leaves: Sequence[Expression], where: str) -> Expression:
        one, found = leaves
        if isinstance(one, Polynomial) and found == Literal(evaluate(one, sizes)):
            return one
        if isinstance(one, ByMode) and found == (one.training if training else one.evaluation):
            return one
        if isinstance(one, AutocastType) and found == Literal(one.otherwise):
            return one
        raise DifferentCallsError(
            f"{where}: {_shown(leaves)} for batches of sizes {sizes} is no sum of products of "
            "sizes: move the code into a block"
        )

    _merged([recording, other], merge, "batches of other sizes")


def check_without_gradients(
    recording: Recording, other: Recording, sizes: tuple[int, ...], *, training: bool
) -> None:
    """Compare a recording with one that was made under ``torch.no_grad()``.

    Raises:
        DifferentCallsError: The model does something else where gradients are disabled.
    """
    enabled = [replace(x, has_graph=False) for x in _without_reads(recording)]
    disabled = replace(other, calls=_without_reads(other))
    try:
        check_size(replace(recording, calls=enabled), disabled, sizes, training=training)
    except DifferentCallsError as error:
        raise DifferentCallsError(
            f"{str(error).partition(': ')[0]}: the model does something else under torch.no_grad() "
            "(it reads requires_grad or torch.is_grad_enabled()), and layers repeat one of both: "
            "decide by self.training, or move the code into a block"
        ) from error


def _without_reads(recording: Recording) -> list[Call]:
    """Return the calls other than reads of ``requires_grad``: no result has a graph there."""
    return [call for call in recording.calls if call.target is not requires_grad_of]


def with_training(evaluation: Recording, training: Recording, corner: tuple[int, ...]) -> Recording:
    """Return a recording for both modes; ``training`` was made at the sizes of ``corner``."""

    def merge(leaves: Sequence[Expression], where: str) -> Expression:
        one, other = leaves
        if isinstance(one, Polynomial) and other == Literal(evaluate(one, corner)):
            return one
        if isinstance(one, Literal) and isinstance(other, Literal):
            return ByMode(one, other)
        raise DifferentCallsError(
            f"{where}: {_shown(leaves)} in evaluation and training, which layers cannot choose"
        )

    return _merged([evaluation, training], merge, "training mode")


def with_autocast(recording: Recording, under: Recording, corner: tuple[int, ...]) -> Recording:
    """Return a recording for forwards with and without autocast."""

    def merge(leaves: Sequence[Expression], where: str) -> Expression:
        one, other = leaves
        if isinstance(one, Polynomial) and other == Literal(evaluate(one, corner)):
            return one
        if isinstance(one, ByMode) and other in (one.evaluation, one.training):
            return one
        if (
            isinstance(one, Literal)
            and isinstance(one.value, torch.dtype)
            and other == Literal(torch.bfloat16)
        ):
            return AutocastType(one.value)
        raise DifferentCallsError(f"{where}: {_shown(leaves)} without and with autocast")

    return _merged([recording, under], merge, "autocast", autocast=True)


def _merged(
    recordings: Sequence[Recording], merge: Merge, between: str, *, autocast: bool = False
) -> Recording:
    first = recordings[0]
    calls = []
    for row in zip(*(recording.calls for recording in recordings), strict=False):
        if any((x.target, x.is_check) != (row[0].target, row[0].is_check) for x in row):
            raise _different(row, between)
        calls.append(_merged_call(row, merge, between, autocast=autocast))
    if len({len(recording.calls) for recording in recordings}) > 1:
        longest = max(recordings, key=lambda x: len(x.calls))
        raise _different([longest.calls[len(calls)]], between)
    output = _merged_leaf([x.output for x in recordings], merge, "the output", between)
    return replace(first, calls=calls, output=output)


def _merged_call(row: Sequence[Call], merge: Merge, between: str, *, autocast: bool) -> Call:
    where = row[0].where
    args, kwargs, result = (
        _merged_leaf([getattr(x, field) for x in row], merge, where, between)
        for field in ("args", "kwargs", "result")
    )
    if len({x.has_graph for x in row}) > 1:
        raise _different(row, between)
    under = row[-1].has_autocast if autocast else row[0].has_autocast
    return replace(
        row[0],
        args=args,
        kwargs=kwargs,
        result=result,
        has_autocast=under,
        changes=frozenset[str]().union(*(x.changes for x in row)),
        mutates=frozenset[int]().union(*(x.mutates for x in row)),
    )


def _merged_leaf(
    leaves: Sequence[Expression], merge: Merge, where: str, between: str
) -> Expression:
    first = leaves[0]
    if all(x == first and _same_type(x, first) for x in leaves):
        return first
    if isinstance(first, (Tree, Slice)):
        if any(_shape_of(x) != _shape_of(first) for x in leaves):
            raise DifferentCallsError(
                f"{where}: other arguments or results with {between}, so that layers cannot "
                "repeat the call: move the code into a block"
            )
        rows = zip(*(x.items for x in leaves), strict=True)  # type: ignore[union-attr]  # all are trees
        items = tuple(_merged_leaf(row, merge, where, between) for row in rows)
        return replace(first, items=items)  # type: ignore[arg-type]  # as many as before
    if any(isinstance(x, Constant) for x in leaves):
        raise DifferentCallsError(
            f"{where}: the model uses a tensor that no function of torch returned to it, as from "
            "NumPy or a cache: compute it with torch, or move the code into a block"
        )
    if any(isinstance(x, Opaque) for x in leaves):
        kinds = ", ".join(sorted({type(getattr(x, "value", x)).__name__ for x in leaves}))
        raise DifferentCallsError(
            f"{where}: the model makes an object in each forward ({kinds}) and passes it to a "
            "function, which layers cannot repeat: move the code into a block"
        )
    return merge(leaves, where)


def _same_type(one: Expression, other: Expression) -> bool:
    """Distinguish 1, 1.0 and True."""
    if isinstance(one, Literal) and isinstance(other, Literal):
        return type(one.value) is type(other.value)
    return True


def _shape_of(expression: Expression) -> Any:
    if isinstance(expression, Tree):
        return expression.kind, expression.context, len(expression.items)
    return type(expression)


def _different(row: Sequence[Call], between: str) -> DifferentCallsError:
    names = " and ".join(dict.fromkeys(_called(x) for x in row))
    return DifferentCallsError(
        f"{row[0].where}: the model runs other operations with {between} ({names}), so that layers "
        "cannot repeat them: move the code into a block, or cut inside of it with cut_at="
    )


def _called(call: Call) -> str:
    return f"{call.target!r}" if call.is_module else str(getattr(call.target, "__name__", "a call"))


def _shown(leaves: Sequence[Expression]) -> str:
    shown = [str(x.value) if isinstance(x, Literal) else type(x).__name__ for x in leaves]
    return ", ".join(dict.fromkeys(shown))
