"""The HTTP client of a job's threads for the scheduler."""

from __future__ import annotations

import ssl
from typing import Any

import httpx

from .env import JobEnvironment

LATER = (429, 503)
"""Statuses of an overloaded scheduler."""


def supervisor_client(env: JobEnvironment, **options: Any) -> httpx.Client:
    """Return a client with the job's token and the scheduler's certificates."""
    verify: ssl.SSLContext | bool = True
    if env.ca_file is not None:
        verify = ssl.create_default_context(cafile=env.ca_file)
    elif (env.scheduler_url or "").startswith("http:"):
        # There is no TLS; reading the authorities would take 20 ms.
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.Client(
        headers={"Authorization": f"Bearer {env.token or ''}"},
        verify=verify,
        trust_env=False,  # loopback and cluster addresses are not for proxies
        **options,
    )


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds after which an overloaded scheduler accepts a retry; else None."""
    if response.status_code not in LATER:
        return None
    try:
        return max(float(response.headers["Retry-After"]), 0.0)
    except (KeyError, ValueError):  # a proxy may name a date
        return None
