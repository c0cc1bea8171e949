"""What measured steps say beyond the model."""

from __future__ import annotations

import numpy as np
import pytest

from pipollux_perfmodel import GoodputFunction, PerfParams, SpeedupFunction, speedups_of
from pipollux_perfmodel.goodput.corrections import (
    MAX_RATIOS,
    StepCorrections,
    StepRatio,
    step_ratios,
)

PARAMS = PerfParams(0.1, 0.01, 0.2, 0.02, 0.05, 0.01, 1.5)
GOODPUT = GoodputFunction(PARAMS, (1.0, 8.0), 32)


def test_ratios_are_what_the_model_leaves_over() -> None:
    """By allocation, whatever the batch sizes; of several the geometric mean."""
    nodes, replicas, sizes = [1, 2, 1, 2], [4, 4, 4, 8], [8, 8, 16, 8]
    times = GOODPUT.step_time(nodes, replicas, sizes, 0).optim_time
    found = step_ratios(PARAMS, nodes, replicas, sizes, times * np.array([2.0, 1.0, 0.5, 1.2]))
    assert found == (StepRatio(1, 4, 1.0), StepRatio(2, 4, 1.0), StepRatio(2, 8, 1.2))


def test_ratios_are_bounded() -> None:
    """In number and size: a step that a loaded machine took rules no allocation out."""
    found = step_ratios(PARAMS, 1, np.arange(1, 100), 8, 900.0)
    assert len(found) == MAX_RATIOS
    assert {entry.ratio for entry in found} == {2.7183}
    assert StepCorrections([StepRatio(1, 1, 900.0)]).factors(1, 1) == pytest.approx(np.exp(-1))


def test_at_a_measured_allocation_the_measurement_counts() -> None:
    factors = StepCorrections([StepRatio(1, 4, 1.25), StepRatio(2, 4, 1.5)])
    assert factors.factors([1, 2, 3], 4) == pytest.approx([1 / 1.25, 1 / 1.5, 1 / 1.5])


def test_elsewhere_it_fades_with_the_distance() -> None:
    """Further away the model counts; on several nodes what was measured on one says nothing."""
    corrections = StepCorrections([StepRatio(1, 4, 1.25)])
    near, far, further = corrections.factors(1, [5, 8, 64])
    assert 0.8 < near < far < further <= 1.0
    assert further == pytest.approx(1.0)
    assert corrections.factors(2, [4, 64]) == pytest.approx([1.0, 1.0])


def test_two_neighbours_count_by_their_distance() -> None:
    """Halfway between them (in doublings) both weigh the same, against the model."""
    corrections = StepCorrections([StepRatio(1, 4, 1.25), StepRatio(1, 16, 1.0)])
    weight = np.exp(-((1 / 0.35) ** 2) / 2)
    expected = np.exp(-weight * np.log(1.25) / (2 * weight + 0.3))
    assert corrections.factors(1, 8) == pytest.approx(expected)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("base", [None, 7.0])
def test_speedups_are_of_corrected_goodput(together: bool, base: float | None) -> None:
    """Each speedup is the model's, times the factors of its allocation and of one replica."""
    ratios = [StepRatio(1, 1, 0.9), StepRatio(1, 3, 1.2), StepRatio(2, 6, 0.8)]
    corrections = StepCorrections(ratios)
    plain = SpeedupFunction(GOODPUT, 256, base_goodput=base)
    corrected = SpeedupFunction(GOODPUT, 256, base_goodput=base, corrections=corrections)
    nodes, replicas = np.array([1, 1, 1, 2, 2, 3]), np.array([1, 2, 3, 6, 7, 8])
    if together:
        speedups_of([(corrected, nodes, replicas), (plain, nodes, replicas)])
    factors = corrections.factors(nodes, replicas)
    if base is None:
        factors /= corrections.factors(1, 1)
    assert corrected(nodes, replicas) == pytest.approx(plain(nodes, replicas) * factors)
    assert corrected(0, 0) == 0.0
    chosen, own = corrected.configuration(2, 6), plain.configuration(2, 6)
    assert chosen.atomic_bsz == own.atomic_bsz
    assert chosen.goodput == pytest.approx(own.goodput / 0.8)
    assert chosen.speedup == pytest.approx(chosen.goodput / corrected.base_goodput)
