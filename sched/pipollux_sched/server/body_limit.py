"""A limit on the size of requests, and on the time they take, before anything is made of them."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_TIMEOUT = 10.0
"""Seconds that a body may take."""
DISCARDED = 32
"""How many times the limit is read and thrown away, so that the sender gets to read the answer."""


class BodyLimit:
    """ASGI middleware: answers 413 to a body that is too large, 408 to one that takes too long.

    The application sees neither, nor a request whose sender is gone before it was complete.

    Args:
        app: the application.
        limit: largest body, in bytes.
        seconds: that a body may take.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float = BODY_TIMEOUT) -> None:
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
        except TimeoutError:
            text = f"the body was not complete after {self._seconds:g} s; send it at once"
            await _refuse(408, text, {"Connection": "close"})(scope, receive, send)
            return
        except ClientDisconnect:
            return
        if body is None:
            text = f"the body is larger than {self._limit} bytes; send less at a time"
            await _refuse(413, text)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Read a whole body; None where it is too large."""
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


def _refuse(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": text}, status_code=status, headers=headers)
