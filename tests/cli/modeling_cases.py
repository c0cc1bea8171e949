"""What the tests of `pipollux fit` and `pipollux predict` share: the program, and exact data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import GoodputFunction, PerfParams
from pipollux_sched.cli import main

PROGRAM = [sys.executable, "-W", "error", "-c", "from pipollux_sched.cli import main; main()"]

ONE_STAGE = PerfParams(0.02, 0.003, 0.05, 0.004, 0.02, 0.002, 1.6)
TWO_STAGES = PerfParams(
    0.03, 0.004, 0.06, 0.005, 0.02, 0.003, 1.5, (0.15, 0.2), (0.3, 0.35), overlap=0.8
)


def pipollux(
    *args: str | Path, cwd: Path | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    return subprocess.run(
        [*PROGRAM, *map(str, args)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=120,
        cwd=cwd,
        check=False,
    )


def here(capsys: pytest.CaptureFixture[str], *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, which takes a tenth of the time."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([*map(str, args)])
    said = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(args, end.value.code, said.out, said.err)


def complaints(done: subprocess.CompletedProcess[str], code: int = 2) -> list[str]:
    """The errors, after checking that there is nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("Error: ") for line in lines), done.stderr
    return [line.removeprefix("Error: ") for line in lines]


def exact_rows(
    params: PerfParams, allocations: Iterable[tuple[int, int]] = ((1, 1), (1, 2), (2, 2), (2, 4))
) -> Iterator[dict[str, Any]]:
    """Measurements of a job that is exactly as the parameters have it."""
    model = GoodputFunction(params, (1.0, 1.0), 1)
    num_stages = params.num_stages
    for num_nodes, num_replicas in allocations:
        for micro_bsz in (4, 8, 16, 32, 64):
            for num_microbatches in (1, 4) if num_stages > 1 else (1,):
                atomic_bsz = micro_bsz * num_microbatches
                times = model.step_time(num_nodes, num_replicas, atomic_bsz, 0, num_microbatches)
                compute = params.alpha_c + params.beta_c * micro_bsz
                yield {
                    "num_nodes": num_nodes,
                    "num_replicas": num_replicas,
                    "atomic_bsz": atomic_bsz,
                    "num_microbatches": num_microbatches,
                    "num_stages": num_stages,
                    "accum_step_time": times.accum_time,
                    "optim_step_time": times.optim_time,
                    "forward": [share * compute for share in params.forward_shares],
                    "backward": [share * compute for share in params.backward_shares],
                }


def lines(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as a file of JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)
