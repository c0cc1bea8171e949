"""Where a job must have as many replicas on each of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import Allocation
from pipollux_sched.allocator.decide import reallocate
from pipollux_sched.allocator.job_infos import job_info, node_info
from pipollux_sched.allocator.strategy import EvenStrategy, Nodes, SchedulableJob
from pipollux_sched.spec.cluster import NodeSpec
from pipollux_sched.spec.job import parse_job

NODES = {name: node_info(NodeSpec(name=name, slots=4, kind="cpu")) for name in "abc"}


@dataclass(frozen=True)
class Says:
    """A strategy with one answer."""

    answer: Sequence[str]

    def place(self, *_: object) -> Sequence[str]:
        return self.answer

    def optimize(
        self, candidates: Sequence[SchedulableJob], _: Nodes
    ) -> Mapping[str, Sequence[str]]:
        return {job.name: self.answer for job in candidates}


def candidate(allocation: Sequence[str] = (), min_replicas: int = 1) -> SchedulableJob:
    spec = parse_job(
        {"name": "toy", "script": "x.py", "min_replicas": min_replicas, "max_replicas": 12}
    )
    return SchedulableJob("toy", job_info(spec, None, age=0.0), tuple(allocation))


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("ab", "ab"),
        ("aabb", "aabb"),
        ("aab", "aa"),  # as many on one node, and no network between them
        ("aabbc", "aabb"),
        ("aaabbc", "aabb"),
        ("aaab", "aaa"),
        ("aaaabc", "aaaa"),
        ("aabc", "abc"),
        ("", ""),
    ],
)
def test_the_largest_even_part(answer: str, kept: str) -> None:
    strategy = EvenStrategy(Says(list(answer)))
    assert list(strategy.place(candidate(), NODES)) == list(kept)
    result = strategy.optimize([candidate(["c"])], NODES)
    assert list(result["toy"]) == list(kept)


def test_what_a_job_holds_it_may_keep() -> None:
    """It was placed by a scheduler that could."""
    held = candidate(["a", "b", "a"])
    assert reallocate([held], NODES, EvenStrategy(Says(["a", "a", "b"]))) == []


def test_less_than_a_job_needs_is_nothing() -> None:
    strategy = EvenStrategy(Says(list("aab")))
    assert strategy.place(candidate(min_replicas=3), NODES) == ()
    assert list(strategy.place(candidate(min_replicas=2), NODES)) == ["a", "a"]


def test_the_stages_stay() -> None:
    shape = candidate().info.all_shapes[0]
    kept = EvenStrategy(Says(Allocation(list("aab"), shape))).place(candidate(), NODES)
    assert isinstance(kept, Allocation)
    assert (list(kept), kept.shape) == (["a", "a"], shape)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_no_even_part_is_larger(answer: list[str]) -> None:
    kept = Counter(EvenStrategy(Says(answer)).place(candidate(), NODES))
    assert len(set(kept.values())) <= 1
    assert kept <= Counter(answer)
    counts = Counter(answer).values()
    best = max((n * sum(c >= n for c in counts) for n in range(1, 13)), default=0)
    assert kept.total() == best
