"""A state directory is its owner's alone, and belongs to the store that knows its jobs."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import pytest

from pipollux_sched.store import StateDir, StateDirError, Store
from tests.sched.test_scheduler import scheduler_on, toy


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def use(directory: StateDir) -> None:
    """Do what a scheduler does with it first."""
    directory.create()
    with directory.lock():
        directory.admin_token()


def test_what_is_open_to_others_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = StateDir(tmp_path / "state")
    directory.path.mkdir()
    names = ("lock", "admin.token", "pipollux.db.lock")
    for name in names:
        (directory.path / name).touch()
        (directory.path / name).chmod(0o664)
    directory.path.chmod(0o755)
    directory.create()
    token = directory.admin_token()
    with directory.lock(), Store(directory.database, create=True) as store:
        store.acquire_leader_lock()
    assert [mode(directory.path / name) for name in names] == [0o600] * 3
    assert (mode(directory.path), mode(directory.database)) == (0o700, 0o600)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{directory.path} was open to others (mode 0755); it is yours alone now" in said
    token_file = directory.path / "admin.token"
    assert f"others could read {token_file}, which opens everything; remove it" in said
    caplog.clear()
    directory.create()
    assert directory.admin_token() == token
    assert caplog.records == []


def test_new_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = StateDir(tmp_path / "state")
        directory.create()
        directory.admin_token()
        with directory.lock():
            assert directory.is_served()
    finally:
        os.umask(before)
    assert {mode(path) for path in directory.path.iterdir()} == {0o600}
    assert mode(directory.path) == 0o700


def test_a_folder_of_other_things_is_not_closed(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    folder.chmod(0o755)
    with pytest.raises(StateDirError, match=r"is open to others \(mode 0755\) and holds other"):
        StateDir(folder).create()
    assert mode(folder) == 0o755
    folder.chmod(0o700)
    StateDir(folder).create()


def test_a_lock_that_is_a_link(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    (tmp_path / "elsewhere").touch()
    (directory.path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateDirError, match="lock is a symbolic link; remove it"), directory.lock():
        raise AssertionError("it was taken")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [".", "lock", "admin.token"])
def test_what_belongs_to_somebody_else(tmp_path: Path, name: str) -> None:
    directory = StateDir(tmp_path / "state")
    use(directory)
    os.chown(directory.path / name, 65534, -1)
    with pytest.raises(StateDirError, match=r"belongs to user .*, not to you; "):
        use(directory)


def test_who_looks_does_not_keep_the_lock(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    assert not directory.is_served()
    with directory.lock():
        assert directory.is_served()
        with (directory.path / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("lost", "others", "told"),
    [("removed", ("first", "last", "older"), "4 jobs "), ("emptied", (), r"1 job \(kept\)")],
)
def test_an_empty_database_beside_jobs_is_no_new_store(
    tmp_path: Path, lost: str, others: tuple[str, ...], told: str
) -> None:
    directory = StateDir(tmp_path / "state")
    with scheduler_on(directory.path) as scheduler:
        scheduler.submit(toy("kept"))
        scheduler.control.cancel("kept")
    for name in ("kept", *others):
        directory.checkpoints(name).mkdir(parents=True, exist_ok=True)
    whole = directory.database.read_bytes()
    directory.database.unlink()
    if lost == "emptied":
        directory.database.touch()
    for _ in range(2):  # nor has the first try made one of it
        says = f"is empty, but .*/jobs holds the files of {told}"
        with pytest.raises(StateDirError, match=says):
            scheduler_on(directory.path).start()
    directory.database.write_bytes(whole)
    with scheduler_on(directory.path) as scheduler:
        assert list(scheduler.jobs()) == ["kept"]


def test_a_scheduler_keeps_its_name_in_a_cluster(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    directory.create()
    name = directory.identity("ray")
    assert name == StateDir(directory.path).identity("ray") != directory.identity("slurm")
    assert mode(directory.path / "ray.id") == 0o600
    (directory.path / "ray.id").write_text("an other\n")
    with pytest.raises(StateDirError, match=r"ray\.id contains 'an other'.*restore it"):
        directory.identity("ray")
    (directory.path / "slurm.id").unlink()
    (directory.path / "slurm.id").mkdir()
    with pytest.raises(StateDirError, match=r"slurm\.id cannot be read"):
        directory.identity("slurm")
