"""`pipollux simulate --from-state`: the history of a scheduler as a workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pipollux_sched.errors import PipolluxError
from pipollux_utils.text import count, listing

from .console import USAGE, CommandError

if TYPE_CHECKING:
    from pipollux_policies import NodeInfo
    from pipollux_sched.history.reality import Agreement
    from pipollux_sched.history.records import SchedulerHistory
    from pipollux_sched.history.workload import Replay
    from pipollux_sched.spec.teams import TeamsSpec
    from pipollux_simulator import SimulationOutcome, Workload

USUAL = "default"


def read_past(folder: Path) -> SchedulerHistory:
    """Return the history of a scheduler, which may be running, or raise `CommandError`."""
    from pipollux_sched.history.records import read_history
    from pipollux_sched.store import StateDir, Store

    directory = StateDir.choose(None if str(folder) == USUAL else folder)
    try:
        if not directory.has_store():
            raise CommandError(
                f"{directory.path} holds no scheduler's store; give the state directory of a "
                "scheduler, as its --state-dir"
            )
        with Store(directory.store) as store:
            history = read_history(store)
        if not history.nodes:
            raise CommandError(
                f"{directory.path} has no nodes, because no scheduler has served it; give the "
                "state directory of a scheduler that has run"
            )
    except (PipolluxError, ValueError) as error:
        raise CommandError(f"--from-state: {error}", USAGE) from error
    return history


def past_nodes(history: SchedulerHistory, added: int) -> dict[str, NodeInfo]:
    """Return the nodes of a scheduler, and `added` more of their most common kind."""
    nodes = dict(history.nodes)
    kinds = Counter(
        (tuple(sorted(node.resources.items())), node.gpu_type) for node in nodes.values()
    )
    (most, _), *_ = kinds.most_common(1)
    like = next(
        node
        for node in nodes.values()
        if (tuple(sorted(node.resources.items())), node.gpu_type) == most
    )
    free = (name for name in (f"added-{number}" for number in range(10**9)) if name not in nodes)
    return nodes | {name: like for name, _ in zip(free, range(added), strict=False)}


class PastRun:
    """A history and its replay, `unchanged` if it has the scheduler's own cluster and jobs."""

    def __init__(
        self, history: SchedulerHistory, replay: Replay, *, unchanged: bool, teams: TeamsSpec | None
    ) -> None:
        from pipollux_sched.history.reality import what_happened

        self._history, self._replay, self._unchanged = history, replay, unchanged
        self.actual: SimulationOutcome = what_happened(history, replay, teams)

    def workload(self, load: float) -> Workload:
        """Return the workload with `load` times as many jobs."""
        from pipollux_simulator import scale_load

        workload = self._replay.workload
        return replace(workload, jobs=scale_load(workload.jobs, load))

    def agreement(self, outcomes: Sequence[SimulationOutcome]) -> Agreement | None:
        """Return how close the replay under the scheduler's own policy is; None: no such replay."""
        from pipollux_sched.history.reality import agreement

        own = [one for one in outcomes if one.policy == self._history.policy]
        return agreement(self.actual, own[0]) if own and self._unchanged else None

    def to_dict(self, outcomes: Sequence[SimulationOutcome]) -> dict[str, Any]:
        """Return the additional fields of the row of the real run."""
        found = self.agreement(outcomes)
        return {
            "actual_policy": self._history.policy,
            "paces": dict(self._replay.paces),
            "agreement": None if found is None else found.to_dict(),
            "cut_short": self._cut_short(),
            "left_out": [one._asdict() for one in self._replay.left_out],
        }

    def footer(self, outcomes: Sequence[SimulationOutcome]) -> list[str]:
        """Return the lines below the table."""
        short, jobs = self._cut_short(), self._replay.jobs
        replayed = f"actual: what happened under {self._history.policy or 'another policy'}; "
        replayed += f"{count(len(jobs), 'job')} replayed"
        if short:
            replayed += f", {len(short)} of them up to the step they had reached ({_tally(short)})"
        pace = median(self._replay.paces.values())
        lines = [
            f"{replayed}. They trained at {pace:.2f} times (median) the speed of their models, and "
            "so does the replay."
        ]
        left_out = {one.job: one.reason.partition(":")[0] for one in self._replay.left_out}
        if left_out:
            lines.append(f"{count(len(left_out), 'job')} left out: {_tally(left_out)}.")
        found = self.agreement(outcomes)
        if found is not None:
            lines.append(
                f"Replay of {found.policy} against what happened: average JCT "
                f"{found.avg_jct_ratio:.2f} times, makespan {found.makespan_ratio:.2f} times; a "
                f"job's JCT is off by {found.jct_error_median:.0%} (median), "
                f"{found.jct_error_p90:.0%} (p90)."
            )
        return lines

    def _cut_short(self) -> dict[str, str]:
        from pipollux_sched.history.reality import cut_short

        return cut_short(self._replay)


def _tally(reasons: Mapping[str, str]) -> str:
    return listing([f"{number} {why}" for why, number in Counter(reasons.values()).most_common()])
