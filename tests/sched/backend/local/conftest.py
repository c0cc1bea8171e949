"""A machine whose NVIDIA driver is a test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sched.backend.local.nvml import FakeNvml, build


@pytest.fixture(scope="session")
def _library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A driver with one healthy GPU until the test sets others."""
    return FakeNvml(_library, tmp_path / "gpus", monkeypatch)
