"""A job saves where nothing else is: everywhere else is refused when it is submitted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipollux_sched.spec.checkpoint_folder import check_checkpoint_folder
from pipollux_sched.spec.job import JobSpec, SpecError
from tests.sched.supervised import SCRIPT, Service, detail


def check(folder: Path | str, state: Path, *others: tuple[str, str]) -> None:
    job = JobSpec(name="job1", script=SCRIPT, checkpoint_dir=str(folder))
    check_checkpoint_folder(job, state, others)


def test_folders_that_users_give(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (tmp_path / "empty").mkdir()
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    (tmp_path / "used" / "checkpoint-00000042").mkdir(parents=True)
    (tmp_path / "used" / "notes.txt").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for folder in ("fresh/in/fresh", "empty", "disk", "used", "link", "stateful"):
        check(tmp_path / folder, state, ("other", str(tmp_path / "others")))
    check("/dev/shm/pipollux/job1", state)
    check(state / "jobs" / "job1" / "checkpoints", state)


@pytest.mark.parametrize(
    "folder",
    ["/", "/etc", "/etc/pipollux", "/usr/local/lib", "/proc/self", "/dev", "/sys", "/var/log/jobs"],
)
def test_the_operating_systems(folder: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    for given in (Path(folder), link):
        with pytest.raises(SpecError, match="belongs to the operating system; give a folder of"):
            check(given, tmp_path / "state")


def test_the_state_directory(tmp_path: Path) -> None:
    state = tmp_path / "a" / "state"
    for folder in (state, state / "jobs" / "other" / "checkpoints", state / "new", tmp_path):
        with pytest.raises(SpecError, match="a part of the scheduler's state directory"):
            check(folder, state)


def test_another_jobs(tmp_path: Path) -> None:
    (tmp_path / "its").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "its")
    state, other = tmp_path / "state", ("other", str(tmp_path / "its"))
    for given in (tmp_path / "its", tmp_path / "link"):
        with pytest.raises(SpecError, match=r"is job 'other''s; give each job its own folder"):
            check(given, state, other)
    for given in (tmp_path / "its" / "inner", tmp_path):
        with pytest.raises(SpecError, match=r"job 'other''s .*its contain each other"):
            check(given, tmp_path.parent / "state", other)


def test_what_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (tmp_path / "file").touch()
    (tmp_path / "home" / "thesis").mkdir(parents=True)
    (tmp_path / "home" / "checkpoint-500").mkdir()  # another program's
    with pytest.raises(SpecError, match="climbs out of a folder by"):
        check(f"{tmp_path}/a/../b", state)
    for folder in ("file", "file/inner"):
        with pytest.raises(SpecError, match=r"as .*file is a file; give another"):
            check(tmp_path / folder, state)
    with pytest.raises(SpecError, match="holds 'checkpoint-500' and no checkpoint; give an empty"):
        check(tmp_path / "home", state)
    # What the job itself has left there, whatever it is called, is not in its way.
    check(tmp_path / "home", state, ("job1", str(tmp_path / "home")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(SpecError, match=r"as .*closed is not writable for the scheduler"):
        check(tmp_path / "closed" / "job1", tmp_path / "state")


def test_a_submission(tmp_path: Path) -> None:
    """The folder is relative to the job's; a job that failed goes on in the one it has used."""
    with Service(tmp_path / "state") as service:
        body = {"script": SCRIPT, "working_dir": str(tmp_path)}
        for folder, reason in (
            ("../../../../../../../../etc", "climbs"),
            ("/etc", "operating system"),
            ("state/jobs", "state directory"),
        ):
            answer = service.admin.post(
                "/jobs", json={"name": "a", **body, "checkpoint_dir": folder}
            )
            assert answer.status_code == 422
            assert reason in detail(answer)
        for _ in range(2):
            service.submit("a", working_dir=str(tmp_path), checkpoint_dir="c")
            (tmp_path / "c").mkdir(exist_ok=True)
            (tmp_path / "c" / "epoch3.pt").touch()
            service.admin.delete("/jobs/a").raise_for_status()
