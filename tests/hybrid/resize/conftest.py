"""What tests of elastic resizes have in common."""

from __future__ import annotations

import pytest

from tests.hybrid.resize.nccl_stand_in import STAND_IN


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests with `over` over gloo and over the stand-in for NCCL. `make test` runs over the
    stand-in those that bear `usual_over_stand_in`: joins, leaves and deaths, of both pipelines.
    """
    if "over" not in metafunc.fixturenames:
        return
    usual = metafunc.definition.get_closest_marker("usual_over_stand_in") is not None
    marks = () if usual else pytest.mark.exhaustive
    metafunc.parametrize("over", ["gloo", pytest.param("stand-in", marks=marks)], indirect=True)


@pytest.fixture
def over(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of jobs over gloo, and over collectives that behave like NCCL's."""
    return STAND_IN if request.param == "stand-in" else {}
