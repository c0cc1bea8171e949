"""Parameters as JSON: nothing is lost, AdaptDL's keys are read as they are, the rest refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pipollux_perfmodel import (
    GradParams,
    ParamsError,
    PerfParams,
    SchedHints,
    grad_params_from_json,
    grad_params_to_json,
    perf_params_from_json,
    perf_params_to_json,
)
from pipollux_perfmodel.hints.codec import PerfParamsField
from tests.extent import examples
from tests.perfmodel.strategies import grad_params, perf_params, pipelines

SEVEN = {
    "alpha_c": 0.1,
    "beta_c": 0.01,
    "alpha_n": 0.2,
    "beta_n": 0.02,
    "alpha_r": 0.05,
    "beta_r": 0.01,
    "gamma": 1.5,
}
TWO = {**SEVEN, "forward_shares": [0.2, 0.1], "backward_shares": [0.4, 0.3]}


@examples(100, 400)
@given(pipelines())
def test_nothing_is_lost(params: PerfParams) -> None:
    wire = perf_params_to_json(params)
    assert perf_params_from_json(json.loads(json.dumps(wire, allow_nan=False))) == params
    # What is neutral stays unsaid, so that readers of the seven need not know it.
    assert wire["version"] == 1
    assert {"alpha_c", "gamma", "forward_shares", "overlap"} <= set(wire)
    for name in PerfParams._fields[10:]:
        assert (name in wire) == (getattr(params, name) != PerfParams._field_defaults[name])


@examples(50, 200)
@given(grad_params())
def test_nothing_of_the_gradient_is_lost(params: GradParams) -> None:
    wire = grad_params_to_json(params)
    assert set(wire) == {"version", "norm", "var"}
    assert grad_params_from_json(json.loads(json.dumps(wire, allow_nan=False))) == params


def test_adaptdls_seven_are_read_as_they_are() -> None:
    assert perf_params_from_json(SEVEN) == PerfParams(*SEVEN.values())
    assert perf_params_from_json({**SEVEN, "version": 1}) == PerfParams(*SEVEN.values())
    assert grad_params_from_json({"norm": 0.5, "var": 4}) == GradParams(0.5, 4.0)
    written = perf_params_to_json(PerfParams(*SEVEN.values()))
    assert {name: written[name] for name in SEVEN} == SEVEN


def test_a_schedule_is_gpipes_where_none_is_told() -> None:
    assert perf_params_from_json(TWO).schedule == "gpipe"
    assert "schedule" not in perf_params_to_json(perf_params_from_json(TWO))
    other = {**TWO, "schedule": "1f1b"}
    assert perf_params_from_json(other).schedule == "1f1b"
    assert perf_params_to_json(perf_params_from_json(other))["schedule"] == "1f1b"
    old = SchedHints.from_json_object({"numStages": 2, "perfParams": SEVEN}).perf_params
    new = {**SEVEN, "schedule": "1f1b"}
    told = SchedHints.from_json_object({"numStages": 2, "perfParams": new}).perf_params
    assert old is not None
    assert old.schedule == "gpipe"
    assert told == old._replace(schedule="1f1b")


@examples(50, 200)
@given(pipelines(), st.integers(1, 8))
def test_hints_carry_pipelines(params: PerfParams, num_microbatches: int) -> None:
    hints = SchedHints(
        init_batch_size=32,
        grad_params=GradParams(1.0, 8.0),
        perf_params=params,
        num_stages=params.num_stages,
        num_microbatches=num_microbatches,
    )
    written = json.loads(json.dumps(hints.to_json_object(), allow_nan=False))
    assert "version" not in written["perfParams"]  # the hints' counts
    found = SchedHints.from_json_object(written)
    assert found == hints
    assert found.perf_params == params
    goodput_fn = found.goodput_function()
    assert goodput_fn is not None
    assert goodput_fn.perf_params == params


class Job(BaseModel):
    params: PerfParamsField


@examples(50)
@given(perf_params())
def test_is_a_field_of_any_model(params: PerfParams) -> None:
    job = Job(params=params)
    assert job.params == params
    assert isinstance(job.params, PerfParams)
    assert Job.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({**SEVEN, "alpha_c": -1}, "alpha_c is -1; it must be at least 0"),
        ({**SEVEN, "alpha_c": "fast"}, "alpha_c is 'fast'"),
        ({**SEVEN, "beta_n": math.nan}, "beta_n is nan"),
        ({**SEVEN, "beta_r": math.inf}, "beta_r is inf"),
        ({**SEVEN, "gamma": 0.9}, "gamma is 0.9"),
        ({**SEVEN, "gamma": 11}, "gamma is 11"),
        ({**SEVEN, "alpha_c": 0, "beta_c": 0}, "alpha_c and beta_c are both 0"),
        ({k: v for k, v in SEVEN.items() if k != "alpha_n"}, "alpha_n is missing; give it"),
        ({**SEVEN, "overlapp": 1}, "overlapp is not a known key; did you mean overlap?"),
        ({**SEVEN, "colour": 1}, "colour is not a known key; choose from alpha_c"),
        ({**SEVEN, "version": 2}, "version is 2"),
        ({**SEVEN, "overlap": 1.5}, "overlap is 1.5"),
        ({**SEVEN, "gamma_c": 0.5}, "gamma_c is 0.5"),
        ({**SEVEN, "contention": -0.1}, "contention is -0.1"),
        ({**SEVEN, "growth_n": math.inf}, "growth_n is inf"),
        ({**SEVEN, "two_node_penalty": -1}, "two_node_penalty is -1"),
        ({**SEVEN, "overhead": -1}, "overhead is -1"),
        ({**SEVEN, "checkpoint": "sometimes"}, "checkpoint is 'sometimes'; .*'except_last'"),
        ({**TWO, "checkpoint": ["always", "no"]}, r"checkpoint is \['always', 'no'\]; .*'never'"),
        ({**TWO, "checkpoint": []}, r"checkpoint is \[\]; it must be 'never'"),
        ({**TWO, "checkpoint": ["always", "never", "never"]}, "of 3 stages; give one mode for all"),
        ({**SEVEN, "schedule": "2f2b"}, "schedule is '2f2b'; .*'gpipe', '1f1b' or 'interleaved'"),
        ({**SEVEN, "shared_link": "perhaps"}, "shared_link is 'perhaps'"),
        ({**SEVEN, "forward_shares": [0.3]}, "backward_shares 0 entries; give one of each"),
        ({**TWO, "forward_shares": [0.2, 0.2]}, "sum to 1.1; divide each by the total"),
        ({**TWO, "forward_shares": [0.2, -0.1]}, r"forward_shares\.1 is -0\.1"),
        ({**TWO, "alpha_t": [0.1, 0.1]}, "alpha_t has 2 entries; .* so give 1"),
        ({**SEVEN, "alpha_t": [0.1]}, "alpha_t has 1 entries; .* so give 0"),
        ({**SEVEN, "gradient_shares": [0.5, 0.5]}, "gradient_shares has 2 entries; .* so give 1"),
        ({**TWO, "beta_t": [-0.1]}, r"beta_t\.0 is -0\.1"),
        ({**TWO, "gradient_shares": [1.0]}, "gradient_shares has 1 entries; .* so give 2"),
        ({**TWO, "gradient_shares": [0.5, 0.4]}, "gradient_shares sum to 0.9"),
        ({**TWO, "forward_alpha_shares": [0.5, 0.5]}, "backward_alpha_shares 0 entries"),
        ("nonsense", "the whole is 'nonsense'"),
        (None, "the whole is None"),
    ],
)
def test_wrong_parameters_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ParamsError, match=f"^perf_params: .*{message}") as caught:
        perf_params_from_json(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"norm": -1, "var": 1}, "norm is -1"),
        ({"norm": 1}, "var is missing; give it"),
        ({"norm": 1, "var": math.nan}, "var is nan"),
        ({"norm": 1, "var": 1, "sqr": 1}, "sqr is not a known key; choose from norm, var"),
        ({"norm": 1, "var": 1, "version": 0}, "version is 0"),
    ],
)
def test_wrong_gradients_are_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ParamsError, match=f"^grad_params: .*{message}"):
        grad_params_from_json(value)


def test_several_wrongs_are_counted() -> None:
    with pytest.raises(ParamsError, match=r"alpha_c is -1; .* \(and 2 more\)$"):
        perf_params_from_json({**SEVEN, "alpha_c": -1, "beta_c": -1, "gamma": 0})
