"""How far the tests go: the same few cases at every `make test`, all in `make test-exhaustive`.

`make test` gives one verdict for one state of the sources: hypothesis tries the same examples each
time, and of a grid there are as many points as every pair of values takes. `make test-exhaustive`
(`pytest --exhaustive`) runs what that leaves out: the other points of grids, tests that bear
`@pytest.mark.exhaustive`, and every hypothesis test with a fresh seed; `SEED=` repeats a run.
`SHARE=8` (`--share 8`) runs an eighth of them, spread over the modules, another one for each seed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from allpairspy import AllPairs
from hypothesis import HealthCheck, is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

USUAL, FRESH = "usual", "fresh"
# How long an example takes says something about the machine, so nothing is made of it.
settings.register_profile(
    USUAL,
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    FRESH,
    settings.get_profile(USUAL),
    max_examples=50,
    derandomize=False,
    print_blob=True,
)


def load_profile(*, exhaustive: bool) -> None:
    """Have hypothesis try the same examples each time, or others each time."""
    settings.load_profile(FRESH if exhaustive else USUAL)
    # It also draws from the constants of whatever modules are imported by then: what a test is
    # given must not depend on which tests ran before it in the same process.
    nothing = providers._local_constants
    providers._get_local_constants = lambda: nothing


def examples(usual: int, exhaustive: int | None = None) -> settings:
    """Return how many examples hypothesis tries.

    Args:
        usual: a quarter of them in `make test`, always the same; all with fresh seeds.
        exhaustive: half of them with fresh seeds, where as many are not what is wanted.
    """
    fresh = settings.get_current_profile_name() == FRESH
    return settings(max_examples=-(-(exhaustive or 2 * usual) // 2) if fresh else -(-usual // 4))


def grid(*axes: Sequence[Any]) -> list[Any]:
    """Return every point of a grid, for `parametrize`.

    Those that are not needed to have each pair of values of two axes are marked exhaustive.
    """
    usual = {tuple(point) for point in pairs(*axes)}
    return [
        pytest.param(*point, marks=() if point in usual else pytest.mark.exhaustive)
        for point in itertools.product(*axes)
    ]


def turns(*axes: Sequence[Any]) -> list[Any]:
    """Return every point of a grid, for `parametrize`, where points are expensive.

    Those that are not needed to have each value of each axis, in turn with those of the others, are
    marked exhaustive.
    """
    usual = set(each(*(range(len(axis)) for axis in axes)))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, point, strict=True)),
            marks=() if point in usual else pytest.mark.exhaustive,
        )
        for point in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def each(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as few points of a grid as have each value of each axis, in turn with the others'."""
    longest = max(map(len, axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(longest)]


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return points of a grid such that each pair of values of two axes is in one of them."""
    return [tuple(point) for point in AllPairs([list(axis) for axis in axes])]


def first(usual: int, values: Sequence[Any]) -> list[Any]:
    """Return values for `parametrize`; those after the first few are marked exhaustive."""
    return first_points(usual, [(value,) for value in values])


def first_points(usual: int, points: Sequence[Sequence[Any]]) -> list[Any]:
    """Return points for `parametrize` with several names, as `first` does values."""
    return [
        pytest.param(*point, marks=() if number < usual else pytest.mark.exhaustive)
        for number, point in enumerate(points)
    ]


def is_exhaustive(item: pytest.Item) -> bool:
    """Whether a test runs in `make test-exhaustive` alone."""
    return item.get_closest_marker("exhaustive") is not None


def share_of(items: Sequence[pytest.Item], share: int, seed: str) -> list[pytest.Item]:
    """Return one test in so many, spread over the modules, in their order.

    Args:
        items: All tests.
        share: In how many there is one.
        seed: Says which.
    """
    modules: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        modules[item.nodeid.partition("::")[0]].append(item)

    def lot(item: pytest.Item) -> bytes:
        return hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest()

    drawn: set[pytest.Item] = set()
    for tests in modules.values():
        drawn.update(sorted(tests, key=lot)[: -(-len(tests) // share)])
    # One of each module may be more than the share of all.
    kept = set(sorted(drawn, key=lot)[: -(-len(items) // share)])
    return [item for item in items if item in kept]


def explores(item: pytest.Item) -> bool:
    """Whether a test finds something else to try with other seeds."""
    return is_hypothesis_test(getattr(item, "function", None))


APART = ("kubernetes", "gpu")
"""What some tests need, which is in few machines: `make test-NAME` runs these, and only these."""


def needs(item: pytest.Item) -> str | None:
    """Return which of these a test needs."""
    return next((name for name in APART if item.get_closest_marker(name) is not None), None)
