"""`benchmarks/gpu/day.py`: parts with limits, and results as JSON and Markdown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.extent import first
from tests.waiting import until

HANGING = """
import subprocess, sys
print("| a | b |\\n|---|---|\\n| 1 | 2 |", flush=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""
PARTS = """
import sys
import day

day.GRACE = 1.0
day.LEAST = 0.0
day.PATIENCE = {"cpu": 1.0}
python = [sys.executable, "-I", "-S", "-c"]
day.PARTS = {
    "fails": day.Part("Fails", [], [*python, "raise SystemExit('no | memory')"], 60),
    "hangs": day.Part("Hangs", [], [*python, HANGING, sys.argv[1]], 10, "fails"),
    "gpu": day.Part("Nothing here", [], [], 60),
}
if sys.argv[3:]:
    probe = day.script("probes.py", "states", "--device", "cpu")
    day.PARTS = {"states": day.Part("A probe", [], probe, 120), **day.PARTS}
sys.exit(day.main(["--device", "cpu", "--out", sys.argv[2]]))
"""


@pytest.fixture
def tables(
    tmp_path: Path, repository: Path, probes: bool
) -> tuple[dict[str, Any], list[list[str]], Path]:
    """A day on the CPU, of three parts or with a probe: its JSON, the rows of the tables of its
    page, and a file with the process that a part has left behind.
    """
    left = tmp_path / "left"
    program = PARTS.replace("HANGING", repr(HANGING))
    done = subprocess.run(
        [sys.executable, "-c", program, str(left), str(tmp_path), *["states"] * probes],
        env={**os.environ, "PYTHONPATH": str(repository / "benchmarks" / "gpu")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "day.json").read_text())
    page = (tmp_path / "day.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    assert "not for publication" in page.splitlines()[0]
    return found, rows, left


@pytest.mark.parametrize("probes", first(1, [False, True]))
@pytest.mark.exhaustive
def test_a_part_that_fails_stops_no_other_and_none_outlives_its_limit(
    tables: tuple[dict[str, Any], list[list[str]], Path], probes: bool
) -> None:
    found, rows, left = tables
    assert found["for_publication"] is False
    assert {name: part["status"] for name, part in found["parts"].items()} == {
        **({"states": "passed"} if probes else {}),
        "fails": "exit status 1",
        "hangs": "not done within 10 s",
        "gpu": "needs a GPU",
    }
    if probes:
        states = found["parts"]["states"]["results"]["values"]["states"]
        assert [rank["right"] for rank in states["ranks"].values()] == [True, True]
        assert ["states ranks 0 right", "True"] in rows
    assert found["parts"]["fails"]["errors"] == ["no | memory"]
    (table,) = found["parts"]["hangs"]["results"]["tables"]
    assert table == {"columns": ["a", "b"], "rows": [["1", "2"]]}
    assert ["a", "b"] in rows
    assert ["1", "2"] in rows
    until(lambda: not psutil.pid_exists(int(left.read_text())), "what the part left is ended")
