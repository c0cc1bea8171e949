"""How long jobs still train, learned from jobs that have completed."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_policies import CompletedJob, LengthHistory, family_of
from pipollux_policies.jobs.lengths import (
    DECLARED_WEIGHT,
    FAMILY_WEIGHT,
    LEAST_WORK,
    NUM_VALUES,
    TAIL,
    TAIL_WEIGHT,
)


def history(*works: float, family: str = "seen", goodput: float = 1.0) -> LengthHistory:
    found = LengthHistory()
    found.extend(CompletedJob(family, work * goodput, work) for work in works)
    return found


@pytest.mark.parametrize(
    ("name", "family"),
    [("resnet-17", "resnet"), ("bert_large.3", "bert_large"), ("a1b2", "a1b"), ("7", "7")],
)
def test_a_family_is_a_name_without_its_number(name: str, family: str) -> None:
    assert family_of(name) == family


lengths = st.lists(st.integers(1, 50).map(lambda n: n * 100.0), min_size=1, max_size=8)


@given(mine=lengths, others=lengths, said=lengths, done=st.integers(0, 60).map(lambda n: n * 100.0))
def test_values_are_quantiles_of_all_that_is_still_possible(
    mine: list[float], others: list[float], said: list[float], done: float
) -> None:
    """Brute force: exact weights, and where half of a step is passed."""
    known = history(*mine, family="own")
    known.extend(CompletedJob("other", work * 7.0, work) for work in others)
    left = known.work_left("own", trained=done * 2.0, goodput=2.0, relatives=said)

    # What a family shares is samples: at twice the goodput they are half the seconds.
    weights = [(work / 2.0 - done, Fraction(int(FAMILY_WEIGHT))) for work in [*mine, *said]]
    weights += [(work - done, Fraction(1)) for work in [*mine, *others]]
    possible = sorted(pair for pair in weights if pair[0] > 0)
    tail = TAIL_WEIGHT * (LEAST_WORK / max(done, LEAST_WORK)) ** TAIL
    certain = float(sum(weight for _, weight in possible))
    for place, value in enumerate(left):
        wanted = (place + 0.5) / NUM_VALUES * (certain + tail)
        below = float(sum(weight for work, weight in possible if work < value - 1e-9))
        up_to = float(sum(weight for work, weight in possible if work <= value + 1e-9))
        assert below <= wanted + 1e-9
        assert up_to + tail >= wanted - 1e-9
    assert len(left) == NUM_VALUES
    assert min(left) > 0
    assert list(left) == sorted(left)


def test_what_others_of_a_family_say_counts_where_a_job_does_not() -> None:
    known = LengthHistory()
    alone = known.work_left("own", 100.0, 1.0, relatives=[1000.0])
    assert np.mean(np.array(alone) == 900.0) >= 0.8
    said = known.work_left("own", 0.0, 2.0, declared=1000.0)
    assert known.work_left("own", 0.0, 2.0, declared=1000.0, relatives=[800.0]) == said


def test_the_last_relatives_count_and_what_completes_is_taken_in() -> None:
    known = LengthHistory()
    said = [100.0] * 1000 + [700.0] * 64
    assert np.mean(np.array(known.work_left("own", 0.0, 1.0, relatives=said)) == 700.0) >= 0.9
    assert known.work_left("own", 0.0, 1.0, relatives=said[-64:]) == known.work_left(
        "own", 0.0, 1.0, relatives=said
    )
    before = known.work_left("own", 0.0, 1.0)
    known.extend(CompletedJob("own", 500.0, 500.0) for _ in range(30))
    assert known.work_left("own", 0.0, 1.0)[7] == 500.0 != before[7]


def test_of_a_heavy_tail_what_is_left_grows_with_what_is_done() -> None:
    """Pareto's law: the median of what is left is (2^(1 / TAIL) − 1) times what is done."""
    none = LengthHistory()
    medians = [
        np.median(none.work_left("new", trained=done, goodput=1.0)) for done in (1e3, 1e4, 1e5)
    ]
    assert medians[1] == pytest.approx(10 * medians[0])
    assert medians[2] == pytest.approx(10 * medians[1])
    assert medians[0] == pytest.approx(1e3 * (2 ** (1 / TAIL) - 1), rel=0.2)


def test_a_family_that_is_known_is_as_good_as_told() -> None:
    known = history(*[1000.0] * 30, family="resnet")
    left = np.array(known.work_left("resnet", trained=400.0, goodput=1.0))
    assert np.mean(left == 600.0) >= 0.9


def test_who_outlasts_all_that_were_known_may_last_long() -> None:
    known = history(*[1000.0] * 30, family="resnet")
    left = known.work_left("resnet", trained=1001.0, goodput=1.0)
    assert left == LengthHistory().work_left("resnet", trained=1001.0, goodput=1.0)


def test_declared_lengths_are_believed_as_far_as_they_were_true() -> None:
    honest, early = LengthHistory(), LengthHistory()
    honest.extend(CompletedJob("a", 100.0, 10.0, declared=100.0) for _ in range(20))
    early.extend(CompletedJob("a", 25.0, 2.5, declared=100.0) for _ in range(20))
    told = {"family": "a", "trained": 10.0, "goodput": 1.0, "declared": 90.0}
    assert set(honest.work_left(**told)) == {80.0}  # type: ignore[arg-type]  # one mapping, several types
    values = early.work_left(**told)  # type: ignore[arg-type]  # as above
    stopped = 20 * (FAMILY_WEIGHT + 1) / (20 * (FAMILY_WEIGHT + 1) + DECLARED_WEIGHT)
    assert set(values) == {12.5, 80.0}
    assert np.mean(np.array(values) == 12.5) == pytest.approx(stopped, abs=1 / NUM_VALUES)
    assert set(early.work_left("a", 30.0, 1.0, 90.0)) == {60.0}, "it has outlived the others"
    assert min(early.work_left("a", 95.0, 1.0, 90.0)) > 0, "and its own word"


def test_nothing_is_said_before_a_goodput_is_known() -> None:
    assert history(5.0).work_left("a", 1.0, 0.0) == ()
    assert history(5.0).work_left("a", 1.0, float("inf")) == ()
    assert history(5.0).work_left("a", float("nan"), 1.0) == ()


def test_the_last_jobs_count() -> None:
    found = history(*[10.0] * 1000, family="a")
    found.extend(CompletedJob("a", 500.0, 500.0) for _ in range(1000))
    assert set(found.work_left("a", 5.0, 1.0)[:10]) == {495.0}


@pytest.mark.parametrize("field", ["samples", "work", "declared"])
def test_amounts_have_to_be_above_0(field: str) -> None:
    amounts = {"samples": 1.0, "work": 1.0, field: 0.0}
    with pytest.raises(ValueError, match=rf"{field}: 0.0 must be above 0"):
        CompletedJob("a", **amounts)


def test_whether_there_is_anything_to_learn_from() -> None:
    assert not LengthHistory().knows(declared=False)
    assert history(1.0).knows(declared=False)
    assert not history(1.0).knows(declared=True)
