"""What tables say of teams: who holds, borrows and lends what."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.allocator.snapshot import Snapshot
from pipollux_sched.allocator.team_strategy import uses_of
from pipollux_sched.lifecycle import Allocate
from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.spec.job import JobSpec
from pipollux_sched.store import NodeCondition, Store
from pipollux_sched.views.teams import list_teams


@pytest.mark.parametrize(("holds", "lent"), [("stays", 2), ("drains", 0)])
def test_a_node_that_drains_lends_nothing(tmp_path: Path, holds: str, lent: int) -> None:
    """Two slots are in nobody's quota, but those of a node that drains are in nobody's reach."""
    with Store(tmp_path / "pipollux.db", create=True) as store:
        nodes = [NodeSpec(name=name, slots=2, kind="cpu") for name in ("stays", "drains")]
        store.set_nodes((n.name, n.slots, n.kind, n.model_dump(mode="json")) for n in nodes)
        store.teams.set_spec({"teams": [{"name": "vision", "quota": 2}]})
        spec = JobSpec(name="toy", script="x.py", max_replicas=2)
        store.submit("toy", spec.model_dump(mode="json"), "token", 3)
        store.transition("toy", Allocate([holds, holds], "free"))
        assert [team.lent for team in list_teams(store).teams] == [0, 0]
        store.set_node_condition("drains", NodeCondition.DRAINING)
        shown = list_teams(store)
        # Where nothing is left on it, there are its slots no more.
        assert shown.slots == (2 if holds == "stays" else 4)
        assert [(team.name, team.used, team.lent) for team in shown.teams] == [
            ("default", 2, 0),
            ("vision", 0, lent),
        ]
        uses = uses_of(Snapshot.read(store))
        assert {name: use.lent for name, use in uses.items()} == {"default": 0, "vision": lent}
