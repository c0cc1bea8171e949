"""Events about jobs' custom resources, as `kubectl describe` shows them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from pipollux_sched.lifecycle import Phase

from . import names
from .api import Object
from .job_resource import JobResource, rfc3339

__all__ = ["phase_event"]

_WARNINGS = (Phase.FAILED, Phase.RESTARTING)
_MESSAGE_LIMIT = 1000
"""Most characters of a message; the API server accepts 1024."""


def phase_event(
    resource: JobResource, namespace: str, status: Mapping[str, Any], now: float
) -> Object:
    """Return the event of a job that has entered another phase."""
    phase = status["phase"]
    return {
        "metadata": {"name": f"{resource.name}.{secrets.token_hex(8)}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": resource.name,
            "namespace": namespace,
            "uid": resource.uid,
        },
        "reason": status["reason"] or phase,
        "message": (status["message"] or f"The job is {phase}.")[:_MESSAGE_LIMIT],
        "type": "Warning" if phase in _WARNINGS else "Normal",
        "count": 1,
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "source": {"component": "pipollux"},
        "reportingComponent": names.GROUP,
        "reportingInstance": "pipollux",
    }
