"""What shells are offered: commands, options, and the names of jobs and nodes in the store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_policies import POLICIES
from pipollux_sched.cli import main
from pipollux_sched.cli.completion import complete_policies
from tests.programs import run_pipollux

from .kept import Clock, kept
from .runner import PIPOLLUX


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory, which completion only reads."""
    folder = tmp_path_factory.mktemp("completion") / "state"
    with kept(folder, Clock(time.time() - 120)):
        yield folder


@pytest.fixture(autouse=True)
def environment(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPOLLUX_STATE_DIR", str(state))


def offered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str
) -> list[str]:
    """What bash is offered for a command line, at its end; within this process."""
    with monkeypatch.context() as patch:
        patch.setenv("_PIPOLLUX_COMPLETE", "complete_bash")
        patch.setenv("COMP_WORDS", line)
        patch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit) as ended:
            main([])
    said = capfd.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    return said.out.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("pipollux su", ["submit", "suspend"]),
        ("pipollux describe g", ["grown", "gone"]),
        ("pipollux cancel ", ["grown", "wide", "waiting", "held", "broken", "gone"]),
        ("pipollux cancel grown wide ", ["waiting", "held", "broken", "gone"]),
        ("pipollux drain ", ["node-a", "node-b", "node-c"]),
        ("pipollux drain node-b --re", ["--reason"]),
        ("pipollux events --job w", ["wide", "waiting"]),
        ("pipollux events --type re", ["replicas_lost", "restarting", "ready", "resumed", "rerun"]),
        ("pipollux serve --policy f", ["fifo"]),
        ("pipollux jobs --phase C", ["Created", "Cancelled", "Complete"]),
        ("pipollux jobs --phase c", ["Created", "Cancelled", "Complete"]),
        ("pipollux nodes --output ", ["table", "json", "yaml"]),
        ("pipollux describe --state-dir /nowhere ", []),
    ],
)
def test_bash(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, names: list[str]
) -> None:
    assert offered(monkeypatch, capfd, line) == names


def test_a_store_that_cannot_be_read_offers_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "pipollux.db").write_bytes(b"this is no database" * 100)
    assert offered(monkeypatch, capfd, f"pipollux describe --state-dir {tmp_path} ") == []


def test_all_policies_are_offered() -> None:
    assert sorted(complete_policies("")) == sorted(POLICIES)


def run(shell: str | None, *args: str, home: Path, **environment: str) -> str:
    """Run pipollux, or a shell, with a home folder of its own."""
    known = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(home)}
    path = f"{Path(PIPOLLUX).parent}:{os.environ['PATH']}"
    env = {**os.environ, **known, "PATH": path, **environment}
    if shell is None:
        done = run_pipollux(*args, environment=env)
    else:
        command = [shell, *args]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_bash_itself(tmp_path: Path) -> None:
    """What is installed completes in a new bash, as it would at a person's prompt."""
    said = run(None, "--install-completion", "bash", home=tmp_path)
    assert "bash completion installed" in said
    typed = (
        "source ~/.bashrc; COMP_WORDS=(pipollux describe gr); COMP_CWORD=2; "
        '_pipollux_completion pipollux; echo "${COMPREPLY[@]}"'
    )
    assert run("/bin/bash", "--norc", "-c", typed, home=tmp_path) == "grown\n"


@pytest.mark.parametrize(
    ("shell", "says"), [("zsh", "#compdef pipollux"), ("fish", "complete --command pipollux")]
)
def test_other_shells(tmp_path: Path, shell: str, says: str) -> None:
    assert says in run(None, "--show-completion", shell, home=tmp_path)
    told = run(
        None,
        home=tmp_path,
        _PIPOLLUX_COMPLETE=f"complete_{shell}",
        _TYPER_COMPLETE_ARGS="pipollux describe gr",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert "grown" in told
    assert "Running" in told


def test_help_imports_nothing_slow() -> None:
    """`pipollux --help` is fast because of what it does not import."""
    slow = ["sqlalchemy", "numpy", "pydantic", "httpx", "matplotlib", "fastapi", "pymoo", "scipy"]
    slow.append("torch")
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import sys\nfrom pipollux_sched.cli import main\n"
            "try:\n    main(['--help'])\nfinally:\n    print('imported:', *sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    imported = done.stdout.partition("imported:")[2].split()
    assert [name for name in slow if name in imported] == []
    assert "pipollux_sched.cli.app" in imported
