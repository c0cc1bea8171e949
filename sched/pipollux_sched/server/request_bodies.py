"""Request bodies: read as JSON whatever their type says, bounded in depth, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, HTTPException, Request
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool

from pipollux_sched.utils.validation import problems

MAX_DEPTH = 32
"""Objects and arrays within one another; hints have five."""
LARGE = 2**16
"""Bytes from which a body is read in another thread, so that others are answered meanwhile."""
_UNSTORABLE = ("\\u0000", "\\ud")
"""Escapes that may stand for what no database keeps: NUL, and halves of surrogate pairs."""

_Model = TypeVar("_Model", bound=BaseModel)


async def read_object(request: Request) -> dict[str, Any]:
    """Read a body that is to be a JSON object."""
    body = await request.body()
    if len(body) > LARGE:
        return await run_in_threadpool(parse_object, body)
    return parse_object(body)


JsonObject = Annotated[dict[str, Any], Depends(read_object)]


def reader(model: type[_Model], what: str) -> Callable[..., Coroutine[Any, Any, _Model]]:
    """Make a dependency that reads a body as a model.

    Args:
        model: the model.
        what: how refusals name the body.
    """

    async def read(body: JsonObject) -> _Model:
        try:
            return model.model_validate(body)
        except ValidationError as error:
            raise HTTPException(422, f"{what}: {problems(error, model)[0].sentence()}") from None

    return read


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object, or raise a refusal of one sentence."""
    try:
        text = body.decode()  # `json` would let bytes that are no UTF-8 pass
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise HTTPException(422, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HTTPException(
            422, f"the body is a JSON {type(value).__name__}; send an object, {{…}}"
        )
    _check_depth(value)
    if any(escape in text.lower() for escape in _UNSTORABLE):
        _check_text(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> HTTPException:
    return HTTPException(
        422, f"the body has more than {MAX_DEPTH} levels of objects and arrays; send a flatter one"
    )


def _check_text(value: Any) -> None:
    """Refuse text that UTF-8 has no bytes for, and NUL, in keys and values; depth is bounded."""
    if isinstance(value, dict):
        for key, child in value.items():
            _check_text(key)
            _check_text(child)
    elif isinstance(value, list):
        for child in value:
            _check_text(child)
    elif isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
        raise HTTPException(
            422,
            f"the body holds the text {value!a:.80}, which cannot be kept; send text without "
            "U+0000 and lone surrogates",
        )
