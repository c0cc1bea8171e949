"""The folder in which replicas that come later find a job."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.membership import Announcement, JobPlace, JoiningReplica, Membership
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.resize.__main__ import main
from pipollux_hybrid.resize.rendezvous_folder import SILENCE, RendezvousFolder

PLACE = JobPlace(epoch=3, loop=1)
BULLETIN = Announcement(Membership(4, ("a", "b")), PLACE, (2, 1), schedule="gpipe")


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_posted_is_read(tmp_path: Path) -> None:
    job, other = RendezvousFolder(tmp_path / "folder"), RendezvousFolder(tmp_path / "folder")
    assert other.announcement() is None
    job.post(BULLETIN)
    assert other.announcement() == BULLETIN
    joining_replica = JoiningReplica("c", "host", waiting_to_join=True, place=PLACE)
    other.apply(joining_replica)
    assert job.joining() == [joining_replica]
    job.propose(Membership(5, ("a", "b", "c")))
    assert other.proposal() == Membership(5, ("a", "b", "c"))
    job.announce_store(5, "host", 1234)
    assert other.find_store(5) == ("host", 1234)
    assert other.find_store(6) is None
    job.ask_to_leave("b")
    assert other.leavers() == {"b"}
    other.withdraw("c")
    other.withdraw("b")
    assert (job.joining(), job.leavers()) == ([], set())


def test_who_leads_in_the_place_of_another_is_no_other_job(tmp_path: Path) -> None:
    """Should that one come back, neither ends for it; a job that began in between does."""
    first, second, other = (RendezvousFolder(tmp_path) for _ in range(3))
    assert first.claim(None)
    for _ in range(9):
        first.post(BULLETIN)
    second.post(BULLETIN)
    first.post(BULLETIN)
    second.post(BULLETIN)
    (tmp_path / "claim-1").unlink()
    assert other.claim(None)
    other.post(BULLETIN)
    second.post(BULLETIN)
    with pytest.raises(ConfigurationError, match="a job runs there already, whose files had"):
        other.post(BULLETIN)
    second.post(BULLETIN)


def test_one_that_has_joined_may_have_been_asked_to_leave(tmp_path: Path) -> None:
    """Whoever enters a membership takes back that it wants to join, and not a wish of others."""
    folder = RendezvousFolder(tmp_path)
    folder.apply(JoiningReplica("c", "host"))
    folder.ask_to_leave("c")
    folder.withdraw_application("c")
    assert (folder.joining(), folder.leavers()) == ([], {"c"})


def test_who_does_not_write_any_more_is_dead(tmp_path: Path) -> None:
    """Clocks of hosts differ: what counts is that a file changes."""
    clock = Clock()
    job, other = RendezvousFolder(tmp_path), RendezvousFolder(tmp_path, clock)
    assert RendezvousFolder(tmp_path).job_is_silent(), "there is none"
    job.post(BULLETIN)
    assert not other.job_speaks(), "it may have been written long ago"
    assert not other.job_is_silent()
    clock.now += SILENCE
    assert not other.job_is_silent()
    job.post(BULLETIN)
    assert other.job_speaks()
    clock.now += SILENCE
    assert not other.job_is_silent()
    clock.now += 1.0
    assert other.job_is_silent()

    job.apply(JoiningReplica("c", "host"))
    assert [x.replica for x in other.joining()] == ["c"]
    clock.now += SILENCE + 1.0
    assert other.joining() == []
    job.apply(JoiningReplica("c", "host"))
    assert [x.replica for x in other.joining()] == ["c"]


def test_one_of_two_begins_a_job_in_a_folder(tmp_path: Path) -> None:
    first, second = RendezvousFolder(tmp_path), RendezvousFolder(tmp_path)
    assert first.last_claim() is None
    assert first.claim(None)
    assert not second.claim(None)
    first.post(BULLETIN)
    first.apply(JoiningReplica("c", "host"))
    assert second.claim(second.last_claim())
    assert second.announcement() is None, "what the job before has left is removed"
    assert second.joining() == []
    assert not first.claim("claim-1")


@pytest.mark.parametrize("name", ["job.json", "proposal.json", "joining-c.json", "store-1.json"])
@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"beat": "x"}', '{"number": "x", "replicas": 3}', "\0"]
)
def test_what_cannot_be_read_is_not_there(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    found = RendezvousFolder(tmp_path)
    assert (found.announcement(), found.proposal(), found.joining()) == (None, None, [])
    assert found.find_store(1) is None
    assert found.job_is_silent() == (name != "job.json" or not content.startswith("{"))


def test_a_name_that_is_no_claim_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "claim-of-mine").touch()
    found = RendezvousFolder(tmp_path)
    assert found.last_claim() is None
    assert found.claim(None)
    assert found.last_claim() == "claim-1"


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="every host of the job can write to"):
        RendezvousFolder(tmp_path / "file")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipollux_hybrid.resize", *words],
        capture_output=True,
        text=True,
        check=False,
    )


LISTED = "a  replica 0\nb  replica 1\nc  waits to join, on host\n"


@pytest.mark.exhaustive
def test_the_command_is_that_of_the_module(tmp_path: Path) -> None:
    rendezvous = RendezvousFolder(tmp_path)
    rendezvous.post(BULLETIN)
    rendezvous.apply(JoiningReplica("c", "host", waiting_to_join=True))
    assert command(str(tmp_path)).stdout == LISTED


def test_the_command_lists_replicas_and_has_them_leave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rendezvous, folder = RendezvousFolder(tmp_path), str(tmp_path)
    assert main([folder]) == 1
    assert capsys.readouterr().err == f"no job runs in {tmp_path}\n"
    rendezvous.post(BULLETIN)
    rendezvous.apply(JoiningReplica("c", "host", waiting_to_join=True))
    assert main([folder]) == 0
    assert capsys.readouterr().out == LISTED
    assert main([folder, "leave", "b"]) == 0
    assert rendezvous.leavers() == {"b"}
    assert main([folder, "leave", "z"]) == 2
    assert capsys.readouterr().err == "z cannot leave: no such replica (there are a, b)\n"
    assert main([str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{tmp_path / 'none'}: there is no such folder; give the ")
    assert "python -m pipollux_hybrid.resize FOLDER" in told
    assert main([]) == 2, "it is not the present folder"
    assert capsys.readouterr().err.startswith("Lists the replicas of a job")


def test_joining_take_the_order_of_those_that_train() -> None:
    """Also where they say nothing of it: chunks show in the balance."""
    assert BULLETIN.order(2) == PipelineSchedule("gpipe")
    silent = replace(BULLETIN, schedule="")
    assert silent.order(2) == PipelineSchedule("1f1b")
    assert replace(silent, balance=(1, 1, 2, 1)).order(2) == PipelineSchedule("interleaved", 2)
    told = Announcement.from_json_object(BULLETIN.to_json_object())
    assert told.order(2) == BULLETIN.order(2)


def test_one_that_stood_still_posts_no_more_where_the_job_has_ended(tmp_path: Path) -> None:
    now = 0.0
    leader = RendezvousFolder(tmp_path, lambda: now)
    assert leader.claim(None)
    assert not leader.is_over(), "it has not posted yet"
    leader.post(BULLETIN)
    now += SILENCE + 1.0
    leader.post(BULLETIN)  # nobody has ended the job meanwhile
    other = RendezvousFolder(tmp_path)
    other.follow()
    assert not other.is_over()
    other.retract()
    assert leader.is_over()
    assert other.is_over()
    now += SILENCE + 1.0
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="stood still for 11 s, and the job there has"):
            leader.post(BULLETIN)
    assert RendezvousFolder(tmp_path).claim(None)
    assert leader.is_over()


def test_one_that_stood_still_posts_no_more_where_another_attempt_runs(tmp_path: Path) -> None:
    now = 0.0
    old, new = RendezvousFolder(tmp_path, lambda: now), RendezvousFolder(tmp_path)
    assert old.claim(None)
    for _ in range(9):
        old.post(BULLETIN)
    assert new.claim(new.last_claim())
    new.post(BULLETIN)
    now += SILENCE + 1.0
    with pytest.raises(ConfigurationError, match="was started again meanwhile"):
        old.post(BULLETIN)
    new.post(BULLETIN)
    old.retract()
    assert old.is_over()
    assert not new.is_over()
    assert new.announcement() == BULLETIN


def test_who_succeeds_the_leader_goes_on_counting(tmp_path: Path) -> None:
    leader, next_one, reader = (RendezvousFolder(tmp_path) for _ in range(3))
    assert leader.claim(None)
    next_one.follow()  # before anything was posted
    assert not next_one.is_over()
    for _ in range(3):
        leader.post(BULLETIN)
    next_one.follow()
    reader.job_speaks()
    next_one.post(BULLETIN)
    assert reader.job_speaks()
    assert not leader.is_over()
