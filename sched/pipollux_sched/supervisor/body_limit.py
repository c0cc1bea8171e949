"""A limit on the size of requests, before anything is made of them."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DISCARDED = 32
"""How many times the limit is read and thrown away, so that the sender gets to read the answer."""


class BodyLimit:
    """ASGI middleware: answers 413 to a body of more than `limit` bytes, unseen by the application.

    Args:
        app: the application.
        limit: largest body, in bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await self._read(receive)
        if body is None:
            text = f"the body is larger than {self._limit} bytes; send less at a time"
            await JSONResponse({"detail": text}, status_code=413)(scope, receive, send)
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
            part = message.get("body", b"")
            size += len(part)
            if size <= self._limit:
                parts.append(part)
            if not message.get("more_body", False) or size > self._limit * DISCARDED:
                return b"".join(parts) if size <= self._limit else None
