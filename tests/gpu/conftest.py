"""Tests on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["gloo", "nccl"])
def over(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of jobs over gloo and over NCCL."""
    return {"BACKEND": request.param, "PIPOLLUX_ELASTIC_NCCL": "1"}


@pytest.fixture(scope="session", autouse=True)
def _there_is_a_gpu() -> None:
    assert torch.cuda.is_available(), f"torch {torch.__version__} sees no CUDA device"
