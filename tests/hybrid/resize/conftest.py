"""What tests of elastic resizes have in common."""

from __future__ import annotations

import pytest

from tests.hybrid.resize.nccl_stand_in import STAND_IN


@pytest.fixture(params=["gloo", pytest.param("stand-in", marks=pytest.mark.exhaustive)])
def over(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of jobs over gloo, and over collectives that behave like NCCL's."""
    return STAND_IN if request.param == "stand-in" else {}
