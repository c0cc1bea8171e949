"""Events as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from pipollux_utils.text import count, first_line, listing, seconds, spell_duration, spell_nodes

Event: TypeAlias = Mapping[str, Any]


def event_line(event: Event, *, every: bool = False) -> str | None:
    """Describe an event in one line; None for frequent events unless `every`.

    Example:
        >>> event_line({"time": 0.0, "type": "complete", "job": "toy", "attempt": 2,
        ...             "step": 90, "epoch": 3})[9:]
        'toy: complete at step 90, epochs done: 3'
    """
    text = event_text(event, every=every)
    return None if text is None else told_line(event["time"], event.get("job"), text)


def told_line(time: float, job: str | None, text: str) -> str:
    """Return an event, of a job or of none, as one line that starts with the time of day."""
    clock = datetime.fromtimestamp(time).strftime("%H:%M:%S")
    return f"{clock} {job}: {text}" if job else f"{clock} {text}"


def event_text(event: Event, *, every: bool = False) -> str | None:
    """Describe an event without its time and job: see `event_line`."""
    kind = str(event["type"])
    if kind in _TELLING:
        return _TELLING[kind](event)
    if not every:
        return None
    return _FREQUENT[kind](event) if kind in _FREQUENT else kind


def _first_step(event: Event) -> str:
    seconds = event["restart_seconds"]
    took = "" if seconds is None else f", {seconds:.1f} s after it was asked to move"
    return f"training since step {event['step']}{took}"


def _stopped(event: Event) -> str:
    step, newest = event["step"], event.get("checkpoint")
    if step is not None:
        return f"stopped and saved at step {step}"
    since = "" if newest is None else f"; its newest checkpoint is of step {newest}"
    return f"stopped without saving{since}"


def _complete(event: Event) -> str:
    if event["step"] is None:
        return "complete"
    return f"complete at step {event['step']}, epochs done: {event['epoch']}"


def _rerun(event: Event) -> str:
    where = "the start" if event["from_scratch"] else "its last checkpoint"
    return f"run again from {where}"


def _autoscaling(event: Event) -> str:
    lists = {"to drain": event["drain"], "to release": event["release"]}
    parts = [f"{', '.join(names)} {what}" for what, names in lists.items() if names]
    nodes = "node" if event["desired"] == 1 else "nodes"
    return "; ".join([f"wants {event['desired']} {nodes}", *parts])


def _notice(event: Event) -> str:
    clock = datetime.fromtimestamp(event["due"]).strftime("%H:%M:%S")
    return f"must return borrowed slots to other teams at {clock}"


def _updated(event: Event) -> str:
    before = f" from team {event['before']}" if event["before"] else ""
    return f"moved to team {event['team']}{before}"


def _node(event: Event) -> str:
    reason = f": {first_line(event['reason'])}" if event["reason"] else ""
    return f"node {event['node']} is {event['condition']}{reason}"


def _cluster(event: Event) -> str:
    slots = sum(int(node["slots"]) for node in event["nodes"].values())
    return f"a scheduler serves {count(len(event['nodes']), 'node')} with {count(slots, 'slot')}"


def _progress(event: Event) -> str:
    loss = "" if event["loss"] is None else f", loss {event['loss']:.4g}"
    return f"step {event['step']}{loss}"


def decision_text(why: str, why_restart: str | None) -> str:
    """Return the reason of a decision and, if it is a restart, the reason of the restart.

    Example:
        >>> decision_text("moves to node-b", "none of its replicas stays where it is")
        'moves to node-b; a restart, as none of its replicas stays where it is'
    """
    return f"{why}; a restart, as {first_line(why_restart)}" if why_restart else why


def _allocated(event: Event) -> str:
    return decision_text(str(event["why"]), event.get("why_restart"))


def _changing(event: Event) -> str:
    joining = [f"{one['replica']} on {one['node']}" for one in event["joining"]]
    leaving = [str(replica) for replica in event["leaving"]]
    parts = [
        f"{_several('replica', words)} {'is' if len(words) == 1 else 'are'} to {verb}"
        for words, verb in ((joining, "join"), (leaving, "leave"))
        if words
    ]
    return f"resizes: {'; '.join(parts)}"


def _changed(event: Event) -> str:
    return f"resized: {_goes_on(event)}"


def _replicas_lost(event: Event) -> str:
    who = _several("replica", [str(one) for one in event["replicas"]])
    verb = "is" if len(event["replicas"]) == 1 else "are"
    return f"{who} {verb} lost: {first_line(event['why'])}"


def _survived(event: Event) -> str:
    lost = _several("replica", [str(one) for one in event["lost"]])
    return f"continues without {lost}: {_goes_on(event)}"


def _goes_on(event: Event) -> str:
    """Spell which replicas keep training, from which step, and after which pause."""
    nodes, pause = event["nodes"], event["pause_seconds"]
    who = f"{count(len(nodes), 'replica')} on {spell_nodes(nodes)}"
    since = "" if event["step"] is None else f" since step {event['step']}"
    after = "" if pause is None else f", after a pause of {seconds(pause)}"
    return f"{who} {'trains' if len(nodes) == 1 else 'train'}{since}{after}"


def _several(what: str, words: Sequence[str]) -> str:
    return f"{what}{'' if len(words) == 1 else 's'} {listing(words)}"


def _waiting(event: Event) -> str:
    return f"has waited {spell_duration(event['threshold'])} for slots: {first_line(event['why'])}"


def _forecast_missed(event: Event) -> str:
    what, at = event["what"], event["at"]
    verb = {"start": "started", "end": "ended"}[what]
    happened = f"has not {verb}" if at is None else f"{verb} at {_clock(at)}"
    low = "any time" if event["low"] is None else _clock(event["low"])
    until = "" if event["high"] is None else f" and {_clock(event['high'])}"
    interval = f"between {low}{until}" if until else f"after {low}"
    return f"forecast missed: its {what} was forecast {interval}, and it {happened}"


def _clock(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


_Telling: TypeAlias = Mapping[str, Callable[[Event], str]]

_TELLING: _Telling = {
    "submitted": lambda _event: "submitted",
    "allocated": _allocated,
    "first_step": _first_step,
    "changing": _changing,
    "changed": _changed,
    "change_abandoned": lambda event: f"elastic resize given up: {first_line(event['why'])}",
    "survived": _survived,
    "replicas_lost": _replicas_lost,
    "stopped": _stopped,
    "restarting": lambda event: f"restarting: {first_line(event['why'])}",
    "complete": _complete,
    "failed": lambda event: f"failed: {first_line(event['why'])}",
    "cancelled": lambda _event: "cancelled",
    "pruned": lambda _event: "pruned, as other trials are better",
    "ready": lambda _event: "the jobs that it waited for have ended",
    "suspended": lambda _event: "suspended by its user",
    "resumed": lambda _event: "resumed by its user",
    "rerun": _rerun,
    "deleted": lambda _event: "deleted by its user",
    "adopted": lambda event: f"adopted while it runs on {spell_nodes(event['nodes'])}",
    "heartbeat_lost": lambda event: f"heartbeat lost: {first_line(event['why'])}",
    "stalled": lambda event: f"stalled: {first_line(event['why'])}",
    "node": _node,
    "autoscaling": _autoscaling,
    "teams": lambda event: f"teams: {', '.join(event['teams']) or 'none any more'}",
    "waiting": _waiting,
    "forecast_missed": _forecast_missed,
    "notice": _notice,
    "updated": _updated,
    "token": lambda event: f"a token of {event['name']} ({event['role']}) was {event['what']}",
}
_FREQUENT: _Telling = {
    "cluster": _cluster,
    "started": lambda event: f"attempt {event['attempt']} started",
    "waiting_to_join": lambda event: f"replica {event['replica']} waits to join",
    "stopping": lambda event: f"asked to stop: {first_line(event['why'])}",
    "forecast": lambda _event: "a forecast was recorded",
    "hints": lambda _event: "sent hints",
    "progress": _progress,
    "timeline": lambda event: f"sent the timeline of step {event['step']}",
}

TELLING_TYPES = tuple(_TELLING)
"""Types of events shown by default."""
EVENT_TYPES = (*_TELLING, *_FREQUENT)
