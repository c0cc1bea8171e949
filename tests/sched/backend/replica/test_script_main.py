"""Modules and commands as entry points: Python's own `-m` is the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipollux_agent import agent, script_main

PRINTS = """
import json, sys
from . import other
spec = __spec__
print(json.dumps([__name__, __package__, __file__, spec.name, spec.origin, sys.argv, sys.path,
                  sys.modules["__main__"].__dict__ is globals(), other.VALUE]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "other": "VALUE = 7\n",
        "prints": PRINTS,
        "__main__": PRINTS,
        "raises": "def f():\n    raise ValueError('no such thing')\nf()\n",
        "broken": "x = = 1\n",
        "lacks": "import nowhere_to_be_found\n",
        "inner/__init__": "raise RuntimeError('of the package')\n",
        "inner/part": "",
        "leaves": "import sys\nsys.exit(5)\n",
    }.items():
        (package / f"{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", *words],
        cwd=folder,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("module", ["package.prints", "package"])
def test_a_module_sees_what_it_sees_under_python(folder: Path, module: str) -> None:
    ours = run(folder, [script_main.__file__, "-m", module, "--lr", "0.1", "-m"])
    theirs = run(folder, ["-m", module, "--lr", "0.1", "-m"])
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)


@pytest.mark.parametrize(
    ("module", "status", "types", "loaded"),
    [
        ("package.raises", 1, "ValueError", True),
        ("package.broken", 1, "SyntaxError", False),
        ("package.lacks", 1, "ModuleNotFoundError", True),
        ("package.missing", 1, "ModuleNotFoundError", False),
        ("nowhere.missing", 1, "ModuleNotFoundError", False),
        ("package.inner.part", 1, "RuntimeError", True),
        ("package.leaves", 5, None, None),
    ],
)
def test_how_a_module_ended(
    folder: Path, module: str, status: int, types: str | None, loaded: bool | None
) -> None:
    ended = run(folder, [script_main.__file__, "-m", module])
    assert ended.returncode == status
    kept = folder / "error.json"
    if types is None:
        assert not kept.exists()
        return
    found: dict[str, Any] = json.loads(kept.read_text())
    assert (found["types"][0], found["loaded"]) == (types, loaded)


def test_a_command_gets_its_arguments_and_this_python(folder: Path) -> None:
    command = 'python -c "import sys; print(sys.prefix)"; echo "$1|$2|$#|$0"; exit 7'
    ended = run(folder, [script_main.__file__, "-c", command, "a b", "-c"])
    assert ended.returncode == 7
    assert ended.stdout.splitlines() == [sys.prefix, "a b|-c|2|sh"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "status", "types"),
    [
        (["-m", "package.prints", "--fast"], 0, None),
        (["-m", "package.raises"], 1, "ValueError"),
        (["-c", 'test "$RANK$WORLD_SIZE$1" = 01x', "x"], 0, None),
        (["-c", "exit 9"], 9, None),
    ],
)
def test_under_torchrun(folder: Path, words: list[str], status: int, types: str | None) -> None:
    result = folder / "result.json"
    rendezvous = ("--rdzv-endpoint=127.0.0.1:0", "--rdzv-backend=pipollux", "--rdzv-conf=rank=0")
    sizes = ("--nnodes=1", "--nproc-per-node=1", "--max-restarts=0")
    ended = subprocess.run(
        [sys.executable, "-P", str(agent.__file__), *rendezvous, *sizes, "--", *words],
        cwd=folder,
        env={
            **os.environ,
            "PIPOLLUX_RESULT_FILE": str(result),
            "PIPOLLUX_STATE_DIR": str(folder),
            "PIPOLLUX_JOB_ID": "toy",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    error = json.loads(result.read_text())["error"]
    assert (None if error is None else error["types"][0]) == types
