"""The price of a cut, against its layers; what measurements and other stage numbers change."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile, Link
from pipollux_perfmodel.partitioning.memory import largest_micro_bsz, stage_memory
from pipollux_perfmodel.partitioning.partition import partition
from pipollux_perfmodel.partitioning.restage import restage
from pipollux_perfmodel.partitioning.stage_plan import (
    correct_profile,
    plan_stages,
    price_stages,
)
from pipollux_perfmodel.timing.params import (
    CHECKPOINTS,
    Checkpoint,
    PerfParams,
    check_params,
    stage_modes,
)
from pipollux_perfmodel.timing.step_time import pipeline_time, stage_times, step_time
from tests.extent import examples

BASE = PerfParams(9.0, 9.0, 0.2, 0.02, 0.05, 0.01, 1.5, (0.1,), (0.9,))

seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
sizes = st.one_of(st.just(0.0), st.floats(1.0, 1e9))
layers = st.builds(Layer, seconds, seconds, seconds, seconds, *[sizes] * 5)
modes_of_stages = st.lists(st.sampled_from(CHECKPOINTS), min_size=5, max_size=5)
links = st.one_of(st.none(), st.builds(Link, seconds, st.floats(1e6, 1e12)))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[LayerProfile, list[int]]:
    """A profile that takes some time, and a cut of it."""
    balance = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    drawn = draw(st.lists(layers, min_size=sum(balance), max_size=sum(balance)))
    drawn[0] = drawn[0]._replace(forward_beta=drawn[0].forward_beta + 1e-3)
    return LayerProfile.from_layers(drawn), balance


def stages_of(profile: LayerProfile, balance: list[int]) -> list[tuple[Layer, ...]]:
    ends = np.cumsum([0, *balance]).tolist()
    return [profile.layers[start:end] for start, end in pairwise(ends)]


def times_of(
    profile: LayerProfile, balance: list[int], b: float
) -> tuple[list[float], list[float]]:
    """Forwards and backwards of the stages, without recomputation."""
    stages = stages_of(profile, balance)
    return (
        [sum(x.forward_alpha + x.forward_beta * b for x in stage) for stage in stages],
        [sum(x.backward_alpha + x.backward_beta * b for x in stage) for stage in stages],
    )


def copies_of(
    profile: LayerProfile, balance: list[int], b: float, link: Link | None
) -> list[float]:
    stages = stages_of(profile, balance)[:-1]
    if link is None:
        return [0.0] * len(stages)
    return [link.latency + stage[-1].output_bytes * b / link.bandwidth for stage in stages]


@examples(150, 600)
@given(
    cuts(),
    st.integers(1, 20),
    st.floats(0.5, 64),
    st.sampled_from(["never", "always"]),
    links,
    st.booleans(),
)
def test_the_pipeline_takes_what_its_layers_take(
    cut: tuple[LayerProfile, list[int]],
    num_microbatches: int,
    b: float,
    checkpoint: Checkpoint,
    link: Link | None,
    overlapping: bool,
) -> None:
    profile, balance = cut
    f, g = times_of(profile, balance, b)
    if checkpoint == "always":
        g = [x + y for x, y in zip(f, g, strict=True)]
    t = copies_of(profile, balance, b, link)
    if overlapping:
        slowest = max(f + t) + max(g + t)
    else:
        slowest = max(x + y for x, y in zip(f, [0.0, *t], strict=True))
        slowest += max(x + y for x, y in zip(g, [*t, 0.0], strict=True))
    expected = sum(f) + sum(g) + 2 * sum(t) + (num_microbatches - 1) * slowest
    params = price_stages(
        profile, balance, BASE, checkpoint=checkpoint, link=link, transfers_overlap=overlapping
    )
    args = (1, 1, b * num_microbatches, 0, num_microbatches)
    assert step_time(params, *args).accum_time == pytest.approx(expected, rel=1e-12)


@examples(100, 400)
@given(cuts(), st.floats(0.5, 64), modes_of_stages, links)
def test_every_stage_takes_what_its_layers_take(
    cut: tuple[LayerProfile, list[int]], b: float, modes: list[Checkpoint], link: Link | None
) -> None:
    profile, balance = cut
    checkpoint = tuple(modes[: len(balance)])
    params = price_stages(profile, balance, BASE, checkpoint=checkpoint, link=link)
    times = stage_times(params, b)
    f, plain = times_of(profile, balance, b)
    own = stage_modes(checkpoint, len(balance))
    g = [x + y * (mode != "never") for x, y, mode in zip(plain, f, own, strict=True)]
    total = sum(f) + sum(g)
    last = [x if mode == "except_last" else y for x, y, mode in zip(plain, g, own, strict=True)]
    for found, expected in (
        (times.forward, f),
        (times.backward, g),
        (times.last_backward, last),
        (times.transfer, copies_of(profile, balance, b, link)),
    ):
        assert list(found) == pytest.approx(expected, rel=1e-12, abs=1e-12 * total)


@examples(100, 400)
@given(cuts(), st.sampled_from(CHECKPOINTS), links)
def test_a_price_is_whole_and_keeps_what_layers_do_not_tell(
    cut: tuple[LayerProfile, list[int]], checkpoint: Checkpoint, link: Link | None
) -> None:
    profile, balance = cut
    base = BASE._replace(overlap=0.7, gamma_c=3.0, contention=0.1, growth_n=0.5, shared_link=False)
    params = price_stages(profile, balance, base, checkpoint=checkpoint, link=link)
    assert check_params(params) == params
    assert params.num_stages == len(balance)
    assert params.gamma_c == 1.0
    kept = (
        "alpha_n beta_n alpha_r beta_r gamma overlap contention growth_n two_node_penalty "
        "shared_link"
    )
    for field in kept.split():
        assert getattr(params, field) == getattr(base, field)
    parameters = [sum(x.parameter_bytes for x in part) for part in stages_of(profile, balance)]
    if sum(parameters):
        assert params.gradient_shares == pytest.approx([x / sum(parameters) for x in parameters])
    else:
        assert params.gradient_shares == ()


def test_a_cut_with_fixed_costs_alone() -> None:
    profile = LayerProfile.from_layers([Layer(1.0, 0.0, 2.0, 0.0), Layer(2.0, 0.0, 3.0, 0.0)])
    params = price_stages(profile, [1, 1], BASE, checkpoint="never")
    assert (params.alpha_c, params.beta_c) == (8.0, 0.0)
    assert params.forward_shares == params.forward_alpha_shares == (0.125, 0.25)
    assert pipeline_time(params, 5.0, 3) == pytest.approx(8 + 2 * (2 + 3))


def test_fixed_costs_are_shared_out_apart() -> None:
    profile = LayerProfile.from_layers([Layer(1.0, 0.0, 3.0, 0.0), Layer(0.0, 1.0, 0.0, 1.0)])
    params = price_stages(profile, [1, 1], BASE, checkpoint="never")
    assert params.forward_shares == (0.0, 0.5)
    assert params.forward_alpha_shares == (0.25, 0.0)
    assert params.backward_alpha_shares == (0.75, 0.0)


def test_a_plan_is_a_cut_and_its_price() -> None:
    rng = np.random.default_rng(5)
    rows = rng.gamma(2.0, 1.0, (12, 8)).tolist()
    profile = LayerProfile.from_layers([Layer(*row) for row in rows], 3.0)
    link = Link(0.1, 10.0)
    how: dict[str, Any] = {"checkpoint": "except_last", "link": link, "transfers_overlap": False}
    plan = plan_stages(
        profile, 4, 6, BASE, micro_bsz=2.0, memory_limit=50.0, schedule="1f1b", **how
    )
    cut = partition(profile, 4, 6, 50.0, micro_bsz=2.0, schedule="1f1b", **how)
    assert cut != partition(profile, 4, 6, micro_bsz=2.0, schedule="1f1b", **how)
    assert list(plan.balance) == cut
    assert plan.perf_params == price_stages(profile, cut, BASE, schedule="1f1b", **how)
    assert plan.schedule == "1f1b"
    assert plan.perf_params.checkpoint == "except_last"
    assert not plan.perf_params.transfers_overlap
    modes: dict[str, Any] = {"checkpoint": "except_last", "schedule": "1f1b"}
    assert np.all(plan.memory(2.0, [1, 6]) == stage_memory(profile, cut, 2.0, [1, 6], **modes))
    assert plan.memory(2.0, 6).max() <= 50.0
    room = largest_micro_bsz(profile, cut, 50.0, [1, 6], **modes)
    assert plan.largest_micro_bsz(50.0, [1, 6]).tolist() == room.tolist()
    assert room[1] >= 2


@examples(100, 400)
@given(cuts(), st.floats(0.5, 64), modes_of_stages, st.data())
def test_a_corrected_profile_predicts_what_was_measured(
    cut: tuple[LayerProfile, list[int]], b: float, modes: list[Checkpoint], data: st.DataObject
) -> None:
    profile, balance = cut
    checkpoint = tuple(modes[: len(balance)])
    count = profile.num_layers
    slower = data.draw(st.lists(st.floats(0.1, 10), min_size=2 * count, max_size=2 * count))
    truth = LayerProfile.from_layers(
        layer._replace(
            forward_alpha=layer.forward_alpha * slower[2 * i],
            forward_beta=layer.forward_beta * slower[2 * i],
            backward_alpha=layer.backward_alpha * slower[2 * i + 1] + 1e-3,
            backward_beta=layer.backward_beta * slower[2 * i + 1],
        )
        for i, layer in enumerate(profile.layers)
    )
    measured = price_stages(truth, balance, BASE, checkpoint=checkpoint)
    corrected = correct_profile(profile, measured, balance, b)
    assert corrected.input_bytes == profile.input_bytes
    assert [x[4:] for x in corrected.layers] == [x[4:] for x in profile.layers]
    found, expected = times_of(corrected, balance, b), times_of(truth, balance, b)
    total = sum(map(sum, expected))
    for phase in (0, 1):
        assert found[phase] == pytest.approx(expected[phase], rel=1e-9, abs=1e-9 * total)


def test_a_correction_keeps_the_layers_of_a_stage_in_proportion() -> None:
    profile = LayerProfile.from_layers([Layer(1, 1, 0, 0), Layer(1, 3, 0, 0), Layer(0, 1, 0, 2)])
    # Measured at b = 1: stage 0 takes 12 forward and 4 backward, stage 1 takes 1 and 1.
    measured = PerfParams(0, 18, 0, 0, 0, 0, 1, (12 / 18, 1 / 18), (4 / 18, 1 / 18))
    found = correct_profile(profile, measured, [2, 1], 1.0)
    assert [x.forward_beta for x in found.layers] == pytest.approx([2.0, 6.0, 1.0])
    assert [x.forward_alpha for x in found.layers] == pytest.approx([2.0, 2.0, 0.0])
    # Nothing to scale: what was measured is shared evenly.
    assert [x.backward_alpha for x in found.layers] == pytest.approx([2.0, 2.0, 0.0])
    assert [x.backward_beta for x in found.layers] == pytest.approx([0.0, 0.0, 1.0])


def test_a_measured_recomputation_is_no_backward() -> None:
    profile = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 2)
    measured = price_stages(profile, [1, 1], BASE, checkpoint="always")
    assert correct_profile(profile, measured, [1, 1], 3.0) == profile
    twice = measured._replace(beta_c=2 * measured.beta_c)
    assert [x[1:4:2] for x in correct_profile(profile, twice, [1, 1], 3.0).layers] == [
        (2.0, 4.0)
    ] * 2


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
def test_stages_without_a_profile_are_even_and_take_as_long_together(num_stages: int) -> None:
    params = PerfParams(
        *(0.3, 0.02, 0.2, 0.02, 0.05, 0.01, 1.5),
        forward_shares=(0.1, 0.2, 0.1),
        backward_shares=(0.2, 0.3, 0.1),
        forward_alpha_shares=(0.2, 0.0, 0.0),
        backward_alpha_shares=(0.3, 0.5, 0.0),
        alpha_t=(0.01, 0.03),
        gradient_shares=(0.5, 0.25, 0.25),
        checkpoint="always",
    )
    found = check_params(restage(params, num_stages))
    before, after = stage_times(params, 4.0), stage_times(found, 4.0)
    assert sum(after.forward) == pytest.approx(sum(before.forward))
    assert sum(after.backward) == pytest.approx(sum(before.backward))
    assert max(after.forward) == pytest.approx(min(after.forward))
    assert after.transfer == pytest.approx([0.02] * (num_stages - 1))
    assert found.gradient_shares == (1 / num_stages,) * num_stages
    assert found.beta_t == ()
    assert (found.checkpoint, found.gamma) == ("always", 1.5)


def test_stages_of_what_was_measured_without_them() -> None:
    params = PerfParams(0.3, 0.02, 0.2, 0.02, 0.05, 0.01, 1.5)
    four = restage(params, 4)
    assert four.gradient_shares == (0.25,) * 4
    assert (four.forward_alpha_shares, four.alpha_t) == ((), ())
    # A job that synchronises after the whole backward goes on doing so.
    assert restage(four._replace(gradient_shares=()), 2).gradient_shares == ()
    uneven = four._replace(forward_shares=(0.1, 0.1, 0.1, 1 / 30), backward_shares=(1 / 6,) * 4)
    assert restage(uneven, 4) is uneven
    # A list of modes is of its own number of stages; of others the one that keeps most.
    apart = four._replace(checkpoint=("always", "except_last", "always", "always"))
    assert [restage(apart, k).checkpoint for k in (2, 4)] == ["except_last", apart.checkpoint]
    # Tied layers of one stage are exchanged with none.
    assert [restage(four._replace(tied_exchange=0.1), k).tied_exchange for k in (1, 2)] == [0, 0.1]


PROFILE = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 2)
IDLE = LayerProfile.from_layers([Layer(0, 0, 0, 0)] * 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: price_stages(PROFILE, [1], BASE, checkpoint="never"), "covers 1 layers"),
        (lambda: price_stages(PROFILE, [2, 0], BASE, checkpoint="never"), r"balance\[1\] is 0"),
        (lambda: price_stages(IDLE, [2], BASE, checkpoint="never"), "take no time at all"),
        (
            lambda: price_stages(PROFILE, [2], BASE, checkpoint="no"),
            "checkpoint is 'no'",
        ),
        (
            lambda: price_stages(PROFILE, [2], BASE._replace(overlap=2), checkpoint="never"),
            "overlap is 2",
        ),
        (lambda: correct_profile(PROFILE, BASE, [1, 1], 1.0), "measured has 1 stages but balance"),
        (lambda: correct_profile(PROFILE, BASE, [3], 1.0), "covers 3 layers"),
        (lambda: correct_profile(PROFILE, BASE, [2], 0.0), "micro_bsz is 0"),
        (lambda: restage(BASE, 0), "num_stages is 0"),
        (lambda: plan_stages(PROFILE, 3, 1, BASE, micro_bsz=1.0), "there are 2 layers"),
    ],
)
def test_bad_arguments_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
