"""Marks tests of elastic jobs that run over gloo, and over collectives that behave like NCCL's."""

from __future__ import annotations

import pytest

from tests.hybrid.resize.nccl_stand_in import STAND_IN

over_both = pytest.mark.parametrize(
    "over",
    [
        pytest.param({}, id="gloo"),
        pytest.param(STAND_IN, id="stand-in", marks=pytest.mark.exhaustive),
    ],
)
"""Gives them `over`, variables of the job; over the stand-in they are exhaustive."""
