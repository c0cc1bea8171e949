"""The page of simulations: self-contained, and its pictures say what happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_sched.report.simulation.charts import completion_curve, jobs_unfinished, slots_held
from pipollux_sched.report.simulation.gantt import blocks
from pipollux_sched.report.simulation.page import render_plots
from pipollux_simulator import IsolatedTimes, SimulationOutcome, outcome
from tests.extent import examples
from tests.sched.report.page import Page, charts
from tests.simulator.simulator_cases import Give, Steady, simulate


def simulated(policy: str = "give", **rows: list[str]) -> SimulationOutcome:
    result = simulate(Give(**rows), *((name, 60.0 * i) for i, name in enumerate(rows)))
    isolated = IsolatedTimes(result.nodes, 30.0)
    applications = {"steady": Steady()}
    return outcome(result, applications, isolated, workload="w", policy=policy, seed=0)


def test_curves_are_what_happened() -> None:
    found = simulated(j=["a", "a"], k=["b"])
    # j comes at 0, runs from 60 to 240; k comes at 60, runs from 60 to 390.
    assert completion_curve(found) == [(pytest.approx(240.0), 0.5), (pytest.approx(330.0), 1.0)]
    assert slots_held(found) == [(60.0, 3), (pytest.approx(240.0), 1), (pytest.approx(390.0), 0)]
    assert jobs_unfinished(found) == [
        *((0.0, 1), (60.0, 2), (pytest.approx(240.0), 1), (pytest.approx(390.0), 0))
    ]


def test_neighbouring_slots_of_a_job_are_one_block() -> None:
    found = simulated(j=["a", "a", "b"], k=["a", "a"])
    assert [(b.job.name, b.node, b.first_slot, b.num_slots) for b in blocks(found)] == [
        *(("j", "a", 0, 2), ("j", "b", 0, 1), ("k", "a", 2, 2))
    ]


@examples(40)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any), min_size=1, max_size=6)
)
def test_no_slot_is_drawn_twice_and_none_is_forgotten(counts: list[tuple[int, int]]) -> None:
    class OneAfterTheOther(Give):
        """First come, first served."""

        def optimize(self, jobs: Any, nodes: Any, base: Any, template: Any) -> Any:  # noqa: ARG002  # a policy's
            given, distributed = {}, False
            free = dict.fromkeys(nodes, 4)
            for name in sorted(jobs, key=lambda job: (job not in base, job)):
                wanted = self.rows[name]
                spread = len(set(wanted)) > 1
                if all(wanted.count(n) <= free[n] for n in free) and not (spread and distributed):
                    given[name] = wanted
                    distributed |= spread
                    for node in wanted:
                        free[node] -= 1
            return given, len(nodes)

    rows = {f"j{i}": ["a"] * one + ["b"] * two for i, (one, two) in enumerate(counts)}
    result = simulate(OneAfterTheOther(**rows), *((name, 10.0 * i) for i, name in enumerate(rows)))
    isolated = IsolatedTimes(result.nodes, 30.0)
    steady = {"steady": Steady()}
    found = outcome(result, steady, isolated, workload="w", policy="p", seed=0)
    drawn = blocks(found)
    area = sum(block.num_slots * (block.hold.end - block.hold.start) for block in drawn)
    assert area == pytest.approx(sum(job.slot_seconds for job in found.jobs))
    for index, one in enumerate(drawn):
        assert one.first_slot + one.num_slots <= 4
        for two in drawn[:index]:
            apart = (
                one.node != two.node
                or one.hold.start >= two.hold.end
                or two.hold.start >= one.hold.end
                or one.first_slot >= two.first_slot + two.num_slots
                or two.first_slot >= one.first_slot + one.num_slots
            )
            assert apart, (one, two)


def test_the_page_needs_nothing_but_itself() -> None:
    first = simulated("first", j=["a", "a"], k=["b"])
    second = replace(simulated("second", j=["a"], k=["b"]), workload="<w> & co")
    html = render_plots([first, replace(first, policy="third"), second])
    page = Page(html)
    assert page.references == []
    assert len(set(page.ids)) == len(page.ids)
    assert "<w> & co: 2 jobs on 8 GPUs of 2 nodes" in page.text("section")
    found = charts(html)
    assert set(found) == {"jct-0", "use-0", "gantt-0-0", "gantt-0-1", "jct-1", "use-1", "gantt-1-0"}
    # A curve for every policy.
    lines = {
        name: [line["name"] for panel in found[name]["panels"] for line in panel["lines"]]
        for name in ("jct-0", "jct-1", "use-0")
    }
    assert lines == {
        "jct-0": ["first", "third"],
        "jct-1": ["second"],
        "use-0": ["first", "third"] * 2,
    }
    gantt = found["gantt-0-0"]
    assert gantt["tips"][gantt["blocks"][0]["tip"]] == [
        *("j", ["holds", "2 replicas"], ["held", "1:00 to 4:00"])
    ]
    assert len(gantt["blocks"]) == 2
    changed = replace(first.jobs[0].history[0], elastic=True)
    elastic = replace(first, jobs=(replace(first.jobs[0], history=(changed,)), *first.jobs[1:]))
    gantt = charts(render_plots([elastic]))["gantt-0-0"]
    assert gantt["tips"][gantt["blocks"][0]["tip"]][-1] == ["began with", "an elastic resize"]


def test_one_job_alone_is_drawn() -> None:
    assert "1 job on 8 GPUs" in Page(render_plots([simulated(j=["a"])])).text("section")
