"""What is proposed beside the geometric candidates: every atomic batch size that was measured."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipollux_perfmodel.goodput.batch_bounds import BatchBounds, stack_bounds
from pipollux_perfmodel.goodput.candidates import list_measured


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True),
    st.integers(1, 16),
    st.sampled_from([1, 4]),
    st.integers(32, 5000),
    st.booleans(),
)
def test_measured_sizes_are_listed_with_numbers_of_steps_that_leave_no_gap(
    sizes: list[int], replicas: int, multiple: int, most: int, accumulation: bool
) -> None:
    job = BatchBounds(32, most, 8, 256, accumulation, needs_two_batches=False)
    bounds = stack_bounds([job], [1])
    listed = list_measured(bounds, np.array([replicas]), multiple, np.array(sizes))
    found = {
        (int(size), int(steps))
        for size, steps in zip(
            listed.atomic_bsz[listed.allowed], listed.accum_steps[listed.allowed], strict=True
        )
    }
    fitting = [size for size in sizes if 8 <= size <= 256 and size % multiple == 0]
    expected = {
        (size, steps)
        for size in fitting
        for steps in (range(most // (replicas * size)) if accumulation else [0])
        if 32 <= replicas * size * (steps + 1) <= most
    }
    assert found <= expected
    for size, steps in expected:
        assert any(
            one == size and max(steps + 1, other + 1) <= 1.25 * min(steps + 1, other + 1)
            for one, other in found
        ), "a number of steps far from all that are listed"
