"""A fast path for the frequent requests of jobs: heartbeats, reports and hints.

In FastAPI, finding a route, solving its dependencies and building error models costs several times
the heartbeat itself. A valid request needs none of these: its endpoint in `routes.job_side` is
called directly. Any other request takes the regular path, which reports the error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from pipollux_perfmodel import HintsError
from pipollux_protocol.messages import MOST_ATTEMPTS, Heartbeat, TrainingReport
from pipollux_sched.errors import SchedulerError
from pipollux_sched.spec.hints import read_hints

from .dependencies import Services
from .request_bodies import LARGE, UNSTORABLE, parse
from .routes.job_side import post_heartbeat, post_report, put_hints

__all__ = ["FastPath"]

_USUAL = "pipollux_usual_way"
"""Scope entry of requests that take the regular path."""
_BEARER = b"Bearer "

_UNSTORABLE = tuple(escape.encode() for escape in UNSTORABLE)

_Body = TypeVar("_Body", bound=BaseModel)
_Endpoint = Callable[[str, bytes, bytes], Awaitable[bytes]]
"""Takes a job's name, the query and the body; returns the answer, or raises `_UnusualError`."""


class _UnusualError(SchedulerError):
    """A request takes the regular path."""


class FastPath(BaseRoute):
    """Route that answers valid requests of jobs itself; comes before all other routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._endpoints: Mapping[tuple[str, str], _Endpoint] = {
            ("POST", "heartbeats"): self._heartbeat,
            ("POST", "reports"): self._report,
            ("PUT", "hints"): self._hints,
        }

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match the frequent requests of jobs."""
        is_ours = scope["type"] == "http" and self._find(scope) is not None
        return (Match.FULL if is_ours and _USUAL not in scope else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to the regular path."""
        name, endpoint = self._find(scope) or ("", None)
        message = await receive()
        body: bytes = message.get("body", b"")
        try:
            if endpoint is None or len(body) > LARGE or not await self._admits(name, scope):
                raise _UnusualError
            answer = await endpoint(name, scope["query_string"], body)
        except _UnusualError:
            scope[_USUAL] = True
            await scope["router"](scope, _again(message, receive), send)
            return
        headers = [(b"content-type", b"application/json")]
        if answer:
            headers.append((b"content-length", b"%d" % len(answer)))
        status = 200 if answer else 204
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _find(self, scope: Scope) -> tuple[str, _Endpoint] | None:
        _, _, rest = scope["path"].partition("/jobs/")
        name, _, what = rest.partition("/")
        endpoint = self._endpoints.get((scope["method"], what))
        return None if endpoint is None or scope["path"] != f"/jobs/{rest}" else (name, endpoint)

    async def _admits(self, name: str, scope: Scope) -> bool:
        tokens = [value for key, value in scope["headers"] if key == b"authorization"]
        if len(tokens) != 1 or not tokens[0].startswith(_BEARER):
            return False
        token = tokens[0].removeprefix(_BEARER).decode("latin-1")
        return await self._services.auth.admits_own_token(name, token)

    async def _heartbeat(self, name: str, query: bytes, body: bytes) -> bytes:
        heartbeat = _read(Heartbeat, query, body)
        answer = await post_heartbeat(name, self._services, heartbeat)
        return answer.model_dump_json().encode()

    async def _report(self, name: str, query: bytes, body: bytes) -> bytes:
        report = _read(TrainingReport, query, body)
        answer = await post_report(name, self._services, report)
        return answer.model_dump_json().encode()

    async def _hints(self, name: str, query: bytes, body: bytes) -> bytes:
        number = query.removeprefix(b"attempt=")
        if number == query or not 1 <= int(number if number.isdigit() else 0) <= MOST_ATTEMPTS:
            raise _UnusualError
        try:
            hints = read_hints(parse(body))
        except (HintsError, HTTPException):
            raise _UnusualError from None
        await put_hints(name, self._services, int(number), hints)
        return b""


def _read(model: type[_Body], query: bytes, body: bytes) -> _Body:
    """Parse a body; its model bounds its form and depth."""
    lower = body.lower()
    if query or any(escape in lower for escape in _UNSTORABLE):
        raise _UnusualError
    try:
        return model.model_validate_json(body)
    except ValidationError:
        raise _UnusualError from None


def _again(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that repeats a message, then yields the following ones."""
    messages = [message]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
