"""Check of the Host header against DNS rebinding.

A web page can resolve its own host name to this machine and so send requests to the scheduler as to
its own server. They have that page's host name, so only the scheduler's names are answered.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import refusal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_ADMITTED = 64
"""Number of headers to remember; names that match a wildcard are unbounded."""


class HostCheck:
    """ASGI middleware: refuses requests for other hosts with 400 and a sentence.

    Besides the loopback interface, `hosts` are accepted; ``*.example.com`` stands for a suffix.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        # In the header an IPv6 address is in brackets.
        self._hosts = [f"[{h.strip('[]')}]" if ":" in h else h for h in (*LOOPBACK, *hosts)]
        self._admitted: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        named = [value for key, value in scope.get("headers", ()) if key == b"host"]
        if len(named) == 1 and named[0] in self._admitted:
            await self._app(scope, receive, send)
            return
        admitted = False

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal admitted
            admitted = True
            if len(named) == 1 and len(self._admitted) < MOST_ADMITTED:
                self._admitted.add(named[0])
            await self._app(scope, receive, send)

        async def send_if_admitted(message: Message) -> None:
            if admitted:
                await send(message)

        check = TrustedHostMiddleware(serve, self._hosts, www_redirect=False)
        await check(scope, receive, send_if_admitted)
        if not admitted:
            host = Headers(scope=scope).get("host", "")[:100]
            sentence = (
                f"the header Host is {host!r}, which this scheduler does not accept; use the "
                "address that it prints at its start, or allow the name with serve --allow-host"
            )
            await refusal(400, sentence)(scope, receive, send)
