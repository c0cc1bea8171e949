"""Where the layers are cut, what the timers see, what the profile makes of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.partition.placement import choose_devices
from pipollux_hybrid.pipeline.engine import PipelineEngine
from pipollux_hybrid.pipeline.microbatch import microbatch_sizes
from pipollux_hybrid.telemetry.inheritance import fit
from pipollux_hybrid.telemetry.stage_timer import StageTimer, align, stage_times
from pipollux_hybrid.telemetry.step_profile import WARMUP, StepConfiguration, StepProfile
from pipollux_hybrid.telemetry.step_summary import fit_data
from pipollux_perfmodel import StageEvent
from tests.hybrid.clock import Clock, Work
from tests.hybrid.models import make_model


@pytest.mark.parametrize(
    ("checkpoint", "recomputed"), [("never", 0), ("except_last", 2), ("always", 3)]
)
def test_timers_see_each_stage_and_micro_batch(checkpoint: str, recomputed: int) -> None:
    """Stages of 4 and 8 ms forward, of twice that backward, and of what is recomputed there."""
    clock = Clock()
    module = nn.Sequential(*(Work(clock, 0.004) for _ in range(3)))
    devices = [torch.device("cpu")] * 2
    engine = PipelineEngine(module, [1, 2], devices, checkpoint)
    timer = StageTimer(engine.stages, devices, clock)
    num_recomputed = engine.checkpointed(3, training=True)
    assert num_recomputed == recomputed
    timer.start(num_recomputed)
    output = engine.run(torch.ones(3, 2), [1, 1, 1], training=True)
    handle = module[0].weight.register_post_accumulate_grad_hook(
        lambda _: timer.gradient_arrived(0)
    )
    output.sum().backward()
    handle.remove()
    recording = timer.stop()
    assert recording is not None
    assert recording.done()
    events = recording.events()
    assert all(b.start >= a.start for a, b in itertools.pairwise(events))
    assert max(event.end for event in events) == pytest.approx(clock.now)
    seen = {(e.stage, e.microbatch, e.phase) for e in events}
    assert seen == {(k, i, p) for k in (0, 1) for i in (0, 1, 2) for p in ("forward", "backward")}
    forward, backward = stage_times(events, 2, 3)
    again = recomputed / 3  # recomputation is part of the backward
    assert forward == pytest.approx([0.004, 0.008])
    assert backward == pytest.approx([0.008 + again * 0.004, 0.016 + again * 0.008])
    assert not timer.running


def test_micro_batches_are_those_of_chunk() -> None:
    for batch_size in range(1, 20):
        for num_microbatches in range(1, 9):
            chunks = torch.zeros(batch_size).chunk(num_microbatches)
            assert microbatch_sizes(batch_size, num_microbatches) == [len(c) for c in chunks]


def test_micro_batches_may_grow_on_a_live_pipeline() -> None:
    module = make_model("mlp")
    engine = PipelineEngine(module, [4, 5], [torch.device("cpu")] * 2, "always")
    inputs = torch.randn(8, 6, dtype=torch.float64)
    for num_microbatches in (1, 2, 8, 4):
        output = engine.run(inputs, microbatch_sizes(8, num_microbatches), training=True)
        assert isinstance(output, Tensor)
        output.sum().backward()


def test_every_backward_of_a_first_stage_is_timed_to_its_end() -> None:
    # Without recomputation its parameters receive one gradient, after all micro-batches.
    clock = Clock()
    module = nn.Sequential(Work(clock, 0.002))
    engine = PipelineEngine(module, [1], [torch.device("cpu")], "never")
    timer = StageTimer(engine.stages, [torch.device("cpu")], clock)
    timer.start(0)
    output = engine.run(torch.ones(4, 2), [1] * 4, training=True)
    output.sum().backward()
    recording = timer.stop()
    assert recording is not None
    backward = [event for event in recording.events() if event.phase == "backward"]
    assert sorted(event.microbatch for event in backward) == [0, 1, 2, 3]
    assert [event.end - event.start for event in backward] == pytest.approx([0.004] * 4)


def configuration(atomic_bsz: int = 8, num_replicas: int = 1) -> StepConfiguration:
    return StepConfiguration(2, num_replicas, num_replicas, atomic_bsz, 4)


def test_profile_is_the_median_without_the_first_steps() -> None:
    profile = StepProfile()
    for seconds in [9.0] * WARMUP + [0.1, 0.1, 0.1, 5.0, 0.1]:
        profile.add_step(configuration(), seconds, 0.02, optimizer=True)
    data = profile.fit_data(2)
    assert data is not None
    assert data.optim_step_time == [0.1]
    assert data.accum_step_time == [pytest.approx(0.08)]
    assert math.isnan(data.compute_time[0])
    assert data.forward_shares == pytest.approx((1 / 6, 1 / 6))
    assert profile.fit_data(3) is None, "other stages were never measured"


def test_profile_tells_accumulation_steps_from_optimizer_steps() -> None:
    """Steps of both kinds: each has its own time. Without accumulation, one stands for both."""
    profile = StepProfile()
    for _ in range(WARMUP + 4):
        profile.add_step(configuration(), 0.100, 0.0, optimizer=False)
        profile.add_step(configuration(), 0.108, 0.004, optimizer=True)
    for _ in range(WARMUP + 4):
        profile.add_step(configuration(16), 0.208, 0.004, optimizer=True)
    for restored in (profile, StepProfile()):
        restored.load_json(profile.to_json())
        data = restored.fit_data(2)
        assert data is not None
        assert data.accum_step_time == pytest.approx([0.100, 0.204])
        assert data.optim_step_time == pytest.approx([0.108, 0.208])


def test_what_stages_take_to_add_up_tied_gradients_is_no_step_and_no_network() -> None:
    """Of 108 ms 5 are the exchange and 3 the network's; a fit is told of each by itself."""
    profile = StepProfile()
    for size, seconds in ((8, 0.108), (16, 0.208)):
        for _ in range(WARMUP + 4):
            profile.add_step(configuration(size), seconds, 0.003, 0.005, optimizer=True)
    for restored in (profile, StepProfile()):
        restored.load_json(profile.to_json())
        data = restored.fit_data(2)
        assert data is not None
        assert data.accum_step_time == pytest.approx([0.1, 0.2])
        assert data.optim_step_time == pytest.approx([0.103, 0.203])
        assert fit(data, PipelineSchedule("1f1b")).tied_exchange == pytest.approx(0.005)
    rows, plain = profile.to_json(), StepProfile()
    plain.load_json([{k: x for k, x in row.items() if k != "exchange"} for row in rows])
    data = plain.fit_data(2)
    assert data is not None
    assert fit(data, PipelineSchedule("1f1b")).tied_exchange == 0.0


def test_stages_that_recompute_the_last_micro_batch_or_not_are_told_apart() -> None:
    """The mean backward of four lacks a quarter of a forward where the last one is spared."""
    profile = StepProfile()
    for _ in range(WARMUP + 3):
        profile.add_step(configuration(), 1.0, 0.0, optimizer=True)
    profile.add_stages(configuration(), (0.1, 0.1), (0.275, 0.3))
    data = profile.fit_data(2, ("except_last", "always"))
    assert data is not None
    assert data.checkpoint == ("except_last", "always")
    assert data.compute_time == pytest.approx([0.8])
    assert data.forward_shares == pytest.approx((0.125, 0.125))
    assert data.backward_shares == pytest.approx((0.375, 0.375))
    # What the list says of two stages it does not say of others.
    assert fit_data(profile.own(), 2, ("always", "never", "always")).checkpoint == "never"


def test_steps_that_measure_do_not_bend_the_profile() -> None:
    """Nine in ten steps measured something and took longer; where all do, they are the truth."""
    profile = StepProfile()
    for step in range(WARMUP + 40):
        disturbed = step % 10 != 0
        seconds = 0.1 + 0.007 * disturbed
        profile.add_step(configuration(), seconds, 0.0, optimizer=True, disturbed=disturbed)
    for _ in range(WARMUP + 9):
        profile.add_step(configuration(16), 0.3, 0.0, optimizer=True, disturbed=True)
    data = profile.fit_data(2)
    assert data is not None
    assert data.optim_step_time == pytest.approx([0.1, 0.3])


def test_profile_reads_the_first_release() -> None:
    row = {**configuration()._asdict(), "accum": [0.2, 0.2, 0.2], "optim": [0.3, 0.3, 0.3]}
    profile = StepProfile()
    profile.load_json([{**row, "forward": [], "backward": []}])
    data = profile.fit_data(2)
    assert data is not None
    assert (data.accum_step_time, data.optim_step_time) == ([0.2], [0.3])


def test_clocks_of_several_devices_are_brought_together() -> None:
    """A pipeline's events, each device's from an origin of its own: the schedule comes back."""
    devices = [torch.device("cuda", k) for k in range(3)]
    schedule = []
    for k in range(3):
        for i in range(4):
            # Stage 1 is the slowest, so what is handed to it waits, and stage 2 waits for it.
            start = {0: 1.0 * i, 1: 1.0 + 2.0 * i, 2: 3.0 + 2.0 * i}[k]
            schedule.append(StageEvent(k, i, "forward", start, start + (1.0, 2.0, 0.5)[k]))
            start = 20.0 - 3 * k + 4.0 * i
            schedule.append(StageEvent(k, 3 - i, "backward", start, start + 1.0))
    clocks = (0.0, 1234.5, -77.0)
    apart = [
        e._replace(start=e.start + clocks[e.stage], end=e.end + clocks[e.stage]) for e in schedule
    ]
    for ours, true in zip(align(apart, devices), schedule, strict=True):
        assert (ours.start, ours.end) == pytest.approx((true.start, true.end))


def test_profile_outlives_a_checkpoint_and_knows_stages() -> None:
    profile = StepProfile()
    for replicas in (1, 2):
        for _ in range(WARMUP + 3):
            profile.add_step(configuration(num_replicas=replicas), 0.2, 0.0, optimizer=True)
        profile.add_stages(configuration(num_replicas=replicas), [0.01, 0.03], [0.02, 0.04])
    restored = StepProfile()
    restored.load_json(profile.to_json())
    data = restored.fit_data(2)
    assert data == profile.fit_data(2)
    assert data is not None
    assert data.num_replicas == [1, 2]
    assert data.compute_time == pytest.approx([0.1, 0.1])
    assert data.forward_shares == pytest.approx((0.1, 0.3))
    assert data.backward_shares == pytest.approx((0.2, 0.4))
    assert restored.max_replicas == 2


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_profile_tells_a_recomputed_micro_batch_from_the_mean(num_microbatches: int) -> None:
    # Under except_last all but the last micro-batch take 0.06 back, 0.02 of it recomputation.
    recomputed, forward = 0.06, 0.02
    mean = recomputed - forward / num_microbatches
    where = configuration()._replace(num_stages=1, num_microbatches=num_microbatches)
    profile = StepProfile()
    for _ in range(WARMUP + 3):
        profile.add_step(where, 0.2, 0.0, optimizer=True)
    profile.add_stages(where, [forward], [mean])
    data = profile.fit_data(1, "except_last")
    assert data is not None
    assert data.checkpoint == "except_last"
    assert data.compute_time == pytest.approx([recomputed + forward])
    assert data.backward_shares == pytest.approx((0.75,))


@pytest.mark.parametrize(
    ("processes", "place"), [(1, "LOCAL_RANK=1"), (2, "replica 1 there, LOCAL_RANK 2 to 3")]
)
def test_too_few_devices_are_told_by_their_processes(
    monkeypatch: pytest.MonkeyPatch, processes: int, place: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    env = JobEnvironment(local_rank=1, processes_per_replica=processes)
    with pytest.raises(ConfigurationError, match=f"the 3 CUDA devices of this node .{place}. give"):
        choose_devices(env, 2, None)
