"""Pipeline jobs of the simulator: true times by hand, memory, and models that come to know them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from pipollux_perfmodel import LayerProfile, StagePlan
from pipollux_perfmodel.partitioning.layer_profile import Layer
from pipollux_perfmodel.timing.step_time import step_time
from pipollux_simulator import (
    A100_40G,
    DEVICES,
    GPT_MODELS,
    V100_16G,
    PipelineApplication,
    PipelineJob,
    PipelineJobModel,
    RunningJob,
    SiaPipelineModel,
)
from pipollux_simulator.applications.gpt import gpt_profile
from pipollux_simulator.applications.pipeline_job import UNKNOWN, price
from pipollux_simulator.applications.pipeline_truth import HANDOVER, PipelineTruth
from tests.extent import first

PLACEMENTS = [(1,), (2,), (4,), (1, 1), (2, 2), (4, 4), (1, 1, 1), (4, 4, 4), (2, 2, 2, 2)]


def truth_of(layers: list[Layer], balance: tuple[int, ...]) -> PipelineTruth:
    """Return the truth of a hand-made model without deviations; copies take 1e-5 s a byte."""
    profile = LayerProfile.from_layers(layers)
    link = dataclasses.replace(A100_40G.link, latency=0.0, bandwidth=1e5)
    network = dataclasses.replace(A100_40G.network, latency=0.0, bandwidth=1e3)
    device = dataclasses.replace(A100_40G, link=link, network=network, memory_bandwidth=1e30)
    plan = StagePlan(balance, price(profile, balance, device, UNKNOWN), profile)
    return PipelineTruth("by-hand", plan, device, deviates=False)


def test_an_iteration_takes_what_the_schedule_takes_by_hand() -> None:
    layer = Layer(0.0, 1.0, 0.0, 2.0, parameter_bytes=1000.0, output_bytes=0.0)
    truth = truth_of([layer, layer], (1, 1))
    times = truth.step_times(RunningJob((1,), num_stages=2, num_microbatches=3, atomic_bsz=6))
    # b = 2. Forwards: (2 stages + 2 more micro-batches) · 2 s. Backwards, the last micro-batch's
    # (first to come back) without recomputation: 4 s in stage 1; then 6 s each for the two others;
    # stage 0 has the last of them 6 s after stage 1. A handover a micro-batch in stage 1.
    forward = 4 * 2.0
    backward = 4.0 + 6.0 + 6.0 + 6.0
    assert times.accum_step == pytest.approx(forward + backward + 6 * HANDOVER, abs=1e-3)
    assert times.accum_step >= forward + backward
    assert times.optim_step == pytest.approx(times.accum_step)


def test_all_reduces_hide_behind_the_backward_of_earlier_stages() -> None:
    layer = Layer(0.0, 1.0, 0.0, 2.0, parameter_bytes=1000.0)
    truth = truth_of([layer, layer], (1, 1))
    one_node = RunningJob((1,), num_stages=2, num_microbatches=1, atomic_bsz=4)
    two_nodes = dataclasses.replace(one_node, placement=(1, 1))
    # A ring of two: 2 · (1/2) · 1000 bytes at 1000 bytes/s. Stage 1's is done long before stage 0
    # has gone back (8 s), so only stage 0's shows.
    assert truth.all_reduces((1, 1)) == pytest.approx((1.0, 1.0))
    one, two = truth.step_times(one_node), truth.step_times(two_nodes)
    assert two.optim_step - one.optim_step == pytest.approx(1.0, rel=1e-9)
    assert two.accum_step == one.accum_step


@pytest.mark.parametrize("name", list(GPT_MODELS))
@pytest.mark.parametrize(("micro_bsz", "num_microbatches"), [(1, 1), (1, 8), (2, 5)])
def test_without_handover_the_truth_is_the_closed_form(
    name: str, micro_bsz: int, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipollux_simulator.applications.pipeline_truth.HANDOVER", 0.0)
    job = PipelineJob(GPT_MODELS[name], (A100_40G,))
    ways = [(k, plan) for k in job.plans(A100_40G) for plan in job.ways(k, A100_40G)]
    for num_stages, plan in ways:
        truth = PipelineTruth(name, plan, A100_40G, deviates=False)
        sizes = 1, 1, micro_bsz * num_microbatches, 0, num_microbatches
        expected = step_time(plan.perf_params, *map(np.float64, sizes))
        schedule = truth.schedule(micro_bsz, num_microbatches)
        assert schedule.num_stages == num_stages
        assert schedule.makespan == pytest.approx(float(expected.accum_time), rel=1e-9)


def test_sizes_are_those_of_the_paper() -> None:
    # GPT-3's table 2.1; ours have a head of its own, 50257 · h parameters more.
    for name, billions in {
        "gpt-1.3b": 1.3,
        "gpt-2.7b": 2.7,
        "gpt-6.7b": 6.7,
        "gpt-13b": 13,
    }.items():
        model = GPT_MODELS[name]
        tied = model.num_parameters - 50257 * model.hidden
        assert tied / 1e9 == pytest.approx(billions, rel=0.02)
        profile = gpt_profile(model, A100_40G)
        held = 2 * profile.column("parameter_bytes") + profile.column("optimizer_bytes")
        assert held.sum() == 16 * model.num_parameters


def test_compute_is_within_the_published_rates() -> None:
    # 6·N flop per token (Kaplan et al., 2020) and the attention's; the rate is the device's.
    model = GPT_MODELS["gpt-6.7b"]
    profile = gpt_profile(model, A100_40G)
    seconds = profile.column("forward_beta").sum() + profile.column("backward_beta").sum()
    flops_per_token = seconds * A100_40G.flops / 2048
    assert 1.0 < flops_per_token / (6 * model.num_parameters) < 1.2


@pytest.mark.parametrize(
    ("name", "on_a100", "on_v100"),
    [
        ("gpt-1.3b", [1, 2, 4, 8], [2, 4, 8]),
        ("gpt-2.7b", [2, 4, 8], [4, 8]),
        ("gpt-6.7b", [4, 8], []),
        ("gpt-13b", [8], []),
    ],
)
def test_memory_forbids_few_stages(name: str, on_a100: list[int], on_v100: list[int]) -> None:
    job = PipelineJob(GPT_MODELS[name], DEVICES)
    assert list(job.plans(A100_40G)) == on_a100
    assert list(job.plans(V100_16G)) == on_v100
    for num_stages in {1, 2, 4, 8} - set(on_a100):
        # 16 bytes a parameter, spread as evenly as can be, are too much already.
        even = 16 * job.model.num_parameters / num_stages
        assert even > 0.94 * A100_40G.memory_bytes
        with pytest.raises(ValueError, match=rf"num_stages: {name} cannot run in {num_stages} "):
            job.plan(num_stages, A100_40G)


def test_a_job_recomputes_only_what_does_not_fit() -> None:
    job = PipelineJob(GPT_MODELS["gpt-2.7b"], (A100_40G,))
    modes = {
        (stages, count): job.way(
            RunningJob((1,), num_stages=stages, num_microbatches=count, atomic_bsz=count)
        ).perf_params.checkpoint
        for stages in (2, 4)
        for count in (4, 8)
    }
    assert modes[2, 8] == "except_last"
    assert modes[2, 4] == modes[4, 4] == modes[4, 8] == "never"
    # 16 blocks of 34·2048·2560 bytes keep 2.9 GB a sample: 4 fit beside 21 GB of state, 8 do not.
    keeping, recomputing = job.ways(2, A100_40G)
    assert keeping.memory(1.0, 4).max() < A100_40G.memory_limit < keeping.memory(1.0, 8).max()
    assert recomputing.memory(1.0, 8).max() < A100_40G.memory_limit
    assert recomputing.perf_params.beta_c == pytest.approx(
        4 / 3 * keeping.perf_params.beta_c, rel=0.05
    )


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpt-13b does not fit in 1 to 8 stages on v100-16g"):
        PipelineApplication("gpt-13b", (V100_16G,))
    with pytest.raises(ValueError, match=r"gpt-13b does not fit in 4 stages on a100-40g"):
        PipelineApplication("gpt-13b", fixed_stages=4)
    with pytest.raises(ValueError, match=r"model: 'gpt-5b' is not known; give one of gpt-1.3b"):
        PipelineApplication("gpt-5b")


def test_batches_that_do_not_fit_are_refused() -> None:
    application = PipelineApplication("gpt-1.3b")
    with pytest.raises(ValueError, match=r"atomic_bsz: 64 samples in 1 micro-batches need"):
        application.step_times(RunningJob((1,), num_microbatches=1, atomic_bsz=64))
    with pytest.raises(ValueError, match=r"gpu_type: 't4' is not one of a100-40g"):
        application.step_times(RunningJob((1,), num_microbatches=1, atomic_bsz=1, gpu_type="t4"))


@pytest.mark.parametrize("name", first(1, list(GPT_MODELS)))
def test_what_a_model_chooses_can_run(name: str) -> None:
    application = PipelineApplication(name, DEVICES)
    model = application.new_model()
    for shape in model.shapes():
        for placement in PLACEMENTS:
            running = model.configure(shape, placement, shape.gpu_type or "")
            times = application.step_times(running)
            assert 0 < times.accum_step <= times.optim_step
            assert application.init_batch_size <= running.batch_size <= application.max_batch_size
            assert model.goodput(running) > 0


@pytest.mark.parametrize("batch_size", [None, 48, 1024])
def test_the_most_replicas_of_a_shape_can_run(batch_size: int | None) -> None:
    application = PipelineApplication("gpt-6.7b")
    model = application.new_model(batch_size)
    for shape in model.shapes():
        most = shape.max_replicas
        assert most == (batch_size or 1024) // 4
        running = model.configure(shape, (1,) * most)
        assert running.atomic_bsz >= running.num_microbatches
        assert application.step_times(running).accum_step > 0
        assert shape.speedup_fn(most, most) > 0
        with pytest.raises(ValueError, match=r"placement: .* leaves gpt-6.7b no batch size"):
            PipelineApplication("gpt-6.7b").new_model().configure(shape, (1,) * 2000)


def test_truth_is_the_same_again_and_differs_by_seed_and_configuration() -> None:
    running = RunningJob((2, 1), num_stages=4, num_microbatches=4, atomic_bsz=16)
    times = {
        seed: PipelineApplication("gpt-1.3b", seed=seed).step_times(running) for seed in (0, 1)
    }
    assert PipelineApplication("gpt-1.3b", seed=0).step_times(running) == times[0] != times[1]
    turned = dataclasses.replace(running, placement=(1, 2))
    assert PipelineApplication("gpt-1.3b", seed=0).step_times(turned) == times[0]
    assert times[0].accum_step / times[1].accum_step == pytest.approx(1.0, abs=0.4)


def test_the_noise_scale_grows_and_progress_counts_iterations() -> None:
    application = PipelineApplication("gpt-2.7b")
    noise = [application.gradients(64, epoch) for epoch in range(application.max_epochs)]
    scales = [var / sqr for sqr, var in noise]
    assert all(a < b for a, b in itertools.pairwise(scales))
    # Kaplan et al., 2020: L = (N_c/N)^0.077 + (S_c/S)^0.76, and 2.1e8 tokens / L^(1/0.21); midway
    # in the last of 20 epochs of 4000 iterations, which begin at step 500.
    size = GPT_MODELS["gpt-2.7b"].num_parameters
    loss = (6.5e13 / size) ** 0.077 + (2.1e3 / (500 + 3900)) ** 0.76
    assert scales[-1] == pytest.approx(2.1e8 / loss ** (1 / 0.21) / 2048 / 32)
    assert 1.0 < scales[0] < 10.0 < scales[-1]
    last = application.completion_epoch(64) + 1
    assert last == application.max_epochs
    assert application.progress(0) == 0.0
    assert application.progress(last) == GPT_MODELS["gpt-2.7b"].iterations


def _error(application: PipelineApplication, model: PipelineJobModel, running: RunningJob) -> float:
    """Return the relative error of a predicted goodput."""
    times = application.step_times(running)
    seconds = times.optim_step + running.accum_steps * times.accum_step
    sqr, var = application.gradients(running.batch_size, 5)
    scale = running.batch_size / application.init_batch_size
    efficiency = (var + sqr) / (var / scale + sqr) / scale
    return abs(model.goodput(running) / (running.batch_size / seconds * efficiency) - 1)


@pytest.mark.parametrize("name", first(1, ["gpt-1.3b", "gpt-6.7b"]))
@pytest.mark.parametrize("seed", first(1, [1, 2, 3]))
def test_predictions_come_close_to_the_truth(name: str, seed: int) -> None:
    application = PipelineApplication(name, seed=seed)
    model = PipelineJobModel(application.job)
    shapes = model.shapes()
    for shape, placement in itertools.product(shapes, PLACEMENTS):
        running = model.configure(shape, placement)
        times = application.step_times(running)
        model.observe(running, times, application.gradients(running.batch_size, 5))
    assert model.max_profiled_replicas == 12
    # All seen once: what is chosen now, never run so, is within what varies from run to run.
    after = [
        _error(application, model, model.configure(shape, placement))
        for shape in shapes
        for placement in [*PLACEMENTS, (3,), (3, 3), (4, 4, 2), (4, 4, 4, 4)]
    ]
    assert max(after) < 0.12
    assert float(np.mean(after)) < 0.04


def test_what_one_cut_showed_corrects_the_others() -> None:
    application = PipelineApplication("gpt-2.7b", seed=7)
    slow = 1.5
    model = PipelineJobModel(application.job)
    before = {s.num_stages: model.goodput(model.configure(s, (1,))) for s in model.shapes()}
    first = model.shapes()[0]
    running = model.configure(first, (1,))
    predicted = running.batch_size / model.goodput(running) / (running.accum_steps + 1)
    times = application.step_times(running)
    times = times._replace(accum_step=predicted * slow, optim_step=predicted * slow)
    model.observe(running, times, application.gradients(32, 0))
    for shape in model.shapes():
        after = model.configure(shape, (1,))
        if after.batch_size == running.batch_size:
            ratio = before[shape.num_stages] / model.goodput(after)
            assert ratio == pytest.approx(slow, rel=0.15)


def test_an_unseen_network_is_free_and_a_seen_one_is_not() -> None:
    application = PipelineApplication("gpt-1.3b", (V100_16G,), seed=0)
    model = PipelineJobModel(application.job)
    shape = model.shapes()[0]
    one = model.configure(shape, (1,))
    model.observe(one, application.step_times(one), application.gradients(32, 5))
    optimistic = model.shapes()[0].speedup_fn(4, 4)
    across = model.configure(shape, (1, 1))
    model.observe(across, application.step_times(across), application.gradients(32, 5))
    assert model.shapes()[0].speedup_fn(4, 4) < 0.95 * optimistic


def test_shapes_have_one_base_and_whole_replicas() -> None:
    model = PipelineApplication("gpt-1.3b", DEVICES).new_model()
    shapes = model.shapes()
    assert [(s.gpu_type, s.num_stages) for s in shapes] == [
        *(("a100-40g", k) for k in (1, 2, 4, 8)),
        *(("v100-16g", k) for k in (2, 4, 8)),
    ]
    assert shapes[0].speedup_fn(1, 1) == pytest.approx(1.0)
    for shape in shapes:
        assert shape.resources == {"slots": shape.num_stages}
        running = model.configure(shape, (1,), shape.gpu_type or "")
        worth = model.goodput(running) / model.base_goodput()
        assert shape.speedup_fn(1, 1) == pytest.approx(worth)
    assert shapes[3].speedup_fn(1, 1) > 2.0
    assert shapes[1].speedup_fn(1, 1) > 2.0 * shapes[4].speedup_fn(1, 1)


def test_fixed_stages_leave_one_shape() -> None:
    application = PipelineApplication("gpt-1.3b", fixed_stages=4)
    assert [shape.num_stages for shape in application.new_model().shapes()] == [4]
    with pytest.raises(ValueError, match=r"cannot run in 2 stages on a100-40g; give one of \[4\]"):
        application.step_times(RunningJob((1,), num_stages=2, num_microbatches=4, atomic_bsz=8))


def test_a_fixed_batch_size_is_kept() -> None:
    model = PipelineApplication("gpt-1.3b").new_model(128)
    shape = model.shapes()[0]
    for placement in [(1,), (2,), (3,), (4, 4)]:
        running = model.configure(shape, placement)
        assert 128 <= running.batch_size < 128 * 1.1
    assert shape.speedup_fn(1, 1) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"batch_size: 16 of gpt-1.3b must be between 32 and 512"):
        PipelineApplication("gpt-1.3b").new_model(16)


def test_what_was_seen_already_changes_nothing() -> None:
    application = PipelineApplication("gpt-2.7b")
    model = application.new_model()
    running = model.configure(model.shapes()[0], (1,))
    times, gradients = application.step_times(running), application.gradients(32, 0)
    model.observe(running, times, gradients)
    shapes = model.shapes()
    model.observe(running, times, gradients)
    assert model.shapes() is shapes


def test_sias_model_is_its_formula() -> None:
    application = PipelineApplication("gpt-6.7b", new_model=SiaPipelineModel)
    model = application.new_model()
    (shape,) = model.shapes()
    assert shape.num_stages == 4
    assert shape.max_replicas == 1024 // 48
    running = model.configure(shape, (2, 1))
    assert (running.num_microbatches, running.batch_size) == (48, 3 * 48)
    forward = gpt_profile(GPT_MODELS["gpt-6.7b"], A100_40G).forward_seconds(1.0).sum() / 4
    # Before anything was seen: T_net = 0, and noise as large as the gradient.
    efficiency = 2 / (1 / 3 + 1) / 3
    expected = 3 * 48 / (3 * (3 + 48) * forward) * efficiency
    assert model.goodput(running) == pytest.approx(expected, rel=1e-6)
    assert shape.speedup_fn(2, 3) == pytest.approx(expected / model.base_goodput(), rel=1e-6)
    assert shape.speedup_fn(np.array([0, 1, 3]), np.array([0, 1, 22])).tolist() == [0.0, 1.0, 0.0]
    times, gradients = application.step_times(running), application.gradients(144, 5)
    model.observe(running, times, gradients)
    sqr, var = gradients
    goodput = 144 / times.optim_step * (var + sqr) / (var / 3 + sqr) / 3
    assert model.goodput(running) == pytest.approx(goodput, rel=0.02)
    with pytest.raises(ValueError, match=r"batch_size: 96 cannot be kept by Sia's"):
        application.new_model(96)


def test_requests_are_of_users_who_know_their_job() -> None:
    application = PipelineApplication("gpt-6.7b")
    rng = np.random.default_rng(0)
    allowed = set(application.configurations())
    assert {application.requests(rng) for _ in range(20)} <= allowed
    for num_replicas, batch_size in allowed:
        assert 1 < num_replicas * 4 <= 32
        assert application.init_batch_size < batch_size <= application.max_batch_size
