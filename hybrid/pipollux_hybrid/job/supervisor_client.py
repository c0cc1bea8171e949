"""The HTTP client that a job's threads reach its scheduler with."""

from __future__ import annotations

import ssl
from typing import Any

import httpx

from .env import JobEnvironment

__all__ = ["supervisor_client"]


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
