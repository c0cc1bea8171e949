"""What tests of the single-process pipeline have in common."""

from __future__ import annotations

import pytest
from torchgpipe.worker import spawn_workers

from pipollux_hybrid.pipeline.gpipe import PipelineRun


@pytest.fixture(params=["caller's thread", "workers"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run stages where those of one device run, and where those of several devices do."""
    if request.param == "workers":
        monkeypatch.setattr(PipelineRun, "_workers", lambda run: spawn_workers(run.devices))
