"""What an agent prepares for its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.backend.replica import agent


def test_the_folder_for_checkpoints_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else can make it where the scheduler sees no disk of the job's; twice is no harm."""
    folder = tmp_path / "job" / "checkpoints"
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", str(folder))
    for _ in range(2):
        agent._make_folder()
        assert folder.is_dir()
    monkeypatch.setenv("PIPOLLUX_CHECKPOINT_DIR", "/proc/nowhere")
    agent._make_folder()  # the script says so when it saves
