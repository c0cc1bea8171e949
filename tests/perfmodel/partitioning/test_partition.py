"""The cut of layers into stages, against all cuts there are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel.partitioning.layer_profile import Layer, LayerProfile, Link
from pipollux_perfmodel.partitioning.memory import stage_memory
from pipollux_perfmodel.partitioning.partition import partition
from pipollux_perfmodel.timing.gpipe import StageTimes
from pipollux_perfmodel.timing.one_f_one_b import final_times
from pipollux_perfmodel.timing.params import CHECKPOINTS, Checkpoint, ScheduleKind
from tests.extent import examples, first, first_points


def slowest(costs: list[float], balance: list[int]) -> float:
    ends = np.cumsum([0, *balance])
    return max(sum(costs[start:end]) for start, end in pairwise(ends))


def all_balances(num_layers: int, num_stages: int) -> list[list[int]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return [np.diff([0, *cut, num_layers]).tolist() for cut in cuts]


@examples(150, 600)
@given(st.data())
def test_no_other_cut_has_a_faster_slowest_stage(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0, 100), min_size=1, max_size=9))
    num_stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, num_stages)
    assert len(found) == num_stages
    assert sum(found) == len(costs)
    assert min(found) >= 1
    best = min(slowest(costs, balance) for balance in all_balances(len(costs), num_stages))
    assert slowest(costs, found) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_known_cuts() -> None:
    assert partition([1, 1, 1, 3], 2) == [3, 1]
    assert partition([5], 1) == [1]
    assert partition([1, 1, 1], 3) == [1, 1, 1]
    assert partition([1, 1, 1, 3], 2, 7) == [3, 1]
    assert sorted(partition([0, 0, 0, 0], 3)) == [1, 1, 2]


def test_hundreds_of_layers_are_cut_as_well_as_can_be() -> None:
    costs = np.random.default_rng(0).integers(1, 100, size=400).tolist()
    most = int(slowest(costs, partition(costs, 16)))
    # One unit less, and stages filled to the brim are too many.
    assert stages_needed(costs, most) <= 16 < stages_needed(costs, most - 1)


def stages_needed(costs: list[int], most: int) -> int:
    stages, filled = 1, 0
    for cost in costs:
        if filled + cost > most:
            stages, filled = stages + 1, 0
        filled += cost
    return stages


@dataclass(frozen=True)
class Case:
    """One profile and how it is to run."""

    profile: LayerProfile
    num_stages: int
    num_microbatches: int
    micro_bsz: float
    checkpoint: Checkpoint
    schedule: ScheduleKind
    link: Link | None
    overlapping: bool

    def found(self, memory_limit: float | None = None) -> list[int]:
        return partition(
            self.profile,
            self.num_stages,
            self.num_microbatches,
            memory_limit,
            micro_bsz=self.micro_bsz,
            checkpoint=self.checkpoint,
            schedule=self.schedule,
            link=self.link,
            transfers_overlap=self.overlapping,
        )

    def memory(self, balance: list[int]) -> float:
        each = stage_memory(
            self.profile,
            balance,
            self.micro_bsz,
            self.num_microbatches,
            checkpoint=self.checkpoint,
            schedule=self.schedule,
        )
        return float(each.max())


def flow_shop(jobs: list[list[float]]) -> float:
    """When the last job leaves the last machine, one operation after the other."""
    free = [0.0] * len(jobs[0])
    for job in jobs:
        ready = 0.0
        for machine, seconds in enumerate(job):
            ready = free[machine] = max(ready, free[machine]) + seconds
    return free[-1]


def seconds(case: Case, balance: list[int]) -> float:
    """T_pipe of one cut, played operation by operation."""
    b = case.micro_bsz
    ends = np.cumsum([0, *balance]).tolist()
    stages = [case.profile.layers[start:end] for start, end in pairwise(ends)]
    forward = [sum(x.forward_alpha + x.forward_beta * b for x in stage) for stage in stages]
    backward = [sum(x.backward_alpha + x.backward_beta * b for x in stage) for stage in stages]
    copies = [0.0] * (len(stages) - 1)
    if case.link is not None:
        copies = [
            case.link.latency + stage[-1].output_bytes * b / case.link.bandwidth
            for stage in stages[:-1]
        ]
    if case.schedule == "1f1b":
        return one_f_one_b(case, forward, backward, copies)
    order = range(case.num_microbatches)
    jobs = [with_copies(forward, copies, case.overlapping) for _ in order]
    back = []
    for i in reversed(order):
        again = case.checkpoint == "always" or (case.checkpoint == "except_last" and i != order[-1])
        times = [g + f if again else g for f, g in zip(forward, backward, strict=True)]
        back.append(with_copies(times[::-1], copies[::-1], case.overlapping))
    return flow_shop(jobs) + flow_shop(back)


def one_f_one_b(
    case: Case, forward: list[float], backward: list[float], copies: list[float]
) -> float:
    several = case.checkpoint == "except_last" and case.num_microbatches > 1
    again = case.checkpoint == "always" or several
    usual = [g + f if again else g for f, g in zip(forward, backward, strict=True)]
    last = backward if several else usual
    num = case.num_microbatches
    times = StageTimes(forward, usual, last, copies)
    return float(final_times(times, num, case.overlapping)[0])


def with_copies(times: list[float], copies: list[float], overlapping: bool) -> list[float]:
    """Machines in the order in which a micro-batch passes them."""
    if not overlapping:
        return [time + copy for time, copy in zip(times, [0.0, *copies], strict=True)]
    machines = times[:1]
    for copy, time in zip(copies, times[1:], strict=True):
        machines += [copy, time]
    return machines


LINKS = (None, Link(0.0, 5.0), Link(0.5, 20.0), Link(0.1, 1.0))


def random_case(
    rng: np.random.Generator, max_layers: int = 8, schedule: ScheduleKind = "gpipe"
) -> Case:
    num_layers = int(rng.integers(1, max_layers + 1))
    kind = rng.integers(4)

    def draw() -> Any:
        if kind == 0:  # many ties
            return rng.integers(0, 4, num_layers).astype(float)
        return rng.gamma((0.3, 1.0, 5.0)[kind - 1], 1.0, num_layers)

    times = [draw() * 0.3, draw(), draw() * 0.3, draw()]
    if kind == 3:  # backward and forward proportional
        times[2:] = [2 * times[0], 2 * times[1]]
    sizes = list(rng.gamma(1.0, 5.0, (4, num_layers)))
    rows = np.array(times + sizes).T.tolist()
    return Case(
        LayerProfile.from_layers([Layer(*row) for row in rows], float(rng.gamma(1.0, 5.0))),
        num_stages=int(rng.integers(1, num_layers + 1)),
        num_microbatches=int(rng.choice([1, 2, 3, 4, 8])),
        micro_bsz=float(rng.choice([0.5, 1.0, 3.0])),
        checkpoint=CHECKPOINTS[rng.integers(3)],
        schedule=schedule,
        link=LINKS[rng.integers(4)],
        overlapping=bool(rng.integers(2)),
    )


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_no_other_cut_is_faster(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(400):
        case = random_case(rng)
        balances = all_balances(case.profile.num_layers, case.num_stages)
        best = min(seconds(case, balance) for balance in balances)
        # With one micro-batch a faster cut may be passed over by 1e-9, for balance.
        least = 1e-9 if case.num_microbatches == 1 else 1e-12
        assert seconds(case, case.found()) <= best * (1 + least) + 1e-12, case


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_no_other_cut_that_fits_is_faster(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    refused = 0
    for _ in range(400):
        case = random_case(rng)
        balances = all_balances(case.profile.num_layers, case.num_stages)
        memory = [case.memory(balance) for balance in balances]
        limit = float(rng.choice([rng.choice(memory), min(memory) * rng.choice([0.95, 1.0, 1.2])]))
        fitting = [
            balance
            for balance, needed in zip(balances, memory, strict=True)
            if needed <= limit * (1 + 1e-12)
        ]
        if not fitting:
            refused += 1
            with pytest.raises(ValueError, match=f"need at least {min(memory):.10g} on one device"):
                case.found(limit)
            continue
        found = case.found(limit)
        assert found in fitting
        best = min(seconds(case, balance) for balance in fitting)
        least = 1e-9 if case.num_microbatches == 1 else 1e-12
        assert seconds(case, found) <= best * (1 + least) + 1e-12, case
    assert 10 < refused < 200


@pytest.mark.parametrize(
    ("limited", "count"), first_points(1, [(True, 50), (False, 50), (False, 200), (True, 200)])
)
def test_by_1f1b_a_cut_is_at_least_as_good_as_gpipes_and_mostly_the_best(
    limited: bool, count: int
) -> None:
    rng = np.random.default_rng(200)
    slower, gpipes = [], []
    while len(slower) < count:
        case = random_case(rng, max_layers=9, schedule="1f1b")
        balances = all_balances(case.profile.num_layers, case.num_stages)
        memory = [case.memory(balance) for balance in balances]
        limit = float(rng.choice(memory)) if limited else math.inf
        fitting = [
            balance
            for balance, needed in zip(balances, memory, strict=True)
            if needed <= limit * (1 + 1e-12)
        ]
        best = min(seconds(case, balance) for balance in fitting)
        if len(fitting) == 1 or best == 0:
            continue
        found = case.found(limit if limited else None)
        assert found in fitting
        slower.append(seconds(case, found) / best - 1)
        # GPipe's best cut, of those that have room for 1F1B.
        other = replace(case, schedule="gpipe")
        least = min(seconds(other, balance) for balance in fitting)
        ties = [x for x in fitting if seconds(other, x) <= least * (1 + 1e-9) + 1e-12]
        assert seconds(case, found) <= max(seconds(case, x) for x in ties) * (1 + 1e-9)
        gpipes.append(min(seconds(case, x) for x in ties) / best - 1)
    assert np.mean(slower) < 0.5 * np.mean(gpipes)
    assert np.mean(slower) < 0.005


@pytest.mark.parametrize("count", first(1, [60, 200]))
def test_no_other_cut_of_more_layers_is_faster(count: int) -> None:
    rng = np.random.default_rng(11)
    ends = {K: np.array(list(combinations(range(1, 20), K - 1))) for K in (5, 6)}
    for _ in range(count):
        num_stages, num_microbatches = int(rng.integers(5, 7)), int(rng.integers(2, 5))
        times = rng.gamma(1.0, 1.0, (2, 20))
        profile = LayerProfile.from_layers([Layer(0.0, f, 0.0, g) for f, g in times.T.tolist()])
        found = partition(profile, num_stages, num_microbatches)
        cuts = np.pad(ends[num_stages], ((0, 0), (1, 1)), constant_values=(0, 20))
        sums = np.pad(times.cumsum(axis=1), ((0, 0), (1, 0)))
        slow = [np.diff(total[cuts], axis=1).max(axis=1) for total in sums]
        mine = [np.diff(total[np.cumsum([0, *found])]).max() for total in sums]
        assert sum(mine) == pytest.approx((slow[0] + slow[1]).min(), rel=1e-9)


@pytest.mark.parametrize(
    ("checkpoint", "overlapping", "num_microbatches"),
    list(product(CHECKPOINTS, (True, False), (2, 16))),
)
def test_moving_a_border_of_many_layers_gains_nothing(
    checkpoint: Checkpoint, overlapping: bool, num_microbatches: int
) -> None:
    rng = np.random.default_rng(7)
    rows = np.column_stack((rng.gamma(2.0, 1e-4, (120, 4)), rng.gamma(1.0, 1e6, (120, 4)))).tolist()
    profile = LayerProfile.from_layers([Layer(*row) for row in rows])
    link = Link(1e-5, 1e10)
    case = Case(profile, 12, num_microbatches, 4.0, checkpoint, "gpipe", link, overlapping)
    found = case.found()
    least = seconds(case, found)
    for stage, step in product(range(11), (-3, -2, -1, 1, 2, 3)):
        moved = list(found)
        moved[stage] += step
        moved[stage + 1] -= step
        if min(moved) >= 1:
            assert seconds(case, moved) >= least * (1 - 1e-12)


def test_with_one_micro_batch_the_best_balanced_cut_is_chosen() -> None:
    profile = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 6)
    assert partition(profile, 3) == [2, 2, 2]
    # Copies are what one micro-batch waits for: the cut goes where they are small.
    cheap = [Layer(0, 1, 0, 2, output_bytes=9.0)] * 4 + [Layer(0, 1, 0, 2, output_bytes=1.0)] * 2
    assert partition(LayerProfile.from_layers(cheap), 2, link=Link(0.0, 1.0)) == [5, 1]


def test_forward_and_backward_have_slowest_stages_of_their_own() -> None:
    # Sums of both are even in [2, 1], but its slowest forward and backward are in different stages.
    layers = [Layer(0, 3, 0, 0), Layer(0, 3, 0, 0), Layer(0, 0, 0, 6)]
    assert partition([3, 3, 6], 2) == [2, 1]
    assert partition(LayerProfile.from_layers(layers), 2, 8) == [1, 2]


def test_1f1b_is_cut_by_what_a_stage_has_to_do_for_a_micro_batch() -> None:
    layers = [Layer(0, 3, 0, 0), Layer(0, 3, 0, 0), Layer(0, 0, 0, 6)]
    # Never more than 6 s, where GPipe's best cut has a stage of 9 s.
    assert partition(LayerProfile.from_layers(layers), 2, 8, schedule="1f1b") == [2, 1]


def test_proportional_times_are_cut_as_plain_costs_are() -> None:
    costs = np.random.default_rng(2).gamma(2.0, size=40).tolist()
    profile = LayerProfile.from_layers([Layer(0, cost, 0, 2 * cost) for cost in costs])
    for num_stages in (2, 5, 9):
        plain = slowest(costs, partition(costs, num_stages))
        assert slowest(costs, partition(profile, num_stages, 4)) == pytest.approx(plain)


def test_less_memory_means_another_cut_until_there_is_none() -> None:
    layers = [Layer(0, 1, 0, 2, activation_bytes=1.0)] * 3 + [
        Layer(0, 1, 0, 2, activation_bytes=5.0)
    ] * 3
    profile = LayerProfile.from_layers(layers)
    assert partition(profile, 2, 2) == [3, 3]
    assert partition(profile, 2, 2, memory_limit=29.0) == [4, 2]
    # The last stage of 1F1B keeps one micro-batch alone.
    assert partition(profile, 2, 8, memory_limit=29.0, schedule="1f1b") == [3, 3]
    message = (
        r"memory_limit is 15 bytes but 2 stages need at least 20 on one device with 2 "
        r"micro-batches of 1 samples; give more stages or smaller micro-batches, or "
        r"activation_checkpoint=\"always\""
    )
    with pytest.raises(ValueError, match=message):
        partition(profile, 2, 2, memory_limit=15.0)
    assert partition(profile, 2, 2, memory_limit=15.0, checkpoint="always") == [3, 3]


PLAIN = LayerProfile.from_layers([Layer(0, 1, 0, 2)] * 2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1.0, 2.0], 0), {}, "num_stages is 0"),
        (([1.0, 2.0], 3), {}, "num_stages is 3 but there are 2 layers"),
        (([1.0, -2.0], 1), {}, r"costs\[1\] is -2"),
        (([math.nan], 1), {}, r"costs\[0\] is nan"),
        (([1.0], 1), {"memory_limit": 5.0}, "memory_limit is given with plain costs"),
        (([1.0], 1), {"link": Link(0.0, 1.0)}, "link is given with plain costs"),
        ((PLAIN, 3), {}, "num_stages is 3 but there are 2 layers"),
        ((PLAIN, 2, 0), {}, "num_microbatches is 0"),
        ((PLAIN, 2), {"micro_bsz": 0.0}, "micro_bsz is 0"),
        ((PLAIN, 2), {"memory_limit": -1.0}, "memory_limit is -1"),
        ((PLAIN, 2), {"memory_limit": math.inf}, "memory_limit is inf"),
        ((PLAIN, 2), {"checkpoint": "often"}, "checkpoint is 'often'"),
        ((PLAIN, 2), {"schedule": "zb"}, "schedule is 'zb'"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        partition(*arguments, **options)
