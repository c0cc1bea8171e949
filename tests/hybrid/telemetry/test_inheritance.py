"""Step times of other jobs: what a job makes of them, and when it lets go of them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest

from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.telemetry.inheritance import (
    SURE,
    ModelTraits,
    contradiction,
    fit,
    left_over_by_size,
    rows_to_pass_on,
)
from pipollux_hybrid.telemetry.step_profile import NORMAL, STEADY, StepProfile
from pipollux_hybrid.telemetry.step_summary import FitData, StepConfiguration, StepSummary
from pipollux_perfmodel.goodput.size_corrections import SizeCorrections
from pipollux_perfmodel.hints.step_rows import MAX_PASSED_ON, MAX_ROWS
from pipollux_perfmodel.timing.step_time import step_time

TRAITS = ModelTraits(4, 168, "never")


def configuration(replicas: int, size: int = 8) -> StepConfiguration:
    return StepConfiguration(1, 1, replicas, size, 1)


def measured(
    times: Mapping[StepConfiguration, float],
    steps: int = STEADY,
    profile: StepProfile | None = None,
) -> StepProfile:
    """A job that took so many seconds a step, a tenth of them waiting for peers."""
    profile = profile or StepProfile()
    for config, seconds in times.items():
        for _ in range(2 + steps):  # two warm up
            profile.add_step(config, seconds, seconds / 10, optimizer=True)
    return profile


def handed_down(
    times: Mapping[StepConfiguration, float], steps: int = STEADY
) -> dict[StepConfiguration, StepSummary]:
    return {c: s._replace(passed_on=1) for c, s in measured(times, steps).own().items()}


def data_of(profile: StepProfile) -> FitData:
    found = profile.fit_data(1)
    assert found is not None
    return found


OLD = {configuration(1): 0.2, configuration(2): 0.3, configuration(2, 16): 0.5}
NEW = {configuration(4): 0.4, configuration(2): 0.31}


def test_a_fit_is_to_both_as_if_the_job_had_measured_all() -> None:
    warm_start = measured(NEW)
    warm_start.inherit(handed_down(OLD))
    alone = measured({**OLD, **NEW})
    inherited, own = data_of(warm_start), data_of(alone)
    assert inherited == own
    order = PipelineSchedule("gpipe")
    assert fit(inherited, order) == fit(own, order)
    assert fit(inherited, order) != fit(data_of(measured(NEW)), order)
    assert warm_start.max_replicas == 4
    assert warm_start.orders(1, 1) == (order,)


def test_by_size_is_what_was_measured_for_sure_on_the_same_replicas() -> None:
    times = {configuration(2, 8): 0.3, configuration(2, 16): 0.5, configuration(4, 32): 0.4}
    profile = measured(times)
    params = fit(data_of(profile), PipelineSchedule("gpipe"))
    measured({configuration(2, 64): 9.0}, STEADY - 1, profile)
    few = handed_down({configuration(2, 256): 9.0}, STEADY - 1)
    profile.inherit({**handed_down({configuration(2, 128): 3.0}), **few})

    def left_over(size: int, seconds: float) -> float:
        """Return measured over predicted seconds."""
        return seconds / float(step_time(params, 1, 2, size, 0, 1).total)

    found = left_over_by_size(params, profile, configuration(2))
    assert found is not None
    known = {8: 0.3, 16: 0.5, 128: 3.0}
    assert 1 / found.factors([*known]) == pytest.approx([left_over(*row) for row in known.items()])
    # Neither sizes that took too few steps, nor that of other replicas, count as measured.
    assert SizeCorrections([*known], -np.log(found.factors([*known]))).factors(
        [32, 64, 256]
    ) == pytest.approx(found.factors([32, 64, 256]))
    assert left_over_by_size(params, profile, configuration(3)) is None


def test_rows_tell_how_far_steps_scatter() -> None:
    """Of too few steps nothing, so that who begins with them tries the size itself."""
    profile = measured({configuration(1): 0.2}, STEADY - 1)
    for number in range(2 + STEADY):
        profile.add_step(configuration(2), 0.3 + 0.03 * (number % 3 - 1), 0.0, optimizer=True)
    rows = rows_to_pass_on(profile, TRAITS)
    assert rows is not None
    assert [row.scatter for row in rows.rows] == [pytest.approx(0.1 * NORMAL), None]
    read = StepProfile()
    read.inherit(profile.own())
    again = StepProfile()
    again.load_inherited(json.loads(json.dumps(read.inherited_to_json())))
    assert again.inherited == read.inherited == profile.own()


def test_the_cap_holds_after_the_first_own_measurement() -> None:
    warm_start = measured({configuration(1): 0.2})
    assert warm_start.max_replicas == 1
    warm_start.inherit(handed_down(OLD))
    assert warm_start.max_replicas == 2
    assert contradiction(warm_start, "never") is None
    assert warm_start.max_replicas == 2
    assert set(warm_start.inherited) == set(OLD) - {configuration(1)}  # its own replaces it
    assert warm_start.unsettled(SURE) == {}


@pytest.mark.parametrize("factor", [1 / 1.3, 1.3])
def test_an_own_measurement_of_the_same_contradicts(factor: float) -> None:
    warm_start = measured({configuration(2): 0.3 * factor})
    warm_start.inherit(handed_down(OLD))
    told = contradiction(warm_start, "never")
    assert told is not None
    assert told.startswith("2 replicas with an atomic batch size of 8 take ")
    assert told.endswith("and other jobs measured 0.3 s")
    few = measured({configuration(2): 0.3 * factor}, steps=SURE - 1)
    few.inherit(handed_down(OLD))
    assert contradiction(few, "never") is None  # not sure yet


def test_an_own_measurement_between_inherited_ones_contradicts_their_fit() -> None:
    times = {configuration(1, size): 0.1 + 0.01 * size for size in (8, 32)}
    for seconds, agrees in ((0.26, True), (0.5, False), (0.1, False)):
        warm_start = measured({configuration(1, 16): seconds})
        warm_start.inherit(handed_down(times))
        assert (contradiction(warm_start, "never") is None) == agrees, seconds
    # Beyond them a fit is a guess, and may be wrong.
    warm_start = measured({configuration(4, 16): 9.0, configuration(1, 64): 9.0})
    warm_start.inherit(handed_down(times))
    assert contradiction(warm_start, "never") is None
    assert set(warm_start.inherited) == set(times)


def test_what_is_passed_on_is_bounded_in_number_and_in_age() -> None:
    profile = measured({configuration(1, size): 0.1 for size in range(1, MAX_ROWS + 10)})
    measured({configuration(1, 1): 0.1}, profile=profile)  # the latest
    profile.inherit(handed_down(OLD))
    rows = rows_to_pass_on(profile, TRAITS)
    assert rows is not None
    assert ModelTraits.of(rows) == TRAITS
    apart = TRAITS._replace(checkpoint=("always", "never"))
    texts = rows.model_copy(update=apart._asdict()).model_dump_json(), json.dumps(apart)
    read = [json.loads(text) for text in texts]
    assert ModelTraits.of(type(rows).model_validate(read[0])) == apart
    assert ModelTraits.from_json(read[1]) == apart
    assert [row.atomic_bsz for row in rows.rows] == [1, *range(MAX_ROWS + 9, 10, -1)]
    young = StepSummary(0.1, 0.1, passed_on=MAX_PASSED_ON - 1)
    profile = measured({configuration(1): 0.2})
    profile.inherit({configuration(2): young, configuration(3): young._replace(passed_on=3)})
    rows = rows_to_pass_on(profile, TRAITS)
    assert rows is not None
    assert [(row.num_replicas, row.passed_on) for row in rows.rows] == [(1, 0), (2, 2)]
    assert rows_to_pass_on(StepProfile(), TRAITS) is None
    assert rows_to_pass_on(profile, None) is None
