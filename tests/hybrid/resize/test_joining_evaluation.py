"""A replica that joins a job which evaluates: on its way there, and where it finds the job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.extent import first
from tests.programs import Forked
from tests.waiting import until

SCRIPT = Path(__file__).with_name("evaluating_job.py")


@pytest.fixture
def environment(tmp_path: Path, repository: Path, over: dict[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")]),
        "PIPOLLUX_RENDEZVOUS": str(tmp_path / "rendezvous"),
        "PIPOLLUX_PROGRESS": "0",
        "PIPOLLUX_HINTS_INTERVAL": "1000000",
        **over,
    }


def test_a_joining_replica_reads_the_totals_that_the_job_has_read(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """It reads them between two loops, where the docs evaluate, and before the first epoch."""
    environment["PIPOLLUX_CHECKPOINT_DIR"] = str(tmp_path / "checkpoints")
    with Forked(SCRIPT, [str(tmp_path)], environment) as job:
        until(lambda: (tmp_path / "epoch-0").exists() or job.poll() is not None, "an epoch")
        with Forked(SCRIPT, [str(tmp_path)], {**environment, "JOINS": "1"}) as joining:
            assert joining.wait() == 0, joining.errors
            assert job.wait() == 0, job.errors
    theirs, ours = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    assert len(ours) > 2, "it has run an epoch before it took part"
    assert ours == {epoch: theirs[epoch] for epoch in ours}


@pytest.mark.exhaustive
def test_a_rendezvous_that_disappears_is_made_again(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Else the replica that comes next would begin a job of its own."""
    with Forked(SCRIPT, [str(tmp_path)], environment) as job:
        until(lambda: (tmp_path / "rendezvous" / "job.json").exists(), "the job is there")
        # At once, whatever the job is writing there.
        (tmp_path / "rendezvous").rename(tmp_path / "gone")
        until(lambda: (tmp_path / "rendezvous" / "job.json").exists(), "it is there again")
        with Forked(SCRIPT, [str(tmp_path)], environment) as joining:
            assert joining.wait() == 0, joining.errors
            assert job.wait() == 0, job.errors
    assert (tmp_path / "seen-1.json").exists(), "they have trained together"


@pytest.mark.exhaustive
def test_a_job_that_began_while_the_rendezvous_was_gone_ends(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """The first one, which is frozen meanwhile and cannot make it again, goes on."""
    posted = tmp_path / "rendezvous" / "job.json"
    with Forked(SCRIPT, [str(tmp_path)], environment) as job:
        until(lambda: json.loads(posted.read_text())["balance"], "it", ignored=(OSError,))
        until(lambda: json.loads(posted.read_text())["beat"] > 4, "it has been there a while")
        job.send_signal(signal.SIGSTOP)
        # At once, whatever the job is writing there.
        (tmp_path / "rendezvous").rename(tmp_path / "gone")
        (tmp_path / "second").mkdir()
        with Forked(SCRIPT, [str(tmp_path / "second")], environment) as second:
            until(lambda: posted.exists() or second.poll() is not None, "the second is there")
            job.send_signal(signal.SIGCONT)
            assert second.wait() == 1
            assert "a job runs there already, whose files had disappeared" in second.errors
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.errors


@pytest.mark.parametrize(
    "edit",
    first(
        1,
        [
            ("return x * 1.5", "return x * 2.5", "code of Scale '1' is "),
            (
                "self.offset = 0.25",
                "self.offset = 0.5",
                "offset of Scale '1' is 0.25 in the job and 0.5 here",
            ),
            (
                "sums = pipollux.Accumulator()",
                "sums, more = pipollux.Accumulator(), pipollux.Accumulator()",
                "the list of states is accumulator-start-0.pt, ",
            ),
            (
                "HybridParallel(module, optimizer)",
                "HybridParallel(module, optimizer, num_stages=2)",
                "it asks for num_stages=2, and the layers of the job are cut as [2]",
            ),
            (
                "batch_size=4, shuffle=True",
                "batch_size=2, shuffle=True",
                "loader-start-0.json is Adapt",
            ),
        ],
    ),
)
def test_a_replica_that_runs_other_code_is_told_what_differs(
    tmp_path: Path, environment: dict[str, str], edit: tuple[str, str, str]
) -> None:
    """Its layers have the same parameters, so nothing else would tell."""
    line, instead, difference = edit
    other = tmp_path / "other.py"
    other.write_text(SCRIPT.read_text().replace(line, instead))
    with Forked(SCRIPT, [str(tmp_path)], environment) as job:
        until(lambda: (tmp_path / "epoch-0").exists() or job.poll() is not None, "an epoch")
        with Forked(other, [str(tmp_path)], environment) as joining:
            assert joining.wait() == 1
            said = joining.errors.splitlines()[-1]
            assert "ConfigurationError: this replica cannot join the job: " in said
            assert difference in said
            assert "; start it with the same " in said
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.errors
