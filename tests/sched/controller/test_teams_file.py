"""The file of teams: read when it is whole, and again until the store has it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_sched.controller.teams_file import TeamsFile
from pipollux_sched.store import Store, StoreUnavailableError
from pipollux_sched.store.teams import TeamRecords

WHOLE = "teams:\n- {name: text, quota: 2}\n- {name: vision, quota: 4}\n"
HALF = WHOLE[: WHOLE.index("- {name: vision")]
"""As an editor leaves it that writes in two parts: it is a file of teams, of fewer."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "pipollux.db", create=True) as store:
        yield store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "teams.yaml"
    path.write_text(WHOLE)
    return path


def names(store: Store) -> list[str]:
    spec = store.teams.spec()
    return [] if spec is None else [team["name"] for team in spec["teams"]]


def test_a_file_that_is_still_written_is_not_taken_for_a_shorter_one(
    store: Store, path: Path
) -> None:
    decided: list[list[str]] = []
    file = TeamsFile(path, store, lambda: decided.append(names(store)))
    path.write_text(HALF)
    file.look()
    path.write_text(WHOLE + "- {name: web}\n")
    for _ in range(3):
        file.look()
    assert decided == [["text", "vision", "web"]]
    path.unlink()
    file.look()
    assert names(store) == ["text", "vision", "web"]


def test_what_the_store_did_not_take_is_read_again(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TeamsFile(path, store, lambda: None)
    path.write_text(WHOLE + "- {name: web}\n")
    file.look()

    def fails(*_: object) -> None:
        raise StoreUnavailableError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(TeamRecords, "set_spec", fails)
        with pytest.raises(StoreUnavailableError):
            file.look()
    file.look()
    assert names(store) == ["text", "vision", "web"]


def test_what_is_wrong_is_told_once(
    store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TeamsFile(path, store, lambda: None)
    path.write_text("teams: [{name: text, quota: many}]")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            file.look()
    (told,) = caplog.messages
    assert "the teams stay as they are: " in told
    assert "teams[0].quota" in told
    assert names(store) == ["text", "vision"]
