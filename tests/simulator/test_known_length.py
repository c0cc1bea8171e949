"""What a policy is told of how long simulated jobs still train."""

from __future__ import annotations

import math

import pytest

from pipollux_policies import JobInfo
from pipollux_simulator import KnownLength
from tests.simulator.simulator_cases import Give, simulate

ON_ONE_SLOT = 300.0
"""Seconds that a job of these trains on one replica."""


def seen(known_length: KnownLength) -> list[JobInfo]:
    """What a policy saw, a round every 60 s, of a job that it gave nothing for a minute."""
    policy = Give(slow=["a"])
    simulate(policy, ("slow", 0.0), restart_seconds=0.0, known_length=known_length)
    return [round_["slow"] for round_ in policy.seen]


def test_exactly_means_what_is_left_at_every_round() -> None:
    left = [info.remaining_work for info in seen(KnownLength.parse("exact"))]
    assert left == pytest.approx([ON_ONE_SLOT - 60.0 * n for n in range(len(left))])
    assert len(left) == 5


def test_none_means_that_nothing_is_told() -> None:
    assert {info.remaining_work for info in seen(KnownLength.parse("none"))} == {None}


def test_a_factor_misjudges_a_job_by_the_same_for_all_of_its_life() -> None:
    left = [info.remaining_work for info in seen(KnownLength.parse("2", seed=3))]
    errors = {round((told or 0.0) / (ON_ONE_SLOT - 60.0 * n), 9) for n, told in enumerate(left)}
    (error,) = errors
    assert 0.5 <= error <= 2.0
    assert error != 1.0


def test_errors_differ_between_jobs_and_seeds_and_fill_the_range() -> None:
    known = KnownLength.parse("2")
    logs = [math.log2(known.estimate(f"job-{n}", 1.0) or 0.0) for n in range(200)]
    assert min(logs) < -0.9
    assert max(logs) > 0.9
    assert abs(sum(logs) / len(logs)) < 0.1, "as often too long as too short"
    other = KnownLength.parse("2", seed=1)
    assert known.estimate("a", 1.0) == known.estimate("a", 1.0) != other.estimate("a", 1.0)


def test_what_a_job_does_not_know_itself_is_not_told() -> None:
    assert KnownLength.parse("exact").estimate("a", None) is None


@pytest.mark.parametrize("text", ["0.5", "nan", "inf", "-2", "half", ""])
def test_what_is_no_factor_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"known_length: .* factor"):
        KnownLength.parse(text)


@pytest.mark.parametrize("text", ["exact", "none", "learned", "2", "1.5"])
def test_written_as_read(text: str) -> None:
    assert str(KnownLength.parse(text)) == text


def test_learned_means_from_the_jobs_that_completed_before() -> None:
    policy = Give(**{"slow-1": ["a"], "slow-2": ["b"]})
    jobs = ("slow-1", 0.0), ("slow-2", 400.0)
    simulate(policy, *jobs, restart_seconds=0.0, known_length=KnownLength.parse("learned"))
    first = [infos["slow-1"] for infos in policy.seen if "slow-1" in infos]
    second = [infos["slow-2"] for infos in policy.seen if "slow-2" in infos]
    assert {info.remaining_work for info in [*first, *second]} == {None}
    assert {info.family for info in first if info.work_left} == {"slow"}
    assert first[1].work_done == pytest.approx(60.0)
    # One completed job of the family outweighs the tail: most values are its length.
    done = second[1].work_done
    assert second[1].work_left[7] == pytest.approx(ON_ONE_SLOT - done)
    assert first[1].work_left[7] != pytest.approx(ON_ONE_SLOT - 60.0)
