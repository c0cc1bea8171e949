"""Explanation of the fairness promise: a job compared with its equal share."""

from __future__ import annotations

from pipollux_policies import FairStanding, fair_standings
from pipollux_sched.allocator.job_infos import node_template
from pipollux_sched.allocator.snapshot import Snapshot
from pipollux_sched.allocator.strategy import SchedulableJob
from pipollux_sched.views.explanation import Limit, LimitKind
from pipollux_utils.text import count, seconds


def fair_limit(job: SchedulableJob, state: Snapshot, fairness: float | None) -> Limit | None:
    """Return the effect of a fairness promise (`CompletionTime.fairness`); None: it has none."""
    if fairness is None or not state.nodes:
        return None
    jobs = {one.name: one.info for one in state.candidates}
    held = {one.name: one.held for one in state.candidates if one.allocation}
    template = node_template(state.nodes)
    stands = fair_standings(jobs, state.nodes, held, template, fairness).get(job.name)
    return None if stands is None else Limit(LimitKind.FAIRNESS, spell_standing(stands))


def spell_standing(stands: FairStanding) -> str:
    """Describe a job compared with its equal share, as a sentence."""
    share = f"its equal share of {_slots(stands.share.slots)}"
    if stands.knows_length:
        late = f"with it from now on it ends {stands.fairness:.2f} times as late as on it alone"
    else:
        late = f"what it has done by now took {stands.fairness:.2f} times as long as on it alone"
    late += f", of {stands.promised:.4g} times that are promised"
    if stands.comes_first:
        return f"It gets {share} first: {late}."
    spare = seconds(stands.slack - stands.margin)
    return f"Others may come before {share} for {spare} yet: {late}."


def _slots(number: float) -> str:
    whole = round(number)
    return count(whole, "slot") if abs(number - whole) < 0.05 else f"{number:.1f} slots"
