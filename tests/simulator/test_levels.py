"""Simulated clusters whose network has several levels."""

import pytest

from pipollux_policies import NodeInfo
from pipollux_policies.jobs.topology import build_topology
from pipollux_sched.cli.simulate_inputs import parse_levels
from pipollux_simulator import JobArrival, Options, make_nodes
from pipollux_simulator.applications.base import RunningJob
from pipollux_simulator.applications.network import SlowerNetwork
from pipollux_simulator.experiment import Experiment, Workload

JOBS = tuple(JobArrival(f"job-{n}", 300.0 * n, "gpt-1.3b", 4, 32) for n in range(6))


def run(nodes, slowdowns=(), policy="exact"):
    options = Options(slowdowns=slowdowns, rescale_seconds=2.0)
    return Experiment(nodes, options).run(Workload("w", JOBS), policy)


def times(outcome):
    return [(job.name, job.started, job.completed) for job in outcome.jobs]


def test_step_times_grow_by_the_exposed_synchronization():
    app = Experiment(make_nodes({"": (4, 4)})).applications(Workload("w", JOBS))["gpt-1.3b"]
    slower = SlowerNetwork(app, (3.0, 5.0))
    shape = app.new_model().shapes()[0]
    running = app.new_model().configure(shape, (2, 2))
    optim, accum = app.step_times(running)
    assert optim > accum
    for level, factor in ((1, 1), (2, 3), (3, 5), (4, 5)):
        found = slower.step_times(RunningJob(**{**running.__dict__, "level": level}))
        assert found.accum_step == accum
        assert found.optim_step == pytest.approx(accum + factor * (optim - accum))


@pytest.mark.exhaustive
def test_levels_without_slowdown_change_nothing():
    plain = times(run(make_nodes({"": (6, 4)})))
    assert times(run(make_nodes({"": (6, 4)}, domains=(6,)))) == plain


@pytest.mark.exhaustive
def test_jobs_complete_earlier_where_racks_have_several_nodes():
    """On the same slow network between racks, of three nodes or of one."""
    racks = run(make_nodes({"": (6, 4)}, domains=(3,)), (20.0,))
    apart = {name: NodeInfo({"slots": 4}, topology=(name,)) for name in make_nodes({"": (6, 4)})}
    apart_only = run(apart, (20.0,))
    mean = [sum(job.completed - job.arrived for job in x.jobs) for x in (racks, apart_only)]
    assert mean[0] < mean[1]
    topology = build_topology([*make_nodes({"": (6, 4)}, domains=(3,)).values()])
    assert topology.num_levels == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (["rack"], "NAME=NODESxSLOWER"),
        (["rack=0x2"], "at least 1 node"),
        (["rack=4x2", "zone=6x3"], "multiple of 4"),
        (["rack=4x2", "zone=8x1"], "at least 2"),
        (["rack=4x0.5"], "at least 1"),
    ],
)
def test_a_wrong_level_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_levels(text)


def test_levels_of_the_command_line():
    assert parse_levels(["rack=4x3", "zone=16x8.5"]) == [(4, 3.0), (16, 8.5)]
