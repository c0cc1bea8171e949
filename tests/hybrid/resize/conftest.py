"""What tests of elastic resizes have in common."""

from __future__ import annotations

import os

import pytest

from tests.hybrid.resize.nccl_stand_in import STAND_IN

BACKENDS = ["gloo", "stand-in"] if "STAND_IN" in os.environ else ["gloo"]
"""With ``STAND_IN=1 make test-exhaustive`` these tests run over both; test_device_groups has some
over the stand-in in each run.
"""


@pytest.fixture(params=BACKENDS)
def over(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of jobs over gloo, and over collectives that behave like NCCL's."""
    return STAND_IN if request.param == "stand-in" else {}
