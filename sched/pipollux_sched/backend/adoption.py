"""Whether this scheduler can adopt an attempt that an earlier scheduler started."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .base import Launch, ReplicaKey, ReplicaState

__all__ = ["NO_SLOTS", "why_not_adopted"]

NO_SLOTS = (
    "The cluster no longer has the slots that the job runs on: it is stopped, and goes on from its "
    "checkpoint."
)


def why_not_adopted(
    launch: Launch | None,
    members: Collection[int],
    listed: Mapping[ReplicaKey, ReplicaState],
    scheduler_url: str,
) -> str | None:
    """Return why an attempt cannot be adopted, in one sentence; None: it can.

    The earlier scheduler stored the `launch`, or None; `members` take part; `listed` are all.
    """
    if launch is None or not launch.assignments.keys() >= set(members):
        return "The previous scheduler ended before it had started the job."
    keys = list(map(launch.key, members))
    if any(key not in listed for key in keys):
        return "The previous scheduler ended while it started the job."
    runs = any(listed[key].ended is None for key in keys)
    if runs and launch.scheduler_url != scheduler_url:
        return (
            f"The scheduler now listens at {scheduler_url}, and the job reports to "
            f"{launch.scheduler_url}: it is stopped, and continues from its checkpoint."
        )
    return None
