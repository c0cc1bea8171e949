"""What tests of elastic resizes have in common."""

from __future__ import annotations

import pytest

from tests.hybrid.resize.nccl_stand_in import STAND_IN


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests with `over` over gloo and over the stand-in for NCCL. `make test` runs over the
    stand-in those that bear `usual_over_stand_in`, with `alone=True` over nothing else: joins and
    leaves where a process drives all stages, and a death.
    """
    if "over" not in metafunc.fixturenames:
        return
    usual = metafunc.definition.get_closest_marker("usual_over_stand_in")
    alone = usual is not None and usual.kwargs.get("alone", False)
    over = [
        pytest.param("gloo", marks=pytest.mark.exhaustive if alone else ()),
        pytest.param("stand-in", marks=pytest.mark.exhaustive if usual is None else ()),
    ]
    metafunc.parametrize("over", over, indirect=True)


@pytest.fixture
def over(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of jobs over gloo, and over collectives that behave like NCCL's."""
    return STAND_IN if request.param == "stand-in" else {}
