"""A replica that joins runs the code between loops on its way, as the job did."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.programs import Forked
from tests.waiting import until

SCRIPT = Path(__file__).with_name("evaluating_job.py")


def test_a_joining_replica_reads_the_totals_that_the_job_has_read(
    tmp_path: Path, repository: Path
) -> None:
    """It reads them between two loops, where the docs evaluate, and before the first epoch."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(repository), os.environ.get("PYTHONPATH", "")]),
        "PIPOLLUX_RENDEZVOUS": str(tmp_path / "rendezvous"),
        "PIPOLLUX_PROGRESS": "0",
        "PIPOLLUX_HINTS_INTERVAL": "1000000",
    }
    with Forked(SCRIPT, [str(tmp_path)], environment) as job:
        until(lambda: (tmp_path / "epoch-0").exists() or job.poll() is not None, "an epoch")
        with Forked(SCRIPT, [str(tmp_path)], {**environment, "JOINS": "1"}) as joining:
            assert joining.wait() == 0, joining.errors
            assert job.wait() == 0, job.errors
    theirs, ours = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    assert len(ours) > 2, "it has run an epoch before it took part"
    assert ours == {epoch: theirs[epoch] for epoch in ours}
