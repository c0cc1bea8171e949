"""The web page: static files without data, so they need no token.

The page requests its data with the admin's token, which it keeps in the browser's session. The
policy below allows it to load only these files, to send requests only to this scheduler, and to
insert no text as markup. Reports use the same chart scripts and charting library.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import NamedTuple

from fastapi import FastAPI, Response

from pipollux_sched.report.charts.specs import LIBRARY, SCRIPTS

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by suffix; files of other kinds are not served."""
BASE_STYLE = "base.css"
"""Colours and fonts that the page shares with reports."""


class _File(NamedTuple):
    content: bytes
    kind: str


def add_pages(app: FastAPI) -> None:
    """Serve the page at `/`, and its files under `/web/`."""
    files = _read()
    page = files.pop("index.html")
    app.add_api_route("/", _answer(page), include_in_schema=False)
    for name, file in files.items():
        app.add_api_route(f"/web/{name}", _answer(file), include_in_schema=False)


def _read() -> dict[str, _File]:
    package = resources.files("pipollux_sched")
    charts = package.joinpath("report", "charts")
    found = {
        BASE_STYLE: package.joinpath("report", "style.css"),
        LIBRARY: charts.joinpath("vendor", LIBRARY),
        **{name: charts.joinpath(name) for name in SCRIPTS},
    }
    for entry in package.joinpath("server", "web").iterdir():
        found[entry.name] = entry
    return {
        name: _File(entry.read_bytes(), KINDS[suffix])
        for name, entry in found.items()
        if (suffix := name[name.rfind(".") :]) in KINDS
    }


def _answer(file: _File) -> Callable[[], Response]:
    def answer() -> Response:
        return Response(file.content, media_type=file.kind, headers=HEADERS)

    return answer
