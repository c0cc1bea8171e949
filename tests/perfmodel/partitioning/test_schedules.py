"""Which schedule fits and is fastest, against time lines and memory of every one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import (
    Layer,
    LayerProfile,
    Link,
    PerfParams,
    Schedule,
    compare_schedules,
    least_memory,
)
from pipollux_perfmodel.timing.params import CHECKPOINTS, CUT_SCHEDULES, Checkpoint
from pipollux_perfmodel.timing.step_time import stage_times
from tests.extent import examples

BASE = PerfParams(0, 3, 0.2, 0.02, 0.05, 0.01, 1.5)

seconds, sizes = st.floats(1e-3, 1.0), st.integers(0, 100)
layers = st.builds(Layer, seconds, seconds, seconds, seconds, *[sizes] * 5)


@examples(60, 200)
@given(
    st.lists(layers, min_size=3, max_size=6),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(CHECKPOINTS),
    st.one_of(st.none(), st.just(Link(0.01, 1000.0))),
    st.booleans(),
    st.floats(0.3, 3.0),
)
def test_the_best_fits_and_none_that_fits_is_faster(
    drawn: list[Layer],
    num_stages: int,
    num_microbatches: int,
    checkpoint: Checkpoint,
    link: Link | None,
    overlapping: bool,
    scarcity: float,
) -> None:
    profile = LayerProfile.from_layers(drawn, 10.0)
    run: dict[str, Any] = {"micro_bsz": 2, "checkpoint": checkpoint}
    needed = {
        schedule: least_memory(profile, num_stages, num_microbatches, schedule=schedule, **run)
        for schedule in CUT_SCHEDULES
    }
    limit = scarcity * needed["1f1b"] + 1.0
    found = compare_schedules(
        profile,
        num_stages,
        num_microbatches,
        BASE,
        memory_limit=limit,
        link=link,
        transfers_overlap=overlapping,
        **run,
    )
    assert {option.schedule for option in found} == set(CUT_SCHEDULES)
    for option in found:
        assert (option.plan is not None) == (needed[option.schedule] <= limit)
        if option.plan is None:
            assert option.seconds == math.inf
            assert option.memory == pytest.approx(needed[option.schedule])
            continue
        assert option.plan.schedule == option.schedule
        assert option.memory <= limit * (1 + 1e-9)
        assert option.memory == option.plan.memory(2, num_microbatches).max()
        times = stage_times(option.plan.perf_params, 2)
        line = Schedule(
            option.schedule,
            tuple(times.forward),
            tuple(times.backward),
            num_microbatches,
            tuple(times.last_backward),
            tuple(times.transfer),
            overlapping,
        )
        assert option.seconds == pytest.approx(line.makespan)
    assert found[0].seconds <= found[1].seconds * (1 + 1e-8)


def test_equally_fast_the_one_with_less_memory_comes_first() -> None:
    profile = LayerProfile.from_layers([Layer(0, 1, 0, 2, activation_bytes=1)] * 8)
    found = compare_schedules(profile, 4, 16, BASE, micro_bsz=2)
    # 19 slots of 2 layers, 3 s a sample; activations of 4, or of all 16 micro-batches.
    assert [(x.schedule, x.seconds, x.memory) for x in found] == [
        ("1f1b", pytest.approx(19 * 2 * 3 * 2), 4 * 2 * 2),
        ("gpipe", pytest.approx(19 * 2 * 3 * 2), 16 * 2 * 2),
    ]
    scarce = compare_schedules(profile, 4, 16, BASE, micro_bsz=2, memory_limit=63.0)
    assert [(x.schedule, x.plan is not None) for x in scarce] == [("1f1b", True), ("gpipe", False)]
    assert scarce[1].memory == 64


def test_a_schedule_may_be_left_out_and_bad_arguments_are_refused() -> None:
    profile = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 2)
    only = compare_schedules(profile, 2, 4, BASE, micro_bsz=1, schedules=("gpipe",))
    assert [option.schedule for option in only] == ["gpipe"]
    with pytest.raises(ValueError, match="memory_limit is 0"):
        compare_schedules(profile, 2, 4, BASE, micro_bsz=1, memory_limit=0.0)
    with pytest.raises(ValueError, match="there are 2 layers"):
        compare_schedules(profile, 3, 4, BASE, micro_bsz=1)
