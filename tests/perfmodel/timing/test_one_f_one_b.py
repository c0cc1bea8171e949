"""1F1B's recursion, against a simulation by events and what the papers say of equal stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel.timing import gpipe
from pipollux_perfmodel.timing.gpipe import StageTimes
from pipollux_perfmodel.timing.one_f_one_b import (
    MOST_ROUNDS,
    final_times,
    final_times_of_one,
    serial_final_times,
)
from pipollux_perfmodel.timing.timeline import Schedule
from tests.extent import examples
from tests.perfmodel.simulator import Case, simulate

seconds = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 1.0))


def several(count: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.lists(seconds, min_size=count, max_size=count).map(tuple)


@st.composite
def cases(draw: st.DrawFn, most_stages: int = 8, most_microbatches: int = 16) -> Case:
    num_stages = draw(st.integers(1, most_stages))
    forward, backward = draw(several(num_stages)), draw(several(num_stages))
    return Case(
        forward,
        backward,
        draw(st.one_of(st.just(backward), several(num_stages))),
        draw(st.one_of(st.just((0.0,) * (num_stages - 1)), several(num_stages - 1))),
        draw(st.integers(1, most_microbatches)),
        draw(st.booleans()),
    )


def times_of(case: Case) -> StageTimes:
    return StageTimes(case.forward, case.backward, case.last_backward, case.transfer)


def near(expected: object) -> object:
    return pytest.approx(expected, rel=1e-9, abs=1e-12)


@examples(200, 3000)
@given(cases())
def test_stages_are_final_when_they_are_simulated_to_be(case: Case) -> None:
    found = final_times(times_of(case), case.num_microbatches, case.overlapping)
    assert found == near(simulate(case, "1f1b").final)


@examples(150, 500)
@given(cases())
def test_stages_that_take_turns_are_final_when_they_are_simulated_to_be(case: Case) -> None:
    found = serial_final_times(times_of(case), case.num_microbatches)
    assert found == near(simulate(case, "serial_1f1b").final)


@pytest.mark.exhaustive
@examples(100, 500)
@given(cases(most_stages=12, most_microbatches=100))
def test_long_pipelines_are_final_when_they_are_simulated_to_be(case: Case) -> None:
    found = final_times(times_of(case), case.num_microbatches, case.overlapping)
    assert found == near(simulate(case, "1f1b").final)


@pytest.mark.parametrize("overlapping", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_many_pipelines_at_once_are_each_as_alone(num_stages: int, overlapping: bool) -> None:
    rng = np.random.default_rng(num_stages)
    forward, backward, share = rng.uniform(0, 1, (3, num_stages, 6, 1))
    transfer = rng.uniform(0, 1, (num_stages - 1, 6, 1))
    counts = rng.integers(1, 13, 7)
    times = StageTimes(forward, backward, backward * share, transfer)
    found = np.array(final_times(times, counts, overlapping))
    assert found.shape == (num_stages, 6, 7)
    for row, column in np.ndindex(6, 7):
        one = StageTimes(*([float(stage[row, 0]) for stage in part] for part in times))
        alone = final_times(one, int(counts[column]), overlapping)
        assert all(isinstance(seconds, float) for seconds in alone)
        assert found[:, row, column].tolist() == near(list(alone))


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 8, 64])
def test_equal_stages_take_as_long_as_in_the_papers(num_stages: int, num_microbatches: int) -> None:
    forward, backward, free = (0.1,) * num_stages, (0.2,) * num_stages, (0.0,) * (num_stages - 1)
    times = StageTimes(forward, backward, backward, free)
    found = final_times(times, num_microbatches, overlapping=True)
    # ICML'21 and SC'21, section 2.2.1: the bubble is K - 1 slots, (K - 1)/M of the ideal.
    ideal = num_microbatches * (0.1 + 0.2)
    assert found[0] / ideal - 1 == pytest.approx((num_stages - 1) / num_microbatches)
    assert found == near(gpipe.final_times(times, num_microbatches, overlapping=True))


@examples(200, 500)
@given(cases())
def test_without_copies_1f1b_is_never_slower_than_gpipe(case: Case) -> None:
    times = times_of(case)._replace(transfer=(0.0,) * (len(case.forward) - 1))
    times = times._replace(last_backward=times.backward)
    num = case.num_microbatches
    slower = gpipe.final_times(times, num, overlapping=True)[0]
    assert final_times(times, num, overlapping=True)[0] <= slower * (1 + 1e-12)


def test_it_may_be_faster_by_what_slow_forwards_and_slow_backwards_have_in_common() -> None:
    # One stage is slow forward, the other backward: GPipe waits for one, then for the other.
    times = StageTimes((3.0, 1.0), (1.0, 3.0), (1.0, 3.0), (0.0,))
    assert gpipe.final_times(times, 100, overlapping=True)[0] == 3 * 100 + 1 + 3 * 100 + 1
    # Each stage has 4 s to do for each micro-batch, and is never idle for long.
    assert final_times(times, 100, overlapping=True)[0] == 3 + 100 * (1 + 3) + 1


def test_what_is_remembered_is_what_is_found() -> None:
    stages = (0.1, 0.3), (0.5, 0.2), (0.4, 0.0)
    found = final_times_of_one(*stages, 9)
    assert found == near(final_times(StageTimes(*stages, (0.0,)), 9, overlapping=True))
    assert found == near(Schedule("1f1b", stages[0], stages[1], 9, stages[2]).final_times)


@pytest.mark.parametrize("overlapping", [True, False])
def test_more_micro_batches_than_are_played_go_on_at_the_same_rate(overlapping: bool) -> None:
    rng = np.random.default_rng(7)
    forward, backward = rng.uniform(0.1, 1, (2, 4)).tolist()
    transfer = rng.uniform(0, 0.3, 3).tolist()
    last = [0.5 * seconds for seconds in backward]
    num = MOST_ROUNDS + 37
    found = final_times(StageTimes(forward, backward, last, transfer), num, overlapping)
    played = Schedule("1f1b", forward, backward, num, last, transfer, overlapping)
    assert found == pytest.approx(played.final_times, rel=1e-4)
    final = final_times(StageTimes(forward, backward, last, transfer), 10**9, overlapping)
    assert final[0] == pytest.approx(10**9 * found[0] / num, rel=1e-2)
