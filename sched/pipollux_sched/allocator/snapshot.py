"""What the store of a scheduler knows, in the form that decisions are made of; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from pipollux_sched.lifecycle import Allocate
from pipollux_sched.policy import POLICIES, NodeInfo, Policy
from pipollux_sched.spec.job import NodeSpec
from pipollux_sched.store import NodeCondition, NodeRecord, Store

from .allocator import (
    Allocator,
    Candidate,
    Decision,
    FixedStrategy,
    Strategy,
    place_new,
    reallocate,
)
from .job_infos import node_info

RESTART_SECONDS = 30.0
"""What a restart is taken to cost before a job's own was measured."""


@dataclass(frozen=True)
class LiveState:
    """One moment of a scheduler, as its allocator sees it."""

    candidates: tuple[Candidate, ...]
    """Jobs that can be decided on: neither ended, nor suspended by their users, nor being ended."""
    nodes: Mapping[str, NodeInfo]
    """Nodes that are not dead; some may drain."""

    @classmethod
    def read(cls, store: Store) -> LiveState:
        """Read it from a store.

        Raises:
            SpecError: the store holds a node or a job that this version cannot read.
        """
        nodes = present_nodes(store.nodes())
        allocator = Allocator(
            store, nodes, FixedStrategy({}), carry_out=_refuse, restart_seconds=RESTART_SECONDS
        )
        return cls(tuple(allocator.candidates()), nodes)

    def candidate(self, name: str) -> Candidate | None:
        """Return a job; None if it cannot be decided on."""
        return next((job for job in self.candidates if job.name == name), None)


def present_nodes(records: Mapping[str, NodeRecord]) -> dict[str, NodeInfo]:
    """Return nodes as policies see them: the dead are not there, others may drain."""
    found = {}
    for name, record in records.items():
        if record.condition is not NodeCondition.DEAD:
            node = node_info(NodeSpec.model_validate(record.spec))
            draining = node.draining or record.condition is NodeCondition.DRAINING
            found[name] = replace(node, draining=draining)
    return found


def preview(state: LiveState, strategy: Strategy) -> list[Decision]:
    """Say what the allocator would change now: `Allocator.run_once`, without carrying it out.

    Raises:
        ValueError: what the strategy came to is impossible; the text says why.
    """
    started = place_new(state.candidates, state.nodes, strategy)
    given = {decision.job: decision for decision in started}
    after = [_started(job, given.get(job.name)) for job in state.candidates]
    return [*started, *reallocate(after, state.nodes, strategy)]


def policy_named(class_name: str, make: Callable[[str], Policy]) -> str | None:
    """Return the name of the policy of that class, None if there is none: events tell the class."""
    return next((name for name in POLICIES if type(make(name)).__name__ == class_name), None)


def serving_policy(events: Sequence[Mapping[str, object]]) -> str | None:
    """Return the class of the policy that the last `cluster` event names."""
    return next((str(event["policy"]) for event in reversed(events) if "policy" in event), None)


def _started(job: Candidate, decision: Decision | None) -> Candidate:
    """Return a job as it is when it has just been started: left alone until its first step."""
    if decision is None:
        return job
    return replace(job, allocation=decision.nodes, num_stages=decision.num_stages, pinned=True)


def _refuse(events: Sequence[tuple[str, Allocate]]) -> NoReturn:
    raise AssertionError(f"jobs were to be moved by somebody who only looks: {events}")
