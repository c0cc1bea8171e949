"""The rows that jobs hand down: as they are, bounded, and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from pipollux_perfmodel import HintsError, SchedHints
from pipollux_perfmodel.hints.step_rows import (
    MAX_INHERITED,
    MAX_PASSED_ON,
    MAX_ROWS,
    InheritedRows,
    StepRow,
    StepRows,
)

ROW: dict[str, Any] = {
    "numStages": 2,
    "numNodes": 1,
    "numReplicas": 4,
    "atomicBsz": 16,
    "numMicrobatches": 4,
    "processes": 2,
    "schedule": "interleaved",
    "chunksPerStage": 2,
    "accumStepTime": 0.1 + 0.2,
    "optimStepTime": 1 / 3,
    "forward": [0.01, 0.02],
    "backward": [0.03, 0.04],
    "exchangeTime": 0.005,
    "scatter": 0.02,
    "passedOn": 1,
}
PROFILE = {"checkpoint": "except_last", "numLayers": 6, "numParameters": 1000, "rows": [ROW]}


def read(**profile: Any) -> SchedHints:
    return SchedHints.from_json_object({"numStages": 2, "stepProfile": {**PROFILE, **profile}})


def test_rows_come_back_as_they_went() -> None:
    hints = read()
    written = json.loads(json.dumps(hints.to_json_object()))
    assert written["stepProfile"] == PROFILE
    again = SchedHints.from_json_object(written)
    assert again == hints
    assert hash(again) == hash(hints)
    assert again.step_profile is not None
    assert again.step_profile.max_replicas == 4
    assert "stepProfile" not in SchedHints().to_json_object()


def test_rows_are_bounded() -> None:
    """The longest that are allowed are a small part of what a request may have."""
    many = [{**ROW, "atomicBsz": size} for size in range(1, MAX_ROWS + 1)]
    hints = read(rows=many)
    assert len(json.dumps(hints.to_json_object())) < 2**16
    with pytest.raises(HintsError, match=r"stepProfile.rows .* at most 64 items"):
        read(rows=[*many, ROW])
    with pytest.raises(HintsError, match=r"stepProfile.rows .* at least 1 item"):
        read(rows=[])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"optimStepTime": 0.0}, "optimStepTime is 0.0; it must be above 0"),
        ({"optimStepTime": math.inf}, "optimStepTime is inf; it must be a finite number"),
        ({"accumStepTime": 1e7}, "accumStepTime is 10000000.0; it must be at most 1000000"),
        ({"forward": [-1.0, 0.0]}, "forward.0 is -1.0; it must be at least 0"),
        ({"backward": [0.1]}, "backward has 1 entries but numStages is 2; give one for each stage"),
        ({"forward": []}, "backward has 2 entries but numStages is 2"),
        ({"numNodes": 5}, "numNodes 5 is more than numReplicas 4"),
        ({"schedule": "zb"}, "schedule is 'zb'; it must be"),
        ({"passedOn": MAX_PASSED_ON}, f"passedOn is {MAX_PASSED_ON}; it must be at most 2"),
        ({"optimStepTimes": 1.0}, "optimStepTimes is not a known key; did you mean optimStepTime?"),
        ({"numStages": 2000}, "numStages is 2000; it must be at most 1024"),
    ],
)
def test_rows_that_make_no_sense_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(HintsError) as caught:
        read(rows=[{**ROW, **changed}])
    assert str(caught.value).startswith("hints: stepProfile.rows.0")
    assert says in str(caught.value)


def test_a_profile_knows_its_own_keys() -> None:
    with pytest.raises(HintsError, match=r"stepProfile.numLayer is not .* did you mean numLayers?"):
        read(numLayer=6)
    assert StepRows.model_validate(PROFILE).rows == (StepRow.model_validate(ROW),)


def rows_of(*entries: tuple[int, int], seconds: float = 1.0, **traits: Any) -> StepRows:
    """What a job hands down: (replicas, how many times it was handed down) of each row."""
    rows = [
        {**ROW, "numReplicas": replicas, "passedOn": times, "optimStepTime": seconds}
        for replicas, times in entries
    ]
    return StepRows.model_validate({**PROFILE, "rows": rows, **traits})


def test_of_several_jobs_what_was_handed_down_least_counts() -> None:
    """Of equals the earlier job's, and nothing of another model."""
    several = (
        rows_of((1, 1), (2, 0), seconds=1.0),
        rows_of((1, 0), (2, 0), (4, 2), seconds=2.0),
        rows_of((1, 0), (8, 0), seconds=3.0, numParameters=7),
    )
    found = InheritedRows.of(several)
    assert found is not None
    assert [(x.num_replicas, x.passed_on, x.optim_step_time) for x in found.rows] == [
        *((2, 0, 1.0), (1, 0, 2.0), (4, 2, 2.0)),
    ]
    assert (found.num_layers, found.num_parameters) == (6, 1000)
    assert InheritedRows.of([]) is None


OTHER: dict[str, Any] = {
    "numStages": 1,
    "numNodes": 2,
    "numReplicas": 2,
    "atomicBsz": 8,
    "numMicrobatches": 2,
    "processes": 1,
    "schedule": "gpipe",
    "chunksPerStage": 1,
}
TIMES = {"accumStepTime", "optimStepTime", "exchangeTime", "forward", "backward", "scatter"}


@pytest.mark.parametrize("name", OTHER)
def test_each_field_that_is_no_time_makes_another_configuration(name: str) -> None:
    row = {**ROW, "forward": [], "backward": []}
    other = StepRow.model_validate({**row, name: OTHER[name]})
    assert other.configuration != StepRow.model_validate(row).configuration
    assert OTHER.keys() | TIMES | {"passedOn"} == other.model_dump(by_alias=True).keys()


def test_more_rows_come_together_than_one_job_hands_down() -> None:
    several = [rows_of(*((k, i % 3) for k in range(1, MAX_ROWS + 1))) for i in range(3)]
    spread = [
        rows_of(*((MAX_ROWS * i + k, i % 3) for k in range(1, MAX_ROWS + 1))) for i in range(6)
    ]
    found = InheritedRows.of(several)
    assert found is not None
    assert [x.passed_on for x in found.rows] == [0] * MAX_ROWS
    found = InheritedRows.of(spread)
    assert found is not None
    assert len(found.rows) == MAX_INHERITED
    assert [x.passed_on for x in found.rows] == sorted([0, 1] * 2 * MAX_ROWS)
