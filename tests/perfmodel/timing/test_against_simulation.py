"""The closed forms, the step time and the time lines, against a simulation by events."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import ArrayLike

from pipollux_perfmodel.timing.gpipe import (
    StageTimes,
    final_times,
    forward_span,
    network_end,
    serial_final_times,
)
from pipollux_perfmodel.timing.params import (
    CHECKPOINTS,
    CUT_SCHEDULES,
    PerfParams,
    ScheduleKind,
    check_params,
)
from pipollux_perfmodel.timing.step_time import step_time
from pipollux_perfmodel.timing.timeline import Schedule, bubble_fraction
from tests.extent import first, first_points
from tests.perfmodel.simulator import Case, Kind, last_all_reduce, simulate

SERIAL: dict[ScheduleKind, Kind] = {"gpipe": "serial", "1f1b": "serial_1f1b"}


def close(found: ArrayLike, expected: ArrayLike, case: object) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    near = np.abs(found - expected) <= 1e-9 * np.abs(expected) + 1e-12
    assert near.all(), f"{found} is not {expected} for {case}"


def draw_times(rng: np.random.Generator, num: int) -> tuple[float, ...]:
    """All different; or whole numbers, many alike and some zero; or all alike."""
    kind = rng.integers(3)
    if kind == 0:
        return tuple(rng.uniform(0, 1, num).tolist())
    if kind == 1:
        return tuple(rng.integers(0, 4, num).astype(float).tolist())
    return (float(rng.uniform(0.1, 1)),) * num


def draw_case(rng: np.random.Generator) -> Case:
    num_stages, num_microbatches = int(rng.integers(1, 9)), int(rng.integers(1, 13))
    forward, backward = draw_times(rng, num_stages), draw_times(rng, num_stages)
    last_backward = [
        backward,
        tuple(max(g - f, 0.0) for f, g in zip(forward, backward, strict=True)),
        tuple(float(g * rng.random()) for g in backward),
    ][rng.integers(3)]
    transfer = draw_times(rng, num_stages - 1)
    if rng.random() < 0.2:
        transfer = (0.0,) * (num_stages - 1)
    overlapping = bool(rng.random() < 0.5)
    return Case(forward, backward, last_backward, transfer, num_microbatches, overlapping)


def stage_times(case: Case) -> StageTimes:
    return StageTimes(case.forward, case.backward, case.last_backward, case.transfer)


def schedule(case: Case, kind: ScheduleKind) -> Schedule:
    return Schedule(
        kind,
        case.forward,
        case.backward,
        case.num_microbatches,
        case.last_backward,
        case.transfer,
        case.overlapping,
    )


@pytest.mark.parametrize(("seed", "count"), first_points(1, [(0, 250), (1, 1000), (2, 1000)]))
def test_gpipe_and_its_all_reduces_take_as_long_as_they_are_simulated_to(
    seed: int, count: int
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        case = draw_case(rng)
        times, num = stage_times(case), case.num_microbatches
        played = simulate(case)
        close(forward_span(times, num, case.overlapping), played.forward_span, case)
        final = final_times(times, num, case.overlapping)
        close(final, played.final, case)
        all_reduce, shared = draw_times(rng, len(case.forward)), bool(rng.random() < 0.5)
        found = network_end(final, all_reduce, shared)
        close(found, last_all_reduce(played.final, all_reduce, shared), (case, all_reduce, shared))


def test_stages_are_final_last_one_first_and_the_order_of_ties_does_not_matter() -> None:
    rng = np.random.default_rng(10)
    ties = 0
    for _ in range(500):
        case = draw_case(rng)
        final = simulate(case).final
        assert list(final) == sorted(final, reverse=True), case
        ties += len(set(final)) < len(final)
        all_reduce = draw_times(rng, len(final))
        one, other = (last_all_reduce(final, all_reduce, True, order) for order in (True, False))
        close(one, other, (case, all_reduce))
        close(one, network_end(final, all_reduce, True), (case, all_reduce))
    assert ties > 10


@pytest.mark.parametrize("count", first(1, [250, 1000]))
def test_stages_that_take_turns_take_as_long_as_they_are_simulated_to(count: int) -> None:
    rng = np.random.default_rng(20)
    for _ in range(count):
        case = draw_case(rng)
        found = serial_final_times(stage_times(case), case.num_microbatches)
        close(found, simulate(case, "serial").final, case)


@pytest.mark.parametrize("overlapping", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_many_pipelines_at_once_are_each_as_simulated(num_stages: int, overlapping: bool) -> None:
    rng = np.random.default_rng(num_stages)
    forward, backward, share = rng.uniform(0, 1, (3, num_stages, 50))
    transfer = rng.uniform(0, 1, (num_stages - 1, 50))
    num = rng.integers(1, 13, 50)
    times = StageTimes(forward, backward, backward * share, transfer)
    final = np.array(final_times(times, num, overlapping))
    serial = np.array(serial_final_times(times, num))
    assert final.shape == serial.shape == (num_stages, 50)
    for i in range(50):
        columns = (tuple(array[:, i].tolist()) for array in times)
        case = Case(*columns, int(num[i]), overlapping)
        close(final[:, i], simulate(case).final, case)
        close(serial[:, i], simulate(case, "serial").final, case)


@pytest.mark.parametrize("count", first(1, [150, 500]))
@pytest.mark.parametrize("kind", CUT_SCHEDULES)
def test_time_lines_are_as_simulated(kind: ScheduleKind, count: int) -> None:
    rng = np.random.default_rng(30)
    for _ in range(count):
        case = draw_case(rng)
        line, played = schedule(case, kind), simulate(case, kind)
        events = line.events + line.transfers
        found = {(e.phase, e.stage, e.microbatch): (e.start, e.end) for e in events}
        assert found.keys() == played.spans.keys()
        assert len(found) == len(events)
        names = list(found)
        close([found[name] for name in names], [played.spans[name] for name in names], case)
        close(line.final_times, played.final, case)
        close(line.makespan, max(end for _, end in played.spans.values()), case)
        assert line.max_in_flight == played.most_held, case


def draw_shares(rng: np.random.Generator, num: int) -> tuple[float, ...]:
    """Sum to 1; some are zero."""
    weights = rng.uniform(0, 1, num) * (rng.random(num) < 0.8)
    weights[rng.integers(num)] += 0.1
    return tuple((weights / weights.sum()).tolist())


def draw_params(rng: np.random.Generator) -> PerfParams:
    num_stages = int(rng.integers(1, 7))
    shares, of_alpha = draw_shares(rng, 2 * num_stages), draw_shares(rng, 2 * num_stages)
    params = PerfParams(
        *rng.uniform(0.01, 1, 6).tolist(),
        gamma=float(rng.choice([1.0, 2.5, 10.0])),
        forward_shares=shares[:num_stages],
        backward_shares=shares[num_stages:],
        overlap=float(rng.choice([0.0, 0.37, 1.0, 1.0])),
        transfers_overlap=bool(rng.random() < 0.5),
        checkpoint=tuple(CHECKPOINTS[i] for i in rng.integers(3, size=num_stages)),
        shared_link=bool(rng.random() < 0.5),
        gamma_c=float(rng.choice([1.0, 3.0])),
        contention=float(rng.choice([0.0, 0.3])),
        tied_exchange=float(rng.choice([0.0, 0.2])),
    )
    if rng.random() < 0.5:
        params = params._replace(
            forward_alpha_shares=of_alpha[:num_stages], backward_alpha_shares=of_alpha[num_stages:]
        )
    if rng.random() < 0.7:
        copies = rng.uniform(0, 0.1, (2, num_stages - 1)).tolist()
        params = params._replace(alpha_t=tuple(copies[0]), beta_t=tuple(copies[1]))
    if rng.random() < 0.7:
        params = params._replace(gradient_shares=draw_shares(rng, num_stages))
    if rng.random() < 0.5:
        params = params._replace(checkpoint=CHECKPOINTS[rng.integers(3)])
    if rng.random() < 0.5:
        params = params._replace(schedule="1f1b")
    return check_params(params)


def described_case(params: PerfParams, micro_bsz: float, slow: float, num: int) -> Case:
    """What the fields of `PerfParams` say about the stages, one by one."""

    def compute(of_alpha: tuple[float, ...], of_beta: tuple[float, ...]) -> tuple[float, ...]:
        q = params.gamma_c
        return tuple(
            slow * ((x * params.alpha_c) ** q + (y * params.beta_c * micro_bsz) ** q) ** (1 / q)
            for x, y in zip(of_alpha or of_beta, of_beta, strict=True)
        )

    forward = compute(params.forward_alpha_shares, params.forward_shares)
    backward = compute(params.backward_alpha_shares, params.backward_shares)
    told = params.checkpoint
    modes = [told] * params.num_stages if isinstance(told, str) else told
    last = tuple(
        max(g - f, 0.0) if mode == "except_last" else g
        for f, g, mode in zip(forward, backward, modes, strict=True)
    )
    free = (0.0,) * (params.num_stages - 1)
    alpha_t, beta_t = params.alpha_t or free, params.beta_t or free
    transfer = tuple(x + y * micro_bsz for x, y in zip(alpha_t, beta_t, strict=True))
    return Case(forward, backward, last, transfer, num, params.transfers_overlap)


@pytest.mark.parametrize("count", first(1, [150, 1500]))
def test_step_time_is_as_simulated(count: int) -> None:
    rng = np.random.default_rng(40)
    for _ in range(count):
        params = draw_params(rng)
        num, micro_bsz = int(rng.integers(1, 13)), int(rng.integers(1, 9))
        num_nodes, num_replicas = [(1, 1), (1, 4), (2, 6), (3, 3)][rng.integers(4)]
        time = step_time(params, num_nodes, num_replicas, num * micro_bsz, 2, num)
        slow = 1 + params.contention * (num_replicas / num_nodes - 1)
        case = described_case(params, micro_bsz, slow, num)
        serial = np.array(simulate(case, SERIAL[params.schedule]).final)
        ideal = np.array(simulate(case, params.schedule).final)
        final = (1 - params.overlap) * serial + params.overlap * ideal
        close(time.accum_time, final[0], params)
        # Without shares all of the network comes after stage 0, whose gradients are last.
        shares = params.gradient_shares or (1.0,) + (0.0,) * (params.num_stages - 1)
        all_reduce = np.array(shares) * time.network_time
        end = last_all_reduce(final, all_reduce, params.shared_link)
        busy = all_reduce.sum() if params.shared_link else all_reduce.max()
        # Compute is alone for as long as the network is idle, and the other way round.
        alone = np.array([end - busy, end - final[0]]).clip(0)
        joined = (alone**params.gamma).sum() ** (1 / params.gamma)
        # Then stages add up what they share, once, while nothing else runs.
        close(time.optim_time, end - alone.sum() + joined + params.tied_exchange, params)
        close(time.total, 2 * time.accum_time + time.optim_time, params)


@pytest.mark.parametrize("count", first(1, [60, 200]))
def test_overlap_is_a_straight_line_from_taking_turns_to_the_schedule(count: int) -> None:
    rng = np.random.default_rng(50)
    for _ in range(count):
        params = draw_params(rng)
        case = described_case(params, 4.0, 1.0, 6)
        serial = simulate(case, SERIAL[params.schedule]).final[0]
        ideal = simulate(case, params.schedule).final[0]
        for overlap in (0.0, 0.25, 0.5, 1.0):
            time = step_time(params._replace(overlap=overlap), 1, 1, 24, 0, 6)
            close(time.accum_time, serial + overlap * (ideal - serial), params)


@pytest.mark.parametrize("kind", CUT_SCHEDULES)
@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 12])
def test_equal_stages_take_the_same_by_either_schedule(
    kind: ScheduleKind, num_stages: int, num_microbatches: int
) -> None:
    forward, backward = (0.1,) * num_stages, (0.2,) * num_stages
    line = Schedule(kind, forward, backward, num_microbatches)
    slots = num_microbatches + num_stages - 1
    assert line.makespan == pytest.approx(slots * 0.3, rel=1e-9)
    assert line.bubble_fraction == pytest.approx((num_stages - 1) / slots, abs=1e-9)
    assert line.bubble_fraction == bubble_fraction(line.events, num_stages)
    held = (min(num_microbatches, num_stages - stage) for stage in range(num_stages))
    expected = (num_microbatches,) * num_stages if kind == "gpipe" else tuple(held)
    assert line.max_in_flight == expected


@pytest.mark.parametrize("num_stages", range(1, 6))
def test_1f1b_is_never_slower_whatever_the_stage_times(num_stages: int) -> None:
    """Where no copy is a machine of its own and micro-batches are alike; for these K, M a proof.

    1F1B takes as long as its longest path. Let one with n_k forwards of stage k touch the stages S.
    Were stages of S to take 1 in the forward and all else 0, 1F1B would take Σn or more; that this
    is at most M - 1 + |S|, tried here for every S, leaves Σ(n_k - 1) over S at most M - 1 and so
    Σ n_k·f_k at most Σf + (M - 1)·max f. Likewise for backwards; the sum of both is GPipe's time.
    """
    nothing = (0,) * num_stages
    for touched in list(product((0, 1), repeat=num_stages))[1:]:
        for num_microbatches in range(1, 13):
            for forward, backward in ((touched, nothing), (nothing, touched)):
                line = Schedule("1f1b", forward, backward, num_microbatches)
                assert line.makespan <= num_microbatches - 1 + sum(touched)


def both_makespans(case: Case) -> tuple[float, float]:
    """(GPipe's, 1F1B's)."""
    gpipe, other = (schedule(case, kind).makespan for kind in CUT_SCHEDULES)
    return gpipe, other


def test_1f1b_against_gpipe_on_unequal_stages() -> None:
    rng = np.random.default_rng(60)
    ratios = []
    for _ in range(600):
        case = draw_case(rng)
        case = case._replace(last_backward=case.backward, overlapping=False)
        gpipe, other = both_makespans(case)
        assert other <= gpipe * (1 + 1e-12), case
        # A device receives, computes, and cannot begin before the stages above it are through once.
        into = (0.0, *case.transfer)
        out = (*case.transfer, 0.0)
        whole = np.array(case.forward) + case.backward + into + out
        bounds = [sum(whole[:k]) + case.num_microbatches * whole[k] for k in range(len(whole))]
        assert other >= max(bounds) * (1 - 1e-12), case
        ratios.append(other / gpipe if gpipe else 1.0)
    assert min(ratios) < 0.75
    assert sum(ratio < 1 - 1e-9 for ratio in ratios) > 200


def test_1f1b_takes_as_long_as_gpipe_where_the_last_stage_is_the_slowest_both_ways() -> None:
    rng = np.random.default_rng(70)
    for _ in range(300):
        case = draw_case(rng)
        free = (0.0,) * len(case.transfer)
        forward = (*case.forward[:-1], max(case.forward))
        backward = (*case.backward[:-1], max(case.backward))
        gpipe, other = both_makespans(
            Case(forward, backward, backward, free, case.num_microbatches, True)
        )
        close(other, gpipe, case)


def test_1f1b_nears_half_of_gpipe_where_forward_and_backward_are_slow_in_opposite_stages() -> None:
    for num in (4, 16, 64):
        case = Case((1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (0.0,), num, True)
        assert both_makespans(case) == (2 * num, num + 1)


def test_overlapping_copies_hold_1f1b_up_more_than_gpipe() -> None:
    """A stage that may hold K - k micro-batches waits for copies there and back; GPipe does not."""
    for num_stages, num, gpipe_seconds, other_seconds in (
        (2, 8, 27.2, 27.8),
        (4, 16, 57.6, 59.8),
        (4, 64, 201.6, 211.0),
        (8, 32, 118.4, 123.8),
    ):
        ones = np.ones(num_stages)
        case = Case(ones, 2 * ones, 2 * ones, (0.1,) * (num_stages - 1), num, True)
        assert both_makespans(case) == pytest.approx((gpipe_seconds, other_seconds))


@pytest.mark.parametrize("count", first(1, [50, 150]))
def test_backwards_in_order_take_nearly_as_long_as_gpipes(count: int) -> None:
    """torch's GPipe, which is priced as torchgpipe's: what that is off, as the page says."""
    rng = np.random.default_rng(0)
    off = []
    for _ in range(count):
        num_stages, num = int(rng.integers(2, 7)), int(rng.integers(2, 17))
        forward = rng.uniform(0.8, 1.2, num_stages)
        kept = 2 * rng.uniform(0.8, 1.2, num_stages)
        free = (0.0,) * (num_stages - 1)
        again, short = tuple((forward + kept).tolist()), tuple(kept.tolist())
        there = tuple(forward.tolist())
        spared = Case(there, again, short, free, num, overlapping=True)
        kinds: tuple[Kind, Kind] = ("gpipe", "gpipe_in_order")
        one, other = (max(simulate(spared, kind).final) for kind in kinds)
        off.append(one / other - 1)
        for case in (
            spared._replace(last_backward=again),
            Case((1.0,) * num_stages, (3.0,) * num_stages, (2.0,) * num_stages, free, num, True),
        ):
            one, other = (max(simulate(case, kind).final) for kind in kinds)
            assert one == pytest.approx(other)
    assert 0.001 < np.abs(off).mean() < 0.01
    assert np.abs(off).max() < 0.06
