"""Hints: AdaptDL's JSON as it is, ours beside it, everything else refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipollux_perfmodel import GradParams, HintsError, PerfParams, SchedHints, even_shares
from tests.extent import examples
from tests.perfmodel.strategies import grad_params, perf_params

SEVEN = {
    "alpha_c": 0.1,
    "beta_c": 0.01,
    "alpha_n": 0.2,
    "beta_n": 0.02,
    "alpha_r": 0.05,
    "beta_r": 0.01,
    "gamma": 1.5,
}
ADAPTDL: dict[str, Any] = {
    "initBatchSize": 32,
    "localBszBounds": [8, 64],
    "globalBatchSize": None,
    "maxBatchSize": 512,
    "maxProfiledReplicas": 2,
    "gradientAccumulation": True,
    "gradParams": {"norm": 0.5, "var": 4.0},
    "perfParams": SEVEN,
}


def test_adaptdls_hints_mean_one_stage() -> None:
    hints = SchedHints.from_json_object(ADAPTDL)
    assert hints.num_stages == hints.num_microbatches == hints.version == 1
    assert hints.perf_params == PerfParams(*SEVEN.values())
    assert hints.grad_params == GradParams(sqr=0.5, var=4.0)
    assert hints.local_bsz_bounds == (8, 64)
    # And ours are AdaptDL's: all its keys, all its parameters.
    ours = hints.to_json_object()
    assert {key: ours[key] for key in ADAPTDL if key != "perfParams"} == {
        key: value for key, value in ADAPTDL.items() if key != "perfParams"
    }
    assert ours["perfParams"].items() >= SEVEN.items()


def test_adaptdls_empty_hints_are_unknown() -> None:
    hints = SchedHints.from_json_object(
        {
            "initBatchSize": 0,
            "localBszBounds": None,
            "globalBatchSize": None,
            "maxBatchSize": 0,
            "maxProfiledReplicas": 0,
            "gradientAccumulation": False,
            "gradParams": None,
            "perfParams": None,
        }
    )
    assert hints == SchedHints()
    assert hints.init_batch_size is None
    assert hints.goodput_function() is None
    assert hints.speedup_function() is None


@examples(50, 200)
@given(
    perf_params(),
    grad_params(),
    st.integers(1, 1000),
    st.integers(1, 10),
    st.one_of(st.none(), st.tuples(st.integers(1, 8), st.one_of(st.none(), st.integers(8, 64)))),
    st.integers(1, 16),
)
def test_round_trip(
    params: PerfParams,
    gradient: GradParams,
    init_batch_size: int,
    factor: int,
    bounds: tuple[int, int | None] | None,
    num_microbatches: int,
) -> None:
    hints = SchedHints(
        init_batch_size=init_batch_size,
        local_bsz_bounds=bounds,
        max_batch_size=factor * init_batch_size,
        grad_params=gradient,
        perf_params=params,
        num_stages=params.num_stages,
        num_microbatches=num_microbatches,
    )
    wire = json.dumps(hints.to_json_object(), allow_nan=False)
    assert SchedHints.from_json_object(json.loads(wire)) == hints
    assert SchedHints.model_validate_json(wire) == hints
    assert hints.perf_params == params


def test_numpy_numbers_are_numbers() -> None:
    hints = SchedHints(
        init_batch_size=np.int64(32),
        grad_params=GradParams(np.float64(1.0), np.float32(2.0)),
        perf_params=PerfParams(*np.linspace(0.1, 0.6, 6), np.float64(1.5)),
    )
    assert json.loads(json.dumps(hints.to_json_object()))["gradParams"] == {"norm": 1.0, "var": 2.0}


def test_stages_without_shares_are_equally_slow() -> None:
    hints = SchedHints.from_json_object({**ADAPTDL, "numStages": 3})
    assert hints.perf_params is not None
    assert (hints.perf_params.forward_shares, hints.perf_params.backward_shares) == even_shares(3)
    assert math.fsum(sum(even_shares(3), ())) == pytest.approx(1.0)


def test_functions_carry_the_bounds() -> None:
    hints = SchedHints.from_json_object({**ADAPTDL, "numStages": 2, "numMicrobatches": 4})
    goodput_fn, speedup_fn = hints.goodput_function(), hints.speedup_function()
    assert goodput_fn is not None
    assert speedup_fn is not None
    best, atomic_bsz, accum_steps = goodput_fn.optimize(2, 4, 512, (8, 64), True, 4)
    assert speedup_fn.configuration(2, 4)[:6] == (2, 4, 4, atomic_bsz, accum_steps, best)
    for unknown in ("initBatchSize", "gradParams", "perfParams"):
        partial = {key: value for key, value in ADAPTDL.items() if key != unknown}
        assert SchedHints.from_json_object(partial).speedup_function() is None


PIPELINE = {**SEVEN, "forward_shares": [0.2, 0.2], "backward_shares": [0.3, 0.3]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initBatchSize": -3}, "initBatchSize is -3; .*it must be at least 1"),
        ({"initBatchSize": 1.5}, "initBatchSize is 1.5"),
        ({"initBatchSize": math.nan}, "initBatchSize is nan"),
        ({"initBatchsize": 3}, "initBatchsize is not a known key; did you mean initBatchSize?"),
        ({"color": 3}, "color is not a known key; choose from initBatchSize, localBszBounds"),
        ({"maxBatchSize": 16}, "maxBatchSize 16 is below initBatchSize 32; give at least 32"),
        ({"localBszBounds": [64, 8]}, r"localBszBounds is \[64, 8\]"),
        ({"localBszBounds": [8]}, "localBszBounds.1 is missing"),
        ({"maxProfiledReplicas": -1}, "maxProfiledReplicas is -1"),
        ({"version": 2}, "version is 2"),
        ({"numStages": 0}, "numStages is 0"),
        ({"gradParams": {"norm": -1.0, "var": 1.0}}, "gradParams.norm is -1.0"),
        ({"gradParams": {"norm": 1.0}}, "gradParams.var is missing"),
        ({"perfParams": SEVEN | {"alpha_c": math.nan}}, "perfParams.alpha_c is nan"),
        ({"perfParams": SEVEN | {"alpha_c": math.inf}}, "perfParams.alpha_c is inf"),
        ({"perfParams": SEVEN | {"beta_n": -0.1}}, "perfParams.beta_n is -0.1"),
        ({"perfParams": SEVEN | {"gamma": 0.5}}, "perfParams.gamma is 0.5"),
        ({"perfParams": SEVEN | {"gamma": 11}}, "perfParams.gamma is 11"),
        ({"perfParams": SEVEN | {"gama": 1}}, "perfParams.gama .* did you mean gamma?"),
        ({"perfParams": SEVEN | {"overlap": 1.5}}, "perfParams.overlap is 1.5"),
        ({"perfParams": SEVEN | {"alpha_c": 0, "beta_c": 0}}, "both 0"),
        ({"perfParams": PIPELINE}, "forward_shares has 2 entries but numStages is 1"),
        ({"perfParams": PIPELINE | {"forward_shares": [0.2, 0.1]}}, "sum to 0.9"),
        ({"perfParams": PIPELINE | {"forward_shares": [0.4]}}, "one of each per stage"),
        ({"perfParams": SEVEN | {"forward_shares": [0.4]}}, "backward_shares 0 entries"),
    ],
)
def test_what_cannot_be_believed_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HintsError, match=f"^hints: .*{message}") as caught:
        SchedHints.from_json_object({**ADAPTDL, **change})
    assert "\n" not in str(caught.value)


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(HintsError, match="hints: the whole is 'nonsense'"):
        SchedHints.from_json_object("nonsense")


def test_hints_do_not_change() -> None:
    hints = SchedHints(init_batch_size=32)
    with pytest.raises(ValidationError):
        hints.init_batch_size = 64


LAYER = {"forward_alpha": 0, "forward_beta": 1, "backward_alpha": 0, "backward_beta": 2}
PROFILE: dict[str, Any] = {"version": 1, "layers": [LAYER] * 3}


def test_layers_travel_in_their_own_form() -> None:
    given = {**ADAPTDL, "layers": PROFILE, "balance": [3], "memoryLimit": 8e9}
    hints = SchedHints.from_json_object(
        {
            **given,
            "remainingSamples": 5000.5,
            "trainedSamples": 70.5,
            "stepRatios": [[1, 2, 1.25], [2, 4, 0.9]],
        }
    )
    assert hints.layers is not None
    assert hints.layers.num_layers == 3
    wire = json.dumps(hints.to_json_object(), allow_nan=False)
    assert SchedHints.from_json_object(json.loads(wire)) == hints
    assert json.loads(wire)["layers"] == hints.layers.to_json_object()
    assert json.loads(wire)["remainingSamples"] == 5000.5
    assert json.loads(wire)["trainedSamples"] == 70.5
    assert json.loads(wire)["stepRatios"] == [[1, 2, 1.25], [2, 4, 0.9]]


def test_what_is_not_known_is_not_written() -> None:
    """An earlier scheduler would refuse keys that it does not know."""
    written = SchedHints.from_json_object(ADAPTDL).to_json_object()
    assert (
        not {
            *("layers", "balance", "memoryLimit", "remainingSamples", "trainedSamples"),
            "stepRatios",
        }
        & written.keys()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 3}, "layers: 3 is not a layer profile"),
        ({"layers": {"version": 1}}, "the profile has no layers"),
        ({"layers": {**PROFILE, "layers": [{**LAYER, "gamma": 1}]}}, "unknown key 'gamma'"),
        ({"layers": {**PROFILE, "layers": [LAYER | {"forward_beta": -1}]}}, "forward_beta is -1"),
        ({"layers": {**PROFILE, "layers": [LAYER] * 2049}}, "has 2049 layers; give at most 2048"),
        ({"layers": PROFILE, "balance": [2, 1]}, "has 2 entries but numStages is 1"),
        ({"layers": PROFILE, "balance": [2]}, "covers 2 layers but the profile has 3"),
        ({"balance": [2]}, "layers is missing"),
        ({"memoryLimit": 0}, "memoryLimit is 0"),
        ({"remainingSamples": -1}, "remainingSamples is -1"),
        ({"trainedSamples": -1}, "trainedSamples is -1"),
        ({"stepRatios": [[1, 2, 0.0]]}, "stepRatios.* is 0"),
        ({"stepRatios": [[1, 2, 1e300]]}, r"stepRatios.* is 1e\+300"),
        ({"stepRatios": [[0, 2, 1.0]]}, "stepRatios.* is 0"),
        ({"stepRatios": [[3, 2, 1.0]]}, "stepRatios: 3 nodes .* 2 replicas"),
        ({"stepRatios": [[1, 2]]}, "stepRatios"),
        ({"stepRatios": [[1, 2, 1.0]] * 65}, "stepRatios .* at most 64 items"),
    ],
)
def test_layers_that_cannot_be_believed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HintsError, match=message):
        SchedHints.from_json_object({**ADAPTDL, **change})
