"""Tests inside a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _job_of_its_own() -> Iterator[None]:
    """End the job that a test began in its own process: the next one begins another."""
    yield
    contexts = sys.modules.get("pipollux_hybrid.job.context")
    if contexts is not None:
        contexts.reset()
