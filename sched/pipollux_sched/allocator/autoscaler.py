"""Control of the number of nodes: decisions, draining, and requests, once per round.

The expander rents and releases nodes in a separate thread, because that may take minutes. A
restarted scheduler observes for a whole window before it changes anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from pipollux_policies import (
    AutoscalingRules,
    AutoscalingState,
    JobInfo,
    NodeInfo,
    NodePlan,
    Policy,
    autoscale,
    plan_nodes,
)
from pipollux_policies.teams.eligible import runs_within_quota
from pipollux_policies.teams.team import Teams
from pipollux_policies.teams.team_policy import TeamPolicy
from pipollux_sched.errors import PipolluxError
from pipollux_sched.utils.vital_thread import VitalThread

from .expander import Expander
from .job_infos import node_template

_LOG = logging.getLogger(__name__)
JOIN_TIMEOUT = 5.0


class Autoscaler:
    """Decides after every round on the number of nodes, and requests it.

    Args:
        expander: receives the request in every round until it is met.
        policy: predicts the utility of other numbers of nodes.
        on_change: called with the plan whenever it changes.
    """

    def __init__(
        self,
        rules: AutoscalingRules,
        expander: Expander,
        policy: Policy,
        *,
        on_change: Callable[[NodePlan], object] = lambda _: None,
    ) -> None:
        self._rules = rules
        self._policy = policy
        self._on_change = on_change
        self._state = AutoscalingState()
        self._plan: NodePlan | None = None
        self._errands = _Errands(expander)

    def start(self) -> VitalThread:
        """Start the thread that carries out requests, and return it."""
        return self._errands.start()

    def stop(self) -> None:
        """Carry out no further request; wait briefly for the current one."""
        self._errands.stop()

    def round(
        self,
        jobs: Mapping[str, JobInfo],
        nodes: Mapping[str, NodeInfo],
        allocations: Mapping[str, Sequence[str]],
        busy: Collection[str],
        teams: Teams | None = None,
    ) -> tuple[str, ...]:
        """Process one round of the policy; return the nodes to mark as draining.

        The number of nodes depends on quotas alone, not on loans between teams. `nodes` have the
        draining ones of the previous round marked; jobs that are moving keep nodes `busy`.
        """
        template = node_template(nodes)
        policy: Policy = self._policy
        counted = jobs
        if teams is not None:
            own = teams.without_loans(job.team for job in jobs.values())
            policy = TeamPolicy(self._policy, own)
            counted = {
                name: job
                for name, job in jobs.items()
                if allocations.get(name) or runs_within_quota(own, job)
            }
        self._state, desired = autoscale(
            self._rules, self._state, policy, counted, nodes, allocations, template
        )
        before = self._plan.drain if self._plan else ()
        plan = _without(busy, plan_nodes(desired, before, jobs, nodes, allocations))
        if plan != self._plan:
            self._plan = plan
            self._on_change(plan)
        if plan.num_nodes != len(nodes) or plan.release:
            self._errands.ask(plan)
        return plan.drain


def _without(busy: Collection[str], plan: NodePlan) -> NodePlan:
    release = tuple(name for name in plan.release if name not in busy)
    kept = len(plan.release) - len(release)
    return replace(plan, release=release, num_nodes=plan.num_nodes + kept)


class _Errands:
    """Carries out requests in a separate thread; a newer request replaces a pending one."""

    def __init__(self, expander: Expander) -> None:
        self._expander = expander
        self._changed = threading.Condition()
        self._wanted: NodePlan | None = None
        self._ending = False
        self._thread: VitalThread | None = None

    def start(self) -> VitalThread:
        self._thread = VitalThread("expander", self._run)
        self._thread.start()
        return self._thread

    def stop(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT)

    def ask(self, plan: NodePlan) -> None:
        with self._changed:
            self._wanted = plan
            self._changed.notify()

    def _run(self) -> None:
        while (plan := self._next()) is not None:
            self._carry_out(plan)

    def _next(self) -> NodePlan | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ending or self._wanted is not None)
            plan, self._wanted = self._wanted, None
            return None if self._ending else plan

    def _carry_out(self, plan: NodePlan) -> None:
        try:
            self._expander.request(plan.num_nodes, plan.release)
        except PipolluxError as error:  # the expander of an engine may raise other errors
            _LOG.warning("%s", error)
        except Exception:  # user code: if it fails, jobs continue on the present nodes
            _LOG.exception("the expander failed")
