"""The profile of layers: its sums, its JSON, and what it refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel.partitioning.layer_profile import (
    Layer,
    LayerProfile,
    Link,
    check_balance,
    stage_ranges,
    stage_sums,
)
from tests.extent import examples

NUMBERS = Layer._fields[:-1]

numbers = st.floats(0, 1e12)
layers = st.builds(Layer, *[numbers] * len(NUMBERS), name=st.text(max_size=4))
profiles = st.builds(LayerProfile.from_layers, st.lists(layers, min_size=1, max_size=6), numbers)


def entry(**changes: Any) -> dict[str, Any]:
    layer = {"forward_alpha": 0.0, "forward_beta": 1, "backward_alpha": 0.5, "backward_beta": 2}
    return {**layer, **changes}


@examples(50, 200)
@given(profiles)
def test_json_gives_the_same_profile_back(profile: LayerProfile) -> None:
    text = json.dumps(profile.to_json_object(), allow_nan=False)
    assert LayerProfile.from_json_object(json.loads(text)) == profile


def test_json_may_leave_out_what_has_a_default() -> None:
    profile = LayerProfile.from_json_object({"version": 1, "layers": [entry()]})
    assert profile == LayerProfile((Layer(0.0, 1.0, 0.5, 2.0),), 0.0)
    assert profile.to_json_object()["layers"][0]["optimizer_bytes"] == 0.0
    assert "name" not in profile.to_json_object()["layers"][0]


@examples(50, 200)
@given(profiles, st.floats(0, 100), st.data())
def test_sums_are_those_of_the_layers(
    profile: LayerProfile, micro_bsz: float, data: st.DataObject
) -> None:
    forward, backward = profile.forward_seconds(micro_bsz), profile.backward_seconds(micro_bsz)
    for index, layer in enumerate(profile.layers):
        assert forward[index] == layer.forward_alpha + layer.forward_beta * micro_bsz
        assert backward[index] == layer.backward_alpha + layer.backward_beta * micro_bsz
    first = data.draw(st.integers(1, profile.num_layers))
    balance = [first, profile.num_layers - first] if first < profile.num_layers else [first]
    parts = (profile.layers[:first], profile.layers[first:])
    sums = profile.by_stage("activation_bytes", balance)
    for stage, part in zip(sums, parts, strict=False):
        assert stage == pytest.approx(math.fsum(layer.activation_bytes for layer in part))


def test_boundaries_are_the_input_and_every_output() -> None:
    profile = LayerProfile.from_layers(
        [Layer(0, 1, 0, 1, output_bytes=5.0), Layer(0, 1, 0, 1, output_bytes=7.0)], 3.0
    )
    assert profile.boundary_bytes().tolist() == [3.0, 5.0, 7.0]
    assert stage_ranges([2, 1]) == [(0, 2), (2, 3)]
    assert stage_sums(np.array([1.0, 2.0, 4.0]), [2, 1]).tolist() == [3.0, 4.0]


def test_a_link_takes_latency_and_bytes_over_bandwidth() -> None:
    assert Link(0.5, 4.0).seconds(np.array([0.0, 8.0])).tolist() == [0.5, 2.5]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_numbers_out_of_range_are_refused_by_layer_field_and_value(
    field: str, value: float
) -> None:
    wrong = Layer(0, 1, 0, 1, name="conv")._replace(**{field: value})
    with pytest.raises(ValueError, match=rf"layers\[1\] \(conv\)\.{field} is {value}; give"):
        LayerProfile.from_layers([Layer(0, 1, 0, 1), wrong])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerProfile(()), "layers is empty"),
        (lambda: LayerProfile((Layer(0, 1, 0, 1),), -2.0), "input_bytes is -2"),
        (lambda: Link(-1.0, 1.0), "latency is -1"),
        (lambda: Link(0.0, 0.0), "bandwidth is 0"),
        (lambda: Link(0.0, math.inf), "bandwidth is inf"),
        (lambda: check_balance([2, 0], 2), r"balance\[1\] is 0"),
        (lambda: check_balance([2, 2], 3), "covers 4 layers but the profile has 3"),
    ],
)
def test_bad_arguments_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"layers": [entry()]}, "the profile has no version"),
        ({"version": 1}, "the profile has no layers"),
        ({"version": 2, "layers": [entry()]}, "version is 2; this reads 1"),
        ({"version": True, "layers": [entry()]}, "version is True"),
        ({"version": 1, "layers": {}}, "layers is {}; give a list"),
        ({"version": 1, "layers": []}, "layers is empty"),
        ({"version": 1, "layers": [7]}, r"layers\[0\] is 7; give an object"),
        ({"version": 1, "layers": [entry()], "inputBytes": 1}, "did you mean input_bytes"),
        ({"version": 1, "layers": [entry()], "input_bytes": "x"}, "input_bytes is 'x'"),
        ({"version": 1, "layers": [entry(forward_beta=None)]}, r"\[0\].forward_beta is None"),
        ({"version": 1, "layers": [entry(forward_beta=True)]}, r"\[0\].forward_beta is True"),
        ({"version": 1, "layers": [entry(), entry(name=3)]}, r"\[1\].name is 3; give a string"),
        ({"version": 1, "layers": [entry(output_bytes=math.nan)]}, "output_bytes is nan"),
        ({"version": 1, "layers": [entry(output_bytes=-1)]}, "output_bytes is -1"),
        ({"version": 1, "layers": [entry(outputbytes=1)]}, "did you mean output_bytes"),
        ({"version": 1, "layers": [entry(zzz=1)]}, "unknown key 'zzz'; choose from forward_alpha"),
        ({"version": 1, "layers": [{"forward_alpha": 1}]}, r"layers\[0\] has no forward_beta"),
    ],
)
def test_bad_json_is_refused_by_key(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerProfile.from_json_object(value)
