"""The HTTP client that a job's threads reach its scheduler with."""

from __future__ import annotations

import ssl
from typing import Any

import httpx

from .env import JobEnvironment

__all__ = ["retry_after", "supervisor_client"]

LATER = (429, 503)
"""Statuses with which a scheduler says that it has too much to do."""


def supervisor_client(env: JobEnvironment, **options: Any) -> httpx.Client:
    """Return a client that bears the job's token, and verifies the scheduler's certificate.

    Args:
        env: The job's environment.
        options: What httpx's client takes besides.
    """
    verify: ssl.SSLContext | bool = True
    if env.ca_file is not None:
        verify = ssl.create_default_context(cafile=env.ca_file)
    return httpx.Client(
        headers={"Authorization": f"Bearer {env.token or ''}"},
        verify=verify,
        trust_env=False,  # loopback and cluster addresses are not for proxies
        **options,
    )


def retry_after(response: httpx.Response) -> float | None:
    """Return after how many seconds a scheduler that has too much to do wants to be asked again.

    None: it has answered, or refused for another reason, or does not say.
    """
    if response.status_code not in LATER:
        return None
    try:
        return max(float(response.headers["Retry-After"]), 0.0)
    except (KeyError, ValueError):  # a proxy may name a date
        return None
