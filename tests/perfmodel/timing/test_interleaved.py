"""Interleaved 1F1B, against torch's own order, a simulation by events, and the papers' numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel import (
    Layer,
    LayerProfile,
    PerfParams,
    Schedule,
    ideal_schedule,
    interleaved_memory,
    perf_params_from_json,
    perf_params_to_json,
    plan_stages,
    stage_memory,
)
from pipollux_perfmodel.timing.device_order import device_order
from pipollux_perfmodel.timing.gpipe import StageTimes
from pipollux_perfmodel.timing.interleaved import final_times
from pipollux_perfmodel.timing.params import CHECKPOINTS, Checkpoint, check_params, even_shares
from pipollux_perfmodel.timing.step_time import pipeline_time
from tests.extent import examples, first_points, grid
from tests.perfmodel.simulator import Case, Result, simulate


def is_interleaved(num_devices: int, num_microbatches: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_devices) == 0


def torchs_order(device: int, num_devices: int, several: int, num: int) -> list[tuple[Any, ...]]:
    """The order that torch's schedule makes for itself; its constructor asks for processes."""
    from torch.distributed.pipelining import schedules

    made = object.__new__(schedules.ScheduleInterleaved1F1B)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = num_devices, several, num
    made.number_of_rounds = max(1, num // num_devices)
    made.microbatches_per_round = num // made.number_of_rounds
    forward = schedules._ComputationType.FORWARD
    return [
        (
            "forward" if action.computation_type == forward else "backward",
            action.stage_index,
            action.microbatch_index,
        )
        for action in made._calculate_single_rank_operations(device)
        if action is not None
    ]


@pytest.mark.parametrize(
    ("devices", "stages", "microbatches"), first_points(1, [(4, 3, 12), (5, 4, 20)])
)
def test_devices_work_in_torchs_order(devices: int, stages: int, microbatches: int) -> None:
    """On every number up to these."""
    axes = (range(1, most + 1) for most in (devices, stages, microbatches))
    for num_devices, several, num in itertools.product(*axes):
        if is_interleaved(num_devices, num):
            for device in range(num_devices):
                ours = device_order("interleaved", device, num_devices, num_devices * several, num)
                assert ours == torchs_order(device, num_devices, several, num)


seconds = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A pipeline and its number of devices."""
    num_devices, several = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_stages, num = num_devices * several, draw(st.integers(1, 12))

    def drawn(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(seconds, min_size=count, max_size=count)))

    backward = drawn(num_stages)
    last = draw(st.sampled_from([backward, tuple(0.5 * g for g in backward)]))
    times = drawn(num_stages), backward, last, drawn(num_stages - 1)
    return Case(*times, num, draw(st.booleans())), num_devices


def line_of(case: Case, num_devices: int) -> Schedule:
    return Schedule(
        "interleaved",
        case.forward,
        case.backward,
        case.num_microbatches,
        case.last_backward,
        case.transfer,
        case.overlapping,
        len(case.forward) // num_devices,
    )


@examples(150, 750)
@given(cases())
def test_time_lines_are_as_simulated(drawn: tuple[Case, int]) -> None:
    case, num_devices = drawn
    line, played = line_of(case, num_devices), simulate(case, "interleaved", num_devices)
    events = line.events + line.transfers
    found = {(e.phase, e.stage, e.microbatch): (e.start, e.end) for e in events}
    assert found.keys() == played.spans.keys()
    expected = np.array([played.spans[name] for name in found])
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-9, atol=1e-12)
    assert line.final_times == pytest.approx(played.final)
    assert line.max_in_flight == played.most_held


@pytest.mark.parametrize(
    ("num_devices", "several", "rounds"), grid([1, 2, 4, 8], [1, 2, 4], [1, 2, 8])
)
def test_the_bubble_of_equal_stages_is_the_papers(
    num_devices: int, several: int, rounds: int
) -> None:
    """SC'21, section 2.2.2: (p - 1)/(v·m) of the ideal, where p divides m."""
    num, num_stages = num_devices * rounds, num_devices * several
    line = Schedule(
        "interleaved",
        (1 / several,) * num_stages,
        (2 / several,) * num_stages,
        num,
        stages_per_device=several,
    )
    bubble = (num_devices - 1) / (several * num)
    assert line.makespan / (3 * num) - 1 == pytest.approx(bubble, abs=1e-9)
    assert line.bubble_fraction == pytest.approx(1 - 1 / (1 + bubble), abs=1e-9)
    assert line.num_devices == num_devices


def kept(case: Case, played: Result, device: int, num_devices: int, of: dict[str, Any]) -> float:
    """The most bytes per sample on a device at any time of a simulation."""
    last = case.num_microbatches - 1
    stages = range(device, len(case.forward), num_devices)
    here = [name for name in played.spans if name[1] in stages and "transfer" not in name[0]]
    most = 0.0
    for phase, stage, i in here:
        now, total = played.spans[phase, stage, i][0], 0.0
        for q, j in itertools.product(stages, range(case.num_microbatches)):
            again = of["checkpoint"] == "always" or (of["checkpoint"] == "except_last" and j < last)
            begun, over = played.spans["forward", q, j][0], played.spans["backward", q, j][1]
            if begun <= now < over:
                total += of["inputs"][q] if again else of["activations"][q]
            if again and (phase, stage, i) == ("backward", q, j):
                total += of["activations"][q]
        most = max(most, total)
    return most


@examples(60, 200)
@given(cases(), st.data(), st.sampled_from(CHECKPOINTS))
def test_memory_is_what_is_there_at_the_worst_time(
    drawn: tuple[Case, int], data: st.DataObject, checkpoint: Checkpoint
) -> None:
    case, num_devices = drawn
    num_stages = len(case.forward)
    # At every moment something goes on, so that what is there is told by the clock.
    case = case._replace(forward=(1.0,) * num_stages, backward=(2.0,) * num_stages)
    case = case._replace(last_backward=case.backward)
    sizes = st.integers(0, 50).map(float)
    layers = [Layer(0, 1, 0, 2, *(data.draw(sizes) for _ in range(5))) for _ in range(num_stages)]
    profile = LayerProfile.from_layers(layers, data.draw(sizes))
    played = simulate(case, "interleaved", num_devices)
    of = {
        "checkpoint": checkpoint,
        "inputs": profile.boundary_bytes().tolist(),
        "activations": [layer.activation_bytes for layer in layers],
    }
    found = interleaved_memory(
        profile, [1] * num_stages, num_devices, [1, 3], case.num_microbatches, checkpoint=checkpoint
    )
    assert found.shape == (num_devices, 2)
    for device in range(num_devices):
        mine = layers[device::num_devices]
        state = sum(2 * x.parameter_bytes + x.copy_bytes + x.optimizer_bytes for x in mine)
        per_sample = kept(case, played, device, num_devices, of)
        assert found[device].tolist() == [state + per_sample, state + 3 * per_sample]


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("several", [1, 2, 4])
def test_the_first_device_holds_as_much_more_as_the_paper_says(
    num_devices: int, several: int
) -> None:
    """Korthikanti et al., MLSys'23: 1 + (p - 1)/(p·m) times the activations of 1F1B."""
    profile = LayerProfile((Layer(0, 1, 0, 2, activation_bytes=1),) * (num_devices * several))
    plain = stage_memory(profile, [several] * num_devices, 1.0, 32, schedule="1f1b")
    balance = [1] * (num_devices * several)
    found = interleaved_memory(profile, balance, num_devices, 1.0, 32)
    assert found[0] / plain[0] == pytest.approx(1 + (num_devices - 1) / (num_devices * several))


def test_the_ideal_of_what_was_measured() -> None:
    """By device, as it is measured; of slow chunks, only what they take together is known."""
    line = Schedule("interleaved", (1.0,) * 4, (2.0,) * 4, 6, stages_per_device=2)
    events = [
        e._replace(stage=e.stage % 2, start=2 * e.start, end=2 * e.start + e.end - e.start)
        for e in line.events
    ]
    found = ideal_schedule("interleaved", events, 2)
    assert found is not None
    assert found.makespan == pytest.approx(line.makespan)
    assert found.bubble_fraction == pytest.approx(line.bubble_fraction)


@st.composite
def stages_of_chunks(draw: st.DrawFn) -> tuple[StageTimes, int, int, bool]:
    """Times of stages, chunks of each, micro-batches, and whether copies overlap."""
    num_stages, num = draw(st.integers(1, 4)), draw(st.integers(1, 12))

    def drawn(count: int) -> list[Any]:
        return draw(st.lists(seconds, min_size=count, max_size=count))

    backward = drawn(num_stages)
    last = draw(st.sampled_from([backward, [0.5 * g for g in backward]]))
    times = StageTimes(drawn(num_stages), backward, last, drawn(num_stages - 1))
    return times, draw(st.integers(1, 3)), num, draw(st.booleans())


@examples(100, 500)
@given(stages_of_chunks())
def test_step_times_are_as_simulated(drawn: tuple[StageTimes, int, int, bool]) -> None:
    times, several, num, overlapping = drawn
    num_stages = len(times.forward)
    around = float(np.mean(times.transfer)) if times.transfer else 0.0
    copies = [*times.transfer, around] * several
    case = Case(
        *(tuple(x / several for x in part) * several for part in times[:3]),
        tuple(copies[: num_stages * several - 1]),
        num,
        overlapping,
    )
    played = simulate(case, "interleaved", num_stages).final[:num_stages]
    found = final_times(times, several, num, overlapping)
    np.testing.assert_allclose(found, played, rtol=1e-9, atol=1e-12)


def test_parameters_know_the_schedule() -> None:
    """M + (K - 1)/V slots of equal stages, also where the order is not played to its end."""
    plain = PerfParams(0.0, 3.0, 0.1, 0.1, 0.1, 0.1, 1.5, *even_shares(4), schedule="1f1b")
    chunked = plain._replace(schedule="interleaved", chunks_per_stage=2)
    counts = np.array([4, 8, 64, 4, 512])
    slots = counts + 3 / 2
    assert pipeline_time(chunked, 1.0, counts) == pytest.approx(slots * 3 / 4)
    assert pipeline_time(plain, 1.0, counts) == pytest.approx((counts + 3) * 3 / 4)
    turns = chunked._replace(overlap=0.0)
    assert pipeline_time(turns, 1.0, counts) == pytest.approx(counts * 3.0)
    assert perf_params_from_json(perf_params_to_json(chunked)) == chunked
    for wrong in ({"chunks_per_stage": 0}, {"schedule": "1f1b"}):
        with pytest.raises(ValueError, match="chunks_per_stage is"):
            check_params(chunked._replace(**wrong))


def test_cuts_are_priced_as_one_forward_one_backward() -> None:
    """Stages of several chunks are no consecutive layers, which a cut of other K is made of."""
    profile = LayerProfile((Layer(0, 1, 0, 2),) * 8)
    base = PerfParams(0.0, 3.0, 0.1, 0.1, 0.1, 0.1, 1.5, *even_shares(2))
    base = base._replace(schedule="interleaved", chunks_per_stage=2)
    plan = plan_stages(profile, 4, 8, base, micro_bsz=4)
    assert (plan.schedule, plan.perf_params.chunks_per_stage) == ("1f1b", 1)


def test_what_cannot_be_interleaved_is_refused_by_name() -> None:
    ones = (1.0,) * 4
    with pytest.raises(
        ValueError, match="stages_per_device is 3; give a number that divides the 4"
    ):
        Schedule("interleaved", ones, ones, 4, stages_per_device=3)
    with pytest.raises(ValueError, match="stages_per_device is 2 with kind '1f1b'; give 1"):
        Schedule("1f1b", ones, ones, 4, stages_per_device=2)
    profile = LayerProfile((Layer(0, 1, 0, 2),) * 4)
    calls: list[tuple[tuple[Any, ...], str]] = [
        (([1] * 4, 3, 1.0, 4), "num_devices is 3; give a number that divides the 4 stages"),
        (([1] * 4, 2, 1.0, 0), "num_microbatches is 0; give at least one"),
        (([1] * 4, 2, -1.0, 4), "micro_bsz is -1"),
    ]
    for arguments, message in calls:
        with pytest.raises(ValueError, match=message):
            interleaved_memory(profile, *arguments)
    unknown: Any = "some"
    with pytest.raises(ValueError, match="checkpoint is 'some'"):
        interleaved_memory(profile, [1] * 4, 2, 1.0, 4, checkpoint=unknown)
