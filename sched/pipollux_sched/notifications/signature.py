"""Signatures of webhooks, in the format of Standard Webhooks (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import hashlib
import hmac

from pipollux_sched.spec.notify import secret_bytes


def signed_headers(secret: str, message: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a signed request; `message` is its id, the same in each attempt."""
    signed = f"{message}.{timestamp}.".encode() + body
    digest = hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": message,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
