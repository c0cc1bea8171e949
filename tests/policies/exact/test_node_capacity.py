"""What fits on nodes, kept up to date, is what is found by looking at all of them."""

from __future__ import annotations

import numpy as np
import pytest

from pipollux_policies.placement.node_choice import NodeCapacity, find_nodes, frozen


@pytest.mark.parametrize("seed", range(20))
def test_nodes_found_by_their_room_are_those_found_among_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = NodeCapacity(rng.integers(0, 9, (12, 2)))
    wanted = [
        (frozen(np.array(need)), frozen(rng.random(12) < 0.8)) for need in ([1, 0], [2, 1], [1, 3])
    ]
    held = []
    for _ in range(60):
        need, allowed = wanted[rng.integers(len(wanted))]
        replicas = int(rng.integers(1, 7))
        counts = NodeCapacity(capacity.free).counts(need.copy(), allowed)
        np.testing.assert_array_equal(capacity.counts(need, allowed), counts)
        capacity.claims = rng.integers(0, 4, 12)
        closed = capacity.num_distributed > 0
        expected = find_nodes(counts, closed, replicas, claimed=capacity.claims)
        found = capacity.find(need, allowed, replicas)
        assert found == (None if expected is None else tuple(sorted(expected)))
        if found is not None:
            capacity.put(found, need)
            held.append((found, need))
        if held and (found is None or rng.random() < 0.3):
            capacity.take(*held.pop(rng.integers(len(held))))


def test_of_nodes_with_as_much_room_those_with_the_fewest_claims_go_first() -> None:
    capacity = NodeCapacity(np.full((4, 1), 2))
    capacity.claims[:] = 2, 1, 0, 1
    need, everywhere = frozen(np.array([1])), frozen(np.ones(4, bool))
    assert capacity.find(need, everywhere, 2) == ((2, 2),)
    assert capacity.find(need, everywhere, 5) == ((1, 2), (2, 2), (3, 1))
    assert capacity.find_keeping(need, everywhere, 4, ((0, 1),)) == ((0, 2), (2, 2))


@pytest.mark.parametrize("seed", range(40))
def test_jobs_are_put_at_once_if_one_after_the_other_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free = rng.integers(2, 9, (6, 2))
    together, alone = NodeCapacity(free), NodeCapacity(free)
    entries, fits = [], True
    for job in range(int(rng.integers(1, 5))):
        need = rng.integers([1, 0], 3)
        nodes = np.sort(rng.choice(6, int(rng.integers(1, 3)), replace=False)).tolist()
        placed = tuple((node, int(rng.integers(1, 3))) for node in nodes)
        fits = fits and alone.accepts(placed, need)
        if fits:
            alone.put(placed, need)
        entries += [(job, *entry, need) for entry in placed]
    owners, nodes, counts, needs = map(np.array, zip(*entries, strict=True))
    assert together.put_all(owners, nodes, counts, needs) == fits
    if fits:
        np.testing.assert_array_equal(together.free, alone.free)
        np.testing.assert_array_equal(together.num_distributed, alone.num_distributed)
    else:
        np.testing.assert_array_equal(together.free, free)
