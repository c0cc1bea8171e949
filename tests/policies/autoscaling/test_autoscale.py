"""How many nodes there should be: utility by hand, search, hysteresis, what is given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import (
    AutoscalingRules,
    AutoscalingState,
    JobInfo,
    NodeInfo,
    PolluxPolicy,
    ReplicaShape,
    UtilityBand,
    autoscale,
    best_size,
    is_pinned,
    missing_nodes,
    plan_nodes,
    release_order,
    utility,
)
from tests.extent import examples
from tests.policies.policy_cases import Case, cases, scaling

NODE = NodeInfo({"slots": 4})
POLICY = PolluxPolicy(population=20, generations=10)


def root(nodes: object, replicas: object) -> object:
    """Speedup √R: one replica on 4 slots makes full use of one of them, four of two."""
    return np.sqrt(np.asarray(replicas, dtype=float))


def cluster(count: int, **trouble: bool) -> dict[str, NodeInfo]:
    return {f"n{n}": NodeInfo({"slots": 4}, **trouble) for n in range(count)}


def job(most: int = 8, least: int = 1, preemptible: bool = True, stages: int = 1) -> JobInfo:
    return JobInfo({"slots": stages}, root, 0.0, least, most, preemptible, age=1e4)


def rounds(
    count: int,
    rules: AutoscalingRules,
    jobs: dict[str, JobInfo],
    nodes: dict[str, NodeInfo],
    allocations: dict[str, list[str]],
    state: AutoscalingState | None = None,
) -> tuple[AutoscalingState, list[int]]:
    state, found = state or AutoscalingState(), []
    for _ in range(count):
        state, desired = autoscale(rules, state, POLICY, jobs, nodes, allocations, NODE)
        found.append(desired)
    return state, found


def test_utility_by_hand() -> None:
    """√4 of 4 on half of the cluster, √1 of 1 on an eighth; then one node more, idle."""
    jobs = {"a": job(), "b": job()}
    held = {"a": ["n0"] * 4, "b": ["n1"]}
    assert utility(jobs, cluster(2), held) == pytest.approx(2 / 4 * 4 / 8 + 1 / 8)
    assert utility(jobs, cluster(3), held) == pytest.approx(2 / 12 + 1 / 12)
    assert utility(jobs, cluster(2), {}) == utility({}, {}, {}) == 0.0


def test_utility_goes_by_the_resource_that_is_used_best() -> None:
    jobs = {"a": JobInfo({"slots": 1, "cpus": 6}, root, 0.0, 1, 4)}
    nodes = {"n": NodeInfo({"slots": 4, "cpus": 8})}
    assert utility(jobs, nodes, {"a": ["n"]}) == pytest.approx(6 / 8)


def test_utility_of_a_shape_is_relative_to_the_best_shape_of_its_type() -> None:
    """Two stages at 1.5 times the speed make three quarters of their slots, one on its own all."""
    two = ReplicaShape(2, {"slots": 2}, scaling(0, pace=1.5))
    slow = ReplicaShape(1, {"slots": 1}, scaling(0, pace=0.1), gpu_type="old")
    flexible = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 4, shapes=(two, slow))
    nodes = {"n": NodeInfo({"slots": 2}), "o": NodeInfo({"slots": 2}, gpu_type="old")}
    policy = PolluxPolicy()
    assert utility({"j": flexible}, {"n": nodes["n"]}, {"j": ["n", "n"]}) == pytest.approx(1.0)
    single = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 1, shapes=(two,))
    answer, _ = policy.optimize({"j": single}, {"n": nodes["n"]}, {}, nodes["n"])
    assert answer["j"].num_stages == 2
    assert utility({"j": single}, {"n": nodes["n"]}, answer) == pytest.approx(0.75)
    old = JobInfo({"slots": 1}, scaling(0), 0.0, 1, 2, gpu_type="new", shapes=(slow,))
    assert utility({"j": old}, {"o": nodes["o"]}, {"j": ["o", "o"]}) == pytest.approx(1.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0, 1), st.integers(0, 5))
@examples(200)
def test_the_search_finds_what_trying_all_finds(
    drawn: list[float], target: float, first: int
) -> None:
    """Whatever falling utility: nothing is nearer the target, and few sizes are looked at."""
    falling, asked = sorted(drawn, reverse=True), []

    def utility_of(size: int) -> float:
        asked.append(size)
        return falling[size - first]

    size = best_size(utility_of, first, first + len(falling) - 1, target)
    assert abs(falling[size - first] - target) == min(abs(value - target) for value in falling)
    assert len(asked) <= np.log2(len(falling)) + 3


def test_nothing_changes_inside_the_band_or_before_the_window_is_full() -> None:
    rules = AutoscalingRules(max_nodes=8, window=3)
    busy, held = {"a": job(4), "b": job(4)}, {"a": ["n0"] * 4, "b": ["n1"] * 4}
    assert rounds(10, rules, busy, cluster(2), held)[1] == [2] * 10
    many = {f"j{n}": job(1) for n in range(40)}
    full = {f"j{n}": [f"n{n // 4}"] for n in range(8)}
    state, found = rounds(4, rules, many, cluster(2), full)
    assert found == [2, 2, 8, 8]
    assert len(state.utilities) == 1  # the window began anew


def test_one_bad_round_is_not_enough() -> None:
    """Utilities of 0.5, 0.5 and 1/16 have a mean inside the band, the next one's is below it."""
    rules = AutoscalingRules(max_nodes=8, window=3)
    state = AutoscalingState((0.5, 0.5), 4, 4)
    state, found = rounds(2, rules, {"a": job(1)}, cluster(4), {"a": ["n0"]}, state)
    assert found == [4, 1]


def test_it_grows_to_where_the_policy_reaches_the_middle_of_the_band() -> None:
    """A lone job of √R: on 4 slots a utility of 0.5, on 1 slot of 1."""
    single, rules = NodeInfo({"slots": 1}), AutoscalingRules(max_nodes=9, window=1)
    jobs = {"a": JobInfo({"slots": 1}, root, 0.0, 1, 9, age=1e4)}
    state = AutoscalingState()
    for held, before, after in ((["n0"], 1, 4), ([f"n{n}" for n in range(9)], 9, 4)):
        nodes = {f"n{n}": single for n in range(before)}
        _, desired = autoscale(rules, state, POLICY, jobs, nodes, {"a": held}, single)
        assert desired == after


def test_it_never_grows_beyond_what_the_most_replicas_of_all_jobs_fill() -> None:
    """Nodes that no job can use would bring the utility of perfect scaling down to the band."""
    rules = AutoscalingRules(max_nodes=16, window=1)
    jobs = {name: JobInfo({"slots": 2}, scaling(0), 0.0, 1, 2, age=1e4) for name in "abc"}
    full = {"a": ["n0", "n0"], "b": ["n1", "n1"]}
    assert rounds(1, rules, jobs, cluster(2), full)[1] == [3]
    spread = {"a": ["n0", "n1"], "b": ["n2", "n2"], "c": ["n3", "n3"]}
    assert rounds(1, rules, jobs, cluster(4), spread)[1] == [4]
    # Nodes that are too small for a job do not count as room for it.
    mixed = {**cluster(2), "small": NodeInfo({"slots": 1}), "other": NodeInfo({"slots": 1})}
    assert rounds(1, rules, jobs, mixed, full)[1] == [5]
    assert missing_nodes(jobs, mixed, NODE) == 1
    assert missing_nodes(jobs, cluster(12), NODE) == -9
    # By the shape that takes the most nodes.
    wide = ReplicaShape(4, {"slots": 4}, scaling(0), max_replicas=3)
    either = JobInfo({"slots": 2}, scaling(0), 0.0, 1, 4, shapes=(wide,))
    assert missing_nodes({"a": either}, {}, NODE) == 3


def test_it_shrinks_to_nothing_when_nothing_is_to_be_done_and_starts_again() -> None:
    rules = AutoscalingRules(max_nodes=4, window=2)
    state, found = rounds(2, rules, {}, cluster(3), {})
    assert found == [3, 0]
    state, found = rounds(3, rules, {}, {}, {}, state)
    assert found == [0, 0, 0]
    assert rounds(1, rules, {"a": job()}, {}, {}, state)[1] == [1]
    assert rounds(2, AutoscalingRules(min_nodes=2, window=2), {}, cluster(3), {})[1] == [3, 2]


def test_a_job_that_no_present_number_of_nodes_can_run_is_given_enough() -> None:
    """Five replicas of 2 stages need 3 nodes of 4 slots; ten need more than are allowed."""
    rules = AutoscalingRules(max_nodes=4)
    assert rounds(1, rules, {"a": job(8, 5, stages=2)}, cluster(1), {})[1] == [3]
    assert rounds(1, rules, {"a": job(10, 10, stages=2)}, cluster(1), {})[1] == [1]


def test_what_was_asked_for_holds_while_nodes_come_and_go() -> None:
    """Two asked for and one there: still two. One added by hand: three it is. One lost: three."""
    rules, jobs = AutoscalingRules(max_nodes=8, window=15), {"a": job(4)}
    state = AutoscalingState((), 0, 2)
    for there, wanted in ((1, 2), (2, 2), (3, 3), (2, 3)):
        state, found = rounds(1, rules, jobs, cluster(there), {"a": ["n0"] * 4}, state)
        assert found == [wanted]
        assert state.num_nodes == there


def test_nodes_with_pinned_jobs_are_kept() -> None:
    rules = AutoscalingRules(max_nodes=4, window=1)
    jobs = {"a": job(1, preemptible=False), "b": job(1, preemptible=False)}
    held = {"a": ["n1"], "b": ["n3"]}
    assert rounds(1, rules, jobs, cluster(4), held)[1] == [2]
    assert release_order(jobs, cluster(4), held) == ["n2", "n0"]
    plan = plan_nodes(0, (), jobs, cluster(4), held)
    assert (set(plan.drain), plan.num_nodes) == ({"n0", "n2"}, 2)


def test_idle_nodes_go_first_then_those_with_fewest_jobs_then_preemptible_ones() -> None:
    nodes = {**cluster(3), "spot": NodeInfo({"slots": 4}, preemptible=True)}
    jobs = {name: job() for name in "abc"}
    held = {"a": ["n0", "n1"], "b": ["n0"], "c": ["spot"]}
    assert release_order(jobs, nodes, held) == ["n2", "spot", "n1", "n0"]


def test_a_node_is_drained_then_given_back_or_taken_into_use_again() -> None:
    jobs, nodes = {"a": job(), "b": job()}, cluster(3)
    held = {"a": ["n0", "n0"], "b": ["n1"]}
    plan = plan_nodes(1, (), jobs, nodes, held)
    assert (plan.drain, plan.release, plan.num_nodes) == (("n2", "n1"), ("n2",), 2)

    nodes = {**nodes, **cluster(3, draining=True), "n0": nodes["n0"]}
    moved, _ = POLICY.optimize(jobs, nodes, held, NODE)
    assert {node for allocation in moved.values() for node in allocation} == {"n0"}
    plan = plan_nodes(1, plan.drain, jobs, nodes, moved)
    assert (set(plan.release), plan.num_nodes) == ({"n1", "n2"}, 1)
    again = plan_nodes(2, plan.drain, jobs, nodes, held)
    assert (again.drain, again.num_nodes) == (("n2",), 2)


def test_nodes_that_drain_for_another_reason_are_left_to_it() -> None:
    """They count as being there until they are gone, or a cloud would take away others."""
    nodes = {**cluster(2), "gone soon": NodeInfo({"slots": 4}, draining=True)}
    plan = plan_nodes(2, (), {"a": job()}, nodes, {"a": ["n0"]})
    assert (plan.drain, plan.release, plan.num_nodes) == ((), (), 3)


@examples(30)
@given(cases(mixed=True), st.integers(0, 6), st.integers(0, 6))
def test_plans_keep_what_is_pinned_and_count_right(case: Case, wanted: int, before: int) -> None:
    chosen = tuple(list(case.nodes)[:before])
    plan = plan_nodes(wanted, chosen, case.jobs, case.nodes, case.base)
    held = {node for nodes in case.base.values() for node in nodes}
    jobs = case.jobs.items()
    pinned = [case.base[j] for j, i in jobs if is_pinned(i, case.base.get(j, ()), case.nodes)]
    assert not {node for names in pinned for node in names} & set(plan.drain)
    assert set(plan.release) == set(plan.drain) - held
    assert plan.num_nodes >= max(wanted, len(case.nodes) - len(plan.release))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: AutoscalingRules(min_nodes=5, max_nodes=4), "min_nodes: 5 .* max_nodes = 4"),
        (lambda: AutoscalingRules(window=0), "window: 0"),
        (lambda: UtilityBand(0.7, 0.6), "low = 0.7 and high = 0.6"),
    ],
)
def test_rules_out_of_bounds_are_named(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
