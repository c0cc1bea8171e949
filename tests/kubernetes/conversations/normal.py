"""What of an API server's answers is the same each time."""

from __future__ import annotations

import re
from typing import Any

# What differs from run to run, and what stands for it.
_PATTERNS = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<uid>"),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "<time>"),
    (r"too old resource version: \d+ \(\d+\)", "too old resource version: <n> (<n>)"),
    (r"^made-[a-z0-9]{5}$", "made-<suffix>"),
    # What of a pod's spec was to change is shown as Go shows it.
    (r"\n\s*core\.PodSpec\{[\s\S]*", ""),
    (r"^(10|127)(\.\d+){3}$", "<address>"),
    (r"^n[0-9]$", "<node>"),
    # The runtime's words for a program that is not there.
    (r"^.*no-such-program.*$", "<no such program>"),
)
_REPLACED = {
    "resourceVersion": "<version>",
    "continue": "<token>",
    "containerID": "<container>",
    "imageID": "<image>",
}
# The last one comes from a controller, at some time.
_LEFT_OUT = ("managedFields", "selfLink", "node.alpha.kubernetes.io/ttl")


def normal(value: Any) -> Any:
    """Return what of an answer is the same each time."""
    if isinstance(value, dict):
        found = {
            key: (inner and _REPLACED.get(key)) or normal(inner)
            for key, inner in value.items()
            if key not in _LEFT_OUT
        }
        causes = found.get("details", {}).get("causes", []) if "details" in found else []
        if len(causes) > 1:  # their order is anyone's
            causes.sort(key=lambda cause: str(cause["field"]))
            found["message"] = found["message"].split(": [")[0]
        if isinstance(conditions := found.get("conditions"), list):  # in any order, too
            conditions.sort(key=lambda condition: str(condition.get("type")))
        return {k: v for k, v in found.items() if k != "annotations" or v}
    if isinstance(value, list):
        return [normal(inner) for inner in value]
    if isinstance(value, str):
        for pattern, placeholder in _PATTERNS:
            value = re.sub(pattern, placeholder, value)
    return value
