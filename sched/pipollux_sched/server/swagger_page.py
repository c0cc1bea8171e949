"""`/docs`: Swagger UI from the files of fastapi-offline, so that it needs no network."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from .web_page import HEADERS, POLICY

FILES = str(files("fastapi_offline") / "static")
_DARK = (
    "<script>document.documentElement.classList.toggle("
    "'dark-mode', matchMedia('(prefers-color-scheme: dark)').matches)</script></body>"
)


def add_docs(app: FastAPI) -> None:
    """Serve the page at `/docs`, and its files under `/docs/files/`."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="REST interface · Pipollux",
        swagger_js_url="/docs/files/swagger-ui-bundle.js",
        swagger_css_url="/docs/files/swagger-ui.css",
        swagger_favicon_url="/web/icon.svg",
    )
    html = bytes(page.body).decode().replace("</body>", _DARK)
    headers = {**HEADERS, "Content-Security-Policy": _policy(html)}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    app.mount("/docs/files", StaticFiles(directory=FILES))


def _policy(html: str) -> str:
    digests = (
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in re.findall("<script>(.*?)</script>", html, re.DOTALL)
    )
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    own = POLICY.partition("; require-trusted-types-for")[0]  # Swagger UI has no trusted types
    return own.replace("script-src 'self'", f"script-src 'self' {scripts}")
