"""Request bodies: limited in size, time and depth; parsed as JSON for any content type."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import refusal

BODY_LIMIT = 2**20
BODY_TIMEOUT = 10.0
"""Seconds allowed for a body."""
DISCARDED = 32
"""Multiple of the limit that is read and discarded, so that the sender can read the answer."""
MAX_DEPTH = 32
"""Largest nesting of objects and arrays; hints have five."""
LARGE = 2**16
"""Size from which a body is parsed in another thread, so that it does not delay other answers."""
UNSTORABLE = ("\\u0000", "\\ud")
"""Escapes of text that no database stores: NUL, and lone surrogates."""


class BodyLimit:
    """ASGI middleware: answers 413 to a body that is too large, 408 to one that is too slow."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float = BODY_TIMEOUT) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            text = f"the body was not complete after {self._seconds:g} s; send it at once"
            await refusal(408, text, {"Connection": "close"})(scope, receive, send)
            return
        except ClientDisconnect:
            return
        if body is None:
            text = f"the body is larger than {self._limit} bytes; send less at a time"
            await refusal(413, text)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return a whole body; None if it is too large."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            size += len(part)
            if size <= self._limit:
                parts.append(part)
            if not message.get("more_body", False) or size > self._limit * DISCARDED:
                return b"".join(parts) if size <= self._limit else None


class JsonRoute(APIRoute):
    """Route that parses a body as JSON for any content type, through `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of the route."""
        answer = super().get_route_handler()
        if self.body_field is None:
            return answer

        async def answer_json(request: Request) -> Response:
            headers = [(b"content-type", b"application/json"), *request.scope["headers"]]
            return await answer(JsonRequest({**request.scope, "headers": headers}, request.receive))

        return answer_json


class JsonRequest(Request):
    """A request whose body must be a JSON object that the database can store."""

    async def json(self) -> dict[str, Any] | HTTPException:
        """Return the body, or the error to raise later: a missing token must be reported first."""
        body = await self.body()
        try:
            return await run_in_threadpool(parse, body) if len(body) > LARGE else parse(body)
        except HTTPException as refused:
            return refused


_JSON_NAMES = {
    type(None): "null",
    bool: "a JSON boolean",
    int: "a JSON number",
    float: "a JSON number",
    str: "a JSON string",
    list: "a JSON array",
}


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; HTTPException: it is none, too deep, or unstorable."""
    try:
        text = body.decode()  # `json` would accept bytes that are not UTF-8
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise HTTPException(422, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HTTPException(
            422, f"the body is {_JSON_NAMES[type(value)]}; send a JSON object, {{…}}"
        )
    _check_depth(value)
    lower = text.lower()
    if any(escape in lower for escape in UNSTORABLE):
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
    """Refuse text that UTF-8 cannot encode, and NUL, in keys and values of a bounded depth."""
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
