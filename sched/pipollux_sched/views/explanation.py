"""Response models of explanations: a job's allocation, its reason, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field

from pipollux_sched.lifecycle import Intent, Phase

from .models import ForecastView, View


class LimitKind(StrEnum):
    """Kinds of limits on a job's allocation."""

    SUSPENDED = "suspended"
    STOPPING = "stopping"
    STARTING = "starting"
    WAITS_TO_RETRY = "waits_to_retry"
    NOT_PREEMPTIBLE = "not_preemptible"
    DRAINING = "draining"
    MAX_REPLICAS = "max_replicas"
    PROFILED = "profiled"
    NO_ROOM = "no_room"
    HARMFUL = "harmful"
    NOT_WORTH_IT = "not_worth_it"
    MIN_REPLICAS = "min_replicas"
    TEAM = "team"
    FAIRNESS = "fairness"
    LEFT_OUT = "left_out"


@dataclass(frozen=True)
class Limit:
    """One limit on a job's allocation."""

    kind: LimitKind
    text: str
    """The limit as a sentence."""


@dataclass(frozen=True)
class Alternative:
    """The allocation of a job with one replica more or fewer."""

    nodes: tuple[str, ...]
    """Node of each replica; empty if no nodes can hold them."""
    num_replicas: int
    speedup: float | None
    """Predicted, relative to one replica; None: unknown."""
    batch_size: int | None
    fits: bool
    """Whether there are free slots for it now."""


@dataclass(frozen=True)
class NextChange:
    """The kind of the next change of a job's replicas."""

    elastic: bool
    """Whether it would be an elastic resize."""
    why_restart: str | None
    """The reason that it would be a restart."""


@dataclass(frozen=True)
class NetworkCost:
    """The speedup of a job's present number of replicas if their nodes meet at a network level."""

    level: int
    """1: the lowest above the node."""
    within: str
    """Name of the level, such as rack; `cluster` for the highest."""
    num_nodes: int
    num_replicas: int
    speedup: float
    here: bool
    """Whether the job's nodes meet at this level."""


class ExplanationView(View):
    """The explanation of a job's allocation; speedups are predicted, relative to one replica.

    `changing`: an elastic resize in progress, in words. `next_change`: null if nothing runs, or if
    the job is being stopped. `planned_by`: the job whose measurements are used; null: the job's
    own, or none. The `last_decision` has `elastic`, and `why_restart` if it was a restart.
    """

    name: str
    phase: Phase
    reason: str
    message: str
    nodes: list[str]
    num_stages: int
    assigned: list[str]
    intent: Intent | None
    speedup: float | None
    batch_size: int | None
    last_decision: dict[str, Any] | None
    changing: str | None
    next_change: NextChange | None
    more: Alternative | None
    fewer: Alternative | None
    limits: list[Limit]
    waits_for: str | None
    planned_by: str | None
    forecast: ForecastView | None = None
    synchronization: str | None = None
    """What pushes and pulls cost, as a sentence; null: gradients are averaged in every step."""
    network: list[NetworkCost] = Field(default_factory=list)
    """By level of the network; empty without levels, with one replica, or without a model."""
