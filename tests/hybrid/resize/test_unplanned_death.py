"""Replicas that are killed while the others train."""

from __future__ import annotations

import itertools
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.extent import first
from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.changing_training import SIZE
from tests.waiting import until

SCRIPT = Path(__file__).with_name("dying_training.py")
LOST = re.compile(
    r"pipollux: (replicas? .*) (was|were) lost at step (\d+); (\d+) replicas? goe?s? ?on from step "
    r"(\d+), after"
)
MakeJob = Callable[..., "DyingJob"]


class DyingJob(ChangingJob):
    """Replicas of a script in which some die."""

    script = SCRIPT

    def finish(self) -> None:
        """Return when all replicas have ended; where one is one process, each well or killed."""
        wait = self.wait_for if self.processes == 1 else until
        wait(lambda: all(x.poll() is not None for x in self.programs), "the end")

    def done(self) -> dict[int, list[dict[str, Any]]]:
        """Return what replicas had after each step that came about, in the order of ranks."""
        found = defaultdict(list)
        for line in self.lines():
            if line.get("ends") and line["step"] == line["begins"] + 1:
                found[line["step"]].append(line)
        return {
            step: sorted(found[step], key=lambda x: (x["rank"], x["stage"]))
            for step in sorted(found)
        }

    def check_done(self, ended: int | None = None) -> list[tuple[int, int]]:
        """Check that every sample was taken once, and that replicas were equal after each step.

        Args:
            ended: Replicas that came to the end; None: those of the last step.

        Returns:
            The first steps with another number of replicas, and that number.
        """
        changes: list[tuple[int, int]] = []
        replicas: dict[int, int] = {}
        for step, lines in self.done().items():
            (replicas[step],) = {line["replicas"] for line in lines}
            told = Counter(line["rank"] for line in lines)
            whole = sum(count == self.processes for count in told.values())
            assert whole, step
            for stage in range(self.processes):
                for what in ("parameters", "average", "rate", "count", "scale"):
                    same = {line[what] for line in lines if line["stage"] == stage}
                    assert len(same) == 1, (step, stage, what)
            if not changes or changes[-1][1] != replicas[step]:
                changes.append((step, replicas[step]))
        for epoch, stage in itertools.product(range(self.epochs), range(self.processes)):
            taken = Counter(
                number
                for x in self.lines()
                if "takes" in x and (x["epoch"], x["stage"]) == (epoch, stage)
                if replicas.get(x["begins"] + 1) == x["replicas"]
                for number in x["takes"]
            )
            assert taken == Counter(range(SIZE))
        found = len(list(self.results.glob("ended-*")))
        assert found == (changes[-1][1] if ended is None else ended) * self.processes
        return changes

    def said(self) -> list[tuple[str, int, int, int]]:
        """Return what the replicas said of those that were lost."""
        found = [LOST.findall(program.errors) for program in self.programs]
        return [(x[0], int(x[2]), int(x[3]), int(x[4])) for each in found for x in each]


@pytest.fixture
def make_job(tmp_path: Path, repository: Path, over: dict[str, str]) -> Iterator[MakeJob]:
    made: list[DyingJob] = []

    def make(**settings: str) -> DyingJob:
        made.append(DyingJob(tmp_path / f"job-{len(made)}", repository, **over, **settings))
        return made[-1]

    yield make
    for job in made:
        with job:
            pass


@pytest.mark.usual_over_stand_in(alone=True)  # the test of restarts is over gloo
@pytest.mark.parametrize("point", first(1, ["backward", "forward", "between", "step", "after"]))
@pytest.mark.parametrize("who", first(1, ["0 of 3", "1 of 2", "0 of 2", "2 of 3"]))
def test_one_dies_and_every_sample_is_taken_once(make_job: MakeJob, who: str, point: str) -> None:
    rank, before = map(int, who.split(" of "))
    job = make_job(DIES=f"{rank}:7:{point}", EPOCHS="1")
    job.begin(before)
    job.finish()
    codes = [program.poll() for program in job.programs]
    assert codes == [-signal.SIGKILL if r == rank else 0 for r in range(before)], job.errors()
    changes = job.check_done()
    assert changes[0] == (1, before)
    assert [replicas for _, replicas in changes] == [before, before - 1]
    assert changes[1][0] in (8, 9)
    ((_, _, left, step),) = job.said()
    assert left == before - 1
    assert step + 1 == changes[1][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", ["forward", "between", "after"])
def test_one_whose_script_fails_ends_at_once(make_job: MakeJob, point: str) -> None:
    """It does not wait for the others to come to their end, which wait for it."""
    job = make_job(DIES=f"1:7:{point}", OPTIONS="fails", EPOCHS="1")
    job.begin(3)
    until(lambda: all(x.poll() is not None for x in job.programs), "the end")
    assert [program.poll() for program in job.programs] == [0, 1, 0], job.errors()
    assert job.errors()[1].endswith("ValueError: the script fails\n")
    assert [replicas for _, replicas in job.check_done()] == [3, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dies", ["0:7:backward,2:7:forward", "0:7:forward,1:9:step"])
def test_two_of_three_die(make_job: MakeJob, dies: str) -> None:
    job = make_job(DIES=dies, EPOCHS="1")
    job.begin(3)
    job.finish()
    assert job.check_done()[-1][1] == 1
    assert sorted(program.poll() or 0 for program in job.programs) == [-9, -9, 0]


@pytest.mark.exhaustive
def test_those_who_wait_for_others_in_the_ring_learn_of_it(make_job: MakeJob) -> None:
    job = make_job(DIES="0:7:backward")
    job.begin(5)
    job.finish()
    assert job.check_done() == [(1, 5), (8, 4)]


@pytest.mark.parametrize("stages", first(1, ["2", "1"]))
@pytest.mark.parametrize("kind", first(1, ["indices", "accumulation", "text", "stream", "workers"]))
@pytest.mark.parametrize("who", first(1, ["1 of 2", "0 of 3", "2 of 3"]))
def test_a_death_is_what_a_restart_of_those_left_would_be_to_the_last_bit(
    make_job: MakeJob, tmp_path: Path, kind: str, stages: str, who: str
) -> None:
    rank, before = map(int, who.split(" of "))
    settings = {"DATA": kind, "STAGES": stages, "OPTIONS": "scaler"}
    settings["EPOCHS"] = "1" if kind == "indices" else "2"
    resized = make_job(**settings, DIES=f"{rank}:7:forward")
    resized.begin(before)
    resized.finish()
    assert resized.check_done() == [(1, before), (8, before - 1)], resized.errors()

    checkpoints = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    restarted = make_job(**settings, PIPOLLUX_RENDEZVOUS="", **checkpoints)
    restarted.stop_at(5, before)
    restarted.begin(before - 1)
    restarted.finish()
    assert restarted.check_done() == [(1, before), (8, before - 1)]
    ours, theirs = resized.done(), restarted.done()
    assert ours.keys() == theirs.keys()
    for step, lines in ours.items():  # one after the other: a failure names the first
        for line, other in zip(lines, theirs[step], strict=True):
            assert line == other, step


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", first(1, ["indices", "accumulation", "text", "stream", "workers"]))
def test_those_to_whom_a_step_came_through_win(make_job: MakeJob, kind: str) -> None:
    """The sums of step 8 come through to one of two that are left, and it is not done again."""
    job = make_job(DATA=kind, DIES="0:7:between", OPTIONS="behind-1", BEHIND_AT="7")
    job.begin(3)
    job.finish()
    assert job.check_done() == [(1, 3), (9, 2)], job.errors()


@pytest.mark.exhaustive
def test_those_to_whom_the_last_step_of_a_loop_came_through_wait_for_the_others(
    make_job: MakeJob,
) -> None:
    job = make_job(DIES="0:17:between", OPTIONS="behind-2", BEHIND_AT="17")
    job.begin(3)
    job.finish()
    assert job.check_done() == [(1, 3), (19, 2)], job.errors()


@pytest.mark.parametrize("point", first(1, ["evaluation", "outside"]))
def test_one_dies_outside_of_training(make_job: MakeJob, point: str) -> None:
    job = make_job(DIES=f"1:18:{point}", EPOCHS="2")
    job.begin(3)
    job.finish()
    assert job.check_done() == [(1, 3), (19, 2)], job.errors()


@pytest.mark.exhaustive
def test_one_dies_after_its_last_step(make_job: MakeJob) -> None:
    """Nobody takes another step; what is under way at the end of the epochs is brought in."""
    job = make_job(DIES="1:54:over")
    job.begin(3)
    job.finish()
    assert job.check_done(ended=2) == [(1, 3)], job.errors()
    assert [found[1:] for found in job.said()] == [(54, 2, 54)]


@pytest.mark.exhaustive
def test_another_one_dies_while_those_that_are_left_meet(make_job: MakeJob) -> None:
    job = make_job(DIES="0:7:backward,1:0:forming")
    job.begin(3)
    job.finish()
    changes = job.check_done()
    assert changes[0] == (1, 3)
    assert changes[-1][1] == 1


@pytest.mark.parametrize(
    ("option", "point", "why"),
    [
        pytest.param(
            *("accumulates", "forward", "an Accumulator holds amounts that were not synchronized"),
            marks=pytest.mark.exhaustive,
        ),
        ("clamps", "forward", "the script has changed parameters in the step that is void"),
        pytest.param(
            *(
                "sharded",
                "forward",
                "each replica held the optimizer's state of its own parameters",
            ),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("sharded", "step", r"each replica held the optimizer's state of its own parameters"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_cannot_be_had_again_ends_the_job_and_says_why(
    make_job: MakeJob, option: str, point: str, why: str
) -> None:
    job = make_job(DIES=f"1:7:{point}", OPTIONS=option)
    job.begin(3)
    codes = [program.wait() for program in job.programs]
    assert codes == [1, -signal.SIGKILL, 1]
    for program in job.programs[::2]:
        assert f"cannot continue without a restart: {why}" in program.errors
    job.programs.clear()


@pytest.mark.exhaustive
def test_a_collective_that_cannot_end_delays_nobody(make_job: MakeJob) -> None:
    """Groups close when their collectives have ended, here after the timeout of 600 s."""
    job = make_job(DIES="1:7:forward", OPTIONS="accumulates,waits", PIPOLLUX_TIMEOUT="600")
    job.begin(3)
    assert job.programs[1].wait() == -signal.SIGKILL
    assert [program.wait(60.0) for program in job.programs[::2]] == [1, 1], job.errors()
    assert all("cannot continue without a restart: an Accum" in x for x in job.errors()[::2])
    job.programs.clear()


@pytest.mark.exhaustive
def test_one_dies_while_another_one_joins(make_job: MakeJob) -> None:
    """The joining replica joins those that are left, at the next opportunity."""
    job = make_job(DIES="1:-1:syncing", CHANGES="5", CHANGES_IF_ALONE="20")
    job.begin(2)
    job.wait_until_at(5)
    job.add()
    job.finish()
    assert [replicas for _, replicas in job.check_done()] == [2, 1, 2], job.errors()
    left = {path.name for path in job.rendezvous.folder.iterdir() if path.name[0] != "."}
    assert left <= {"proposal.json"}


@pytest.mark.exhaustive
def test_one_that_was_asked_to_leave_does_so_after_another_has_died(make_job: MakeJob) -> None:
    """All are about to change when it dies; when step 8 is done again they wait for it anew."""
    job = make_job(DIES="0:8:forward", CHANGES="7,8")
    job.begin(3)
    job.wait_until_at(7)
    job.ask_to_leave(2, 3)
    job.finish()
    *before, (_, left) = job.check_done()
    assert before == [(1, 3), (9, 2)], job.errors()
    assert left == 1


@pytest.mark.exhaustive
def test_one_dies_while_a_checkpoint_is_written(make_job: MakeJob, tmp_path: Path) -> None:
    settings = {"PIPOLLUX_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    settings["PIPOLLUX_CHECKPOINT_INTERVAL"] = "0.001"
    job = make_job(DIES="1:-1:syncing", **settings)
    job.begin(3)
    job.finish()
    (_, before), (_, after) = job.check_done()
    assert (before, after) == (3, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("found_by", ["PIPOLLUX_TIMEOUT", "PIPOLLUX_FROZEN_TIMEOUT"])
def test_one_that_is_frozen_is_left_behind_and_ends(make_job: MakeJob, found_by: str) -> None:
    job = make_job(**{found_by: "6"})
    (job.results / "hold-7").touch()
    job.begin(3)
    job.wait_for(lambda: len(list(job.results.glob("reached-7-*"))) == 3, "step 7")
    frozen = job.programs.pop(1)
    frozen.send_signal(signal.SIGSTOP)
    (job.results / "hold-7").unlink()
    job.wait_for(lambda: any(LOST.search(x) for x in job.errors()), "they go on")
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait() == 1
    assert "have continued without this one" in frozen.errors
    assert re.search(r"lost its peers .*: this process stood still for \d+ s", frozen.errors)
    assert "has ended" not in frozen.errors, "they go on"
    job.finish()
    assert job.check_done() == [(1, 3), (8, 2)], job.errors()
