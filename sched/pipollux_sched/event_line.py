"""An event as one line for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def event_line(event: Mapping[str, Any]) -> str | None:
    """Describe an event in one line; None for those that come too often to be shown.

    Example:
        >>> event_line({"time": 0.0, "type": "complete", "job": "toy", "generation": 2,
        ...             "step": 90, "epoch": 3})[9:]
        'toy: complete at step 90, epochs done: 3'
    """
    text = _text(event)
    if text is None:
        return None
    time = datetime.fromtimestamp(event["time"]).strftime("%H:%M:%S")
    return f"{time} {event['job']}: {text}" if event.get("job") else f"{time} {text}"


def _text(event: Mapping[str, Any]) -> str | None:
    match event["type"]:
        case "submitted":
            return "submitted"
        case "allocated":
            return str(event["why"])
        case "first_step":
            seconds = event["restart_seconds"]
            took = "" if seconds is None else f", {seconds:.1f} s after it was asked to move"
            return f"training since step {event['step']}{took}"
        case "stopped":
            step = event["step"]
            return "stopped without saving" if step is None else f"stopped and saved at step {step}"
        case "restarting":
            return f"restarting: {_first_line(event['why'])}"
        case "complete":
            return _complete(event)
        case "failed":
            return f"failed: {_first_line(event['why'])}"
        case "cancelled":
            return "cancelled"
        case "autoscaling":
            return _autoscaling(event)
        case _:
            return None


def _complete(event: Mapping[str, Any]) -> str:
    if event["step"] is None:
        return "complete"
    return f"complete at step {event['step']}, epochs done: {event['epoch']}"


def _autoscaling(event: Mapping[str, Any]) -> str:
    lists = {"to be left": event["drain"], "to be given back": event["release"]}
    parts = [f"{', '.join(names)} {what}" for what, names in lists.items() if names]
    nodes = "node" if event["desired"] == 1 else "nodes"
    return "; ".join([f"wants {event['desired']} {nodes}", *parts])


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
