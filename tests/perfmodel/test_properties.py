"""What holds for every job, pipeline and configuration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pipollux_perfmodel import GoodputFunction, GradParams, PerfParams, StepTime
from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile
from pipollux_perfmodel.partitioning.memory import stage_memory
from pipollux_perfmodel.timing.params import CHECKPOINTS, Checkpoint
from tests.extent import examples
from tests.perfmodel.strategies import allocations, grad_params, perf_params, pipelines

SLACK = 1 + 1e-9
# num_nodes, num_replicas, atomic_bsz, accum_steps, num_microbatches
Sizes = tuple[int, int, int, int, int]

# Of 4 s of network 0.25 s hide behind the first stage's backward, and none without that backward.
HIDING = PerfParams(
    *(1.0, 0.0, 4.0, 0.0, 4.0, 0.0, 1.5),
    forward_shares=(0.25, 0.25),
    backward_shares=(0.25, 0.25),
    gradient_shares=(0.5, 0.5),
)
TWO_NODES: Sizes = (2, 2, 1, 0, 1)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    nodes, replicas = draw(allocations())
    num_microbatches = draw(st.integers(1, 12))
    micro_bsz, accum_steps = draw(st.integers(1, 64)), draw(st.integers(0, 6))
    return nodes, replicas, micro_bsz * num_microbatches, accum_steps, num_microbatches


def times_of(params: PerfParams, configuration: Sizes) -> StepTime:
    return GoodputFunction(params, (1.0, 1.0), 1).step_time(*configuration)


def assert_never_slower(fast: StepTime, slow: StepTime) -> None:
    for name, fewer, more in zip(StepTime._fields, fast, slow, strict=True):
        assert fewer <= more * SLACK, name


@examples(50, 200)
@given(pipelines(), grad_params(), sizes(), st.integers(1, 64))
def test_efficiency_and_goodput(
    params: PerfParams, gradient: GradParams, configuration: Sizes, init_batch_size: int
) -> None:
    _, replicas, atomic_bsz, accum_steps, _ = configuration
    batch_size = replicas * atomic_bsz * (accum_steps + 1)
    assume(batch_size >= init_batch_size)
    goodput_fn = GoodputFunction(params, gradient, init_batch_size)
    efficiency = goodput_fn.efficiency(batch_size)
    goodput, throughput = goodput_fn(*configuration), goodput_fn.throughput(*configuration)
    assert 0 < efficiency <= SLACK
    assert 0 < goodput <= throughput * SLACK
    assert goodput == pytest.approx(throughput * efficiency)
    assert throughput == pytest.approx(batch_size / times_of(params, configuration).total)


@examples(50, 200)
@given(pipelines(), sizes())
def test_an_iteration_takes_at_least_its_parts(params: PerfParams, configuration: Sizes) -> None:
    times = times_of(params, configuration)
    assert times.optim_time * SLACK >= times.accum_time > 0
    longest = times.accum_time + times.network_time + params.tied_exchange
    assert times.optim_time <= longest * SLACK
    busy = times.network_time
    if params.gradient_shares and not params.shared_link:
        busy *= max(params.gradient_shares)  # links of their own work at the same time
    assert times.optim_time * SLACK >= busy or params.sync_every
    assert times.total == pytest.approx(configuration[3] * times.accum_time + times.optim_time)
    assert all(isinstance(value, float) and np.isfinite(value) for value in times)


@examples(25, 200)
@given(pipelines(), sizes())
def test_hidden_all_reduces_never_take_longer(params: PerfParams, configuration: Sizes) -> None:
    assume(params.gradient_shares)
    after = times_of(params._replace(gradient_shares=()), configuration)
    shared = times_of(params._replace(shared_link=True), configuration)
    own = times_of(params._replace(shared_link=False), configuration)
    assert own.optim_time <= shared.optim_time * SLACK
    assert shared.optim_time <= after.optim_time * SLACK
    assert own.accum_time == pytest.approx(after.accum_time)
    # All in the first stage is all after the backward.
    first = (1.0,) + (0.0,) * (params.num_stages - 1)
    assert times_of(params._replace(gradient_shares=first), configuration).total == pytest.approx(
        after.total
    )


@examples(50, 200)
@given(pipelines(), sizes(), st.floats(0, 1), st.floats(0, 1))
def test_more_overlap_of_stages_is_never_slower(
    params: PerfParams, configuration: Sizes, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    slow, fast = (
        times_of(params._replace(overlap=overlap), configuration) for overlap in (less, more)
    )
    assert_never_slower(fast, slow)


@examples(50, 200)
@given(pipelines(), sizes(), st.floats(1, 10), st.floats(1, 10))
def test_more_overlap_of_network_is_never_slower(
    params: PerfParams, configuration: Sizes, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    slow, fast = (
        times_of(params._replace(gamma=gamma), configuration).optim_time for gamma in (less, more)
    )
    assert fast <= slow * SLACK


@examples(50, 200)
@given(pipelines(), sizes())
def test_copies_contention_penalty_and_overhead_never_make_it_faster(
    params: PerfParams, configuration: Sizes
) -> None:
    times = times_of(params, configuration)
    assert_never_slower(times_of(params._replace(alpha_t=(), beta_t=()), configuration), times)
    for name in ("contention", "two_node_penalty", "overhead"):
        assert_never_slower(times_of(params._replace(**{name: 0.0}), configuration), times)
    beside, between = (
        times_of(params._replace(transfers_overlap=overlap), configuration)
        for overlap in (True, False)
    )
    assert_never_slower(beside, between)


@examples(50, 400)
@given(pipelines(), sizes(), st.floats(0.0, 1.0), st.integers(0, 7))
@example(HIDING, TWO_NODES, 0.0, 2)
def test_work_that_takes_less_never_makes_an_iteration_longer(
    params: PerfParams, configuration: Sizes, factor: float, number: int
) -> None:
    times = times_of(params, configuration)
    for name in ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r"):
        less = params._replace(**{name: factor * getattr(params, name)})
        assert_never_slower(times_of(less, configuration), times)
    less = with_less_of(params, number % (2 * params.num_stages), factor)
    assert_never_slower(times_of(less, configuration), times)


def with_less_of(params: PerfParams, number: int, factor: float) -> PerfParams:
    """Return the job of which one of the K forwards and K backwards takes `factor` of its time."""

    def lessened(shares: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
        left = [share * (factor if i == number else 1.0) for i, share in enumerate(shares)]
        return tuple(share / sum(left) for share in left), sum(left)

    num_stages = params.num_stages
    of_beta, beta_left = lessened(params.forward_shares + params.backward_shares)
    alpha_left = beta_left
    if params.forward_alpha_shares:
        of_alpha, alpha_left = lessened(params.forward_alpha_shares + params.backward_alpha_shares)
        params = params._replace(
            forward_alpha_shares=of_alpha[:num_stages], backward_alpha_shares=of_alpha[num_stages:]
        )
    return params._replace(
        alpha_c=params.alpha_c * alpha_left,
        beta_c=params.beta_c * beta_left,
        forward_shares=of_beta[:num_stages],
        backward_shares=of_beta[num_stages:],
    )


@examples(50, 200)
@given(pipelines(), sizes())
@example(HIDING, TWO_NODES)
def test_a_last_micro_batch_that_is_not_recomputed_is_never_slower(
    params: PerfParams, configuration: Sizes
) -> None:
    modes = ("never", "except_last", "always")
    never, except_last, all_of_them = (
        times_of(params._replace(checkpoint=mode), configuration) for mode in modes
    )
    assert_never_slower(except_last, all_of_them)
    # The shares include recomputation, so with the same ones these are the same.
    assert never == all_of_them


@examples(50, 200)
@given(pipelines(), sizes())
def test_more_samples_micro_batches_and_replicas_take_longer(
    params: PerfParams, configuration: Sizes
) -> None:
    nodes, replicas, atomic_bsz, accum_steps, num_microbatches = configuration
    times = times_of(params, configuration)
    twice = nodes, replicas, 2 * atomic_bsz, accum_steps, num_microbatches
    assert times_of(params, twice).accum_time * SLACK >= times.accum_time
    # As large micro-batches, one more of them. Interleaved, K of them go round together, and one
    # more can fill a round, which may then be over sooner: of whole rounds there is one more.
    size, some, more = atomic_bsz // num_microbatches, num_microbatches, 1
    fewer = times
    if params.schedule == "interleaved":
        some, more = some * params.num_stages, params.num_stages
        fewer = times_of(params, (nodes, replicas, size * some, accum_steps, some))
    one_more = nodes, replicas, size * (some + more), accum_steps, some + more
    assert times_of(params, one_more).accum_time * SLACK >= fewer.accum_time
    more_replicas = nodes, replicas + 1, atomic_bsz, accum_steps, num_microbatches
    assert times_of(params, more_replicas).network_time * SLACK >= times.network_time


@examples(50, 200)
@given(perf_params(max_stages=1), sizes())
def test_every_extra_has_a_neutral_default(params: PerfParams, configuration: Sizes) -> None:
    spelled_out = params._replace(
        forward_alpha_shares=params.forward_shares,
        backward_alpha_shares=params.backward_shares,
        transfers_overlap=False,
        checkpoint="always",
        gradient_shares=(1.0,),
        shared_link=False,
    )
    expected = times_of(PerfParams(*params[:7]), configuration)
    assert times_of(spelled_out, configuration) == pytest.approx(expected, rel=1e-9)
    assert times_of(params, configuration) == pytest.approx(expected, rel=1e-9)
    # One stage of one micro-batch: Pollux's formula to the last digit.
    single = (*configuration[:4], 1)
    found = times_of(PerfParams(*params[:7]), single).accum_time
    assert found == params.alpha_c + params.beta_c * configuration[2]


@examples(50)
@given(pipelines(), st.lists(sizes(), min_size=1, max_size=6))
def test_arrays_give_what_scalars_give(params: PerfParams, configurations: list[Sizes]) -> None:
    columns = np.array(configurations).T
    together = GoodputFunction(params, (1.0, 1.0), 1).step_time(*columns)
    for index, configuration in enumerate(configurations):
        alone = times_of(params, configuration)
        found = [np.broadcast_to(value, len(configurations))[index] for value in together]
        np.testing.assert_allclose(found, alone, rtol=1e-12)


BYTES = st.floats(0.0, 1e6)


@examples(50, 200)
@given(
    st.lists(st.builds(Layer, *[st.just(1.0)] * 4, *[BYTES] * 5), min_size=1, max_size=6),
    BYTES,
    st.data(),
    st.sampled_from(CHECKPOINTS),
    st.floats(0.0, 64.0),
)
def test_memory_grows_with_micro_batches_as_the_schedule_has_it(
    layers: list[Layer],
    input_bytes: float,
    data: st.DataObject,
    checkpoint: Checkpoint,
    micro_bsz: float,
) -> None:
    num_stages = data.draw(st.integers(1, len(layers)))
    balance = [1] * (num_stages - 1) + [len(layers) - num_stages + 1]
    profile = LayerProfile.from_layers(layers, input_bytes)
    counts = np.arange(1, 13)
    held = {
        schedule: stage_memory(
            profile, balance, micro_bsz, counts, checkpoint=checkpoint, schedule=schedule
        )
        for schedule in ("gpipe", "1f1b")
    }
    for found in held.values():
        assert np.all(np.diff(found, axis=1) >= -1e-9 * found[:, 1:])
    flat = held["1f1b"][:, max(num_stages, 2) - 1 :]
    np.testing.assert_allclose(flat, flat[:, :1].repeat(flat.shape[1], 1), rtol=1e-12)
    if checkpoint != "except_last":
        # There 1F1B may hold two micro-batches' activations at once, GPipe never does.
        assert np.all(held["1f1b"] <= held["gpipe"] * SLACK)
