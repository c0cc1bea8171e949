"""Events in words, one line each, for terminals and logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipollux_sched.report.run.event_log import Event, names, real, text, whole
from pipollux_sched.utils.text import amount, clean, count, duration, placement


def describe(event: Event) -> str | None:
    """Return what an event says, or None for those too frequent to be told one by one.

    >>> describe({"time": 0.0, "type": "stopped", "job": "char-lm", "step": 663})
    'char-lm stopped after step 663'
    """
    kind = text(event, "type")
    if kind == "cluster":
        return _cluster(event)
    words = _WORDS.get(kind)
    name = clean(text(event, "job"))
    return f"{name} {words(event)}" if words is not None and name else None


def _cluster(event: Event) -> str:
    nodes = event.get("nodes")
    if not isinstance(nodes, Mapping):
        return "cluster without nodes"
    parts = [
        f"{clean(name)} with {count(whole(node, 'slots') or 0, 'slot')}"
        for name, node in nodes.items()
        if isinstance(node, Mapping)
    ]
    policy = clean(text(event, "policy"))
    return f"cluster: {', '.join(parts)}" + (f"; policy {policy}" if policy else "")


def _submitted(event: Event) -> str:
    spec = event.get("spec")
    num_stages = whole(spec, "num_stages") if isinstance(spec, Mapping) else None
    return f"submitted, {count(num_stages or 1, 'stage')}"


def _allocated(event: Event) -> str:
    nodes = names(event, "nodes")
    why = clean(text(event, "why"))
    tail = f": {why}" if why else ""
    if not nodes:
        return f"allocated nothing{tail}"
    return f"allocated {count(len(nodes), 'replica')} on {placement(nodes)}{tail}"


def _started(event: Event) -> str:
    return f"started, generation {amount(whole(event, 'generation'))}"


def _first_step(event: Event) -> str:
    took = real(event, "restart_seconds")
    tail = f", {duration(took)} after it was asked to stop" if took is not None else ""
    return f"trains from step {amount(whole(event, 'step'))} on{tail}"


def _stopping(event: Event) -> str:
    why = clean(text(event, "why"))
    return "asked to stop" + (f": {why}" if why else "")


def _stopped(event: Event) -> str:
    step = whole(event, "step")
    return "stopped" + (f" after step {amount(step)}" if step is not None else "")


def _restarting(event: Event) -> str:
    return f"restarts: {clean(text(event, 'why')) or 'no reason given'}"


def _complete(event: Event) -> str:
    step = whole(event, "step")
    return "complete" + (f" after step {amount(step)}" if step is not None else "")


def _failed(event: Event) -> str:
    return f"failed: {clean(text(event, 'why')) or 'no reason given'}"


_WORDS: dict[str, Callable[[Event], str]] = {
    "submitted": _submitted,
    "allocated": _allocated,
    "started": _started,
    "first_step": _first_step,
    "stopping": _stopping,
    "stopped": _stopped,
    "restarting": _restarting,
    "complete": _complete,
    "failed": _failed,
    "cancelled": lambda _event: "cancelled",
    "rerun": lambda _event: "run again",
    "deleted": lambda _event: "deleted",
}
