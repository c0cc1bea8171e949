"""What `--rerun-failed` makes of failures: pytest itself runs a small suite, as in `make test`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
# `once(name)` is true the first time that any process of the suite calls it.
ONCE = """
import os
import subprocess
from pathlib import Path
import pytest

def once(name):
    path = Path(__file__).with_name(name)
    new = not path.exists()
    path.touch()
    return new
"""
PASSES = "def test_passes(): pass\n"
FAILS_ONCE = "def test_fails_once(): assert not once('failure')\n"
FAILS_TWICE = "def test_fails_twice(): assert False\n"
FAILS_AT_TEARDOWN = """
@pytest.fixture
def fragile():
    yield
    assert not once("teardown")

def test_fails_at_teardown(fragile): pass
"""
CRASHES = """
def test_crashes():
    if once("crash"):
        os._exit(3)
"""
LEAVES_A_PROCESS = """
def test_leaves_a_process():
    if once("process"):
        subprocess.Popen(["sleep", "600"])
"""
HANGS = """
@pytest.mark.timeout(0.5)
def test_hangs():
    if once("hang"):
        while True: pass
"""
FLAKY = "flaky.txt"


@pytest.fixture
def run(tmp_path: Path, repository: Path) -> Run:
    """Write a suite, if one is given, and run pytest on it."""

    def run(
        suite: str | None, *options: str, plugin: str = "tests.reruns"
    ) -> subprocess.CompletedProcess[str]:
        if suite is not None:
            (tmp_path / "test_suite.py").write_text(ONCE + suite)
        command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return subprocess.run(
            [*command, "--rootdir", str(tmp_path), "--rerun-failed", FLAKY, *options],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )

    return run


def _counts(output: str) -> dict[str, int]:
    """Return the counts of the last summary."""
    found = re.findall(r"^=+ (.*) in [\d.]+s.*=+$", output, re.MULTILINE)
    return {kind: int(n) for n, kind in (part.split() for part in found[-1].split(", "))}


def _last_lines(output: str) -> list[str]:
    """Return the lines after the last summary."""
    return re.split(r"^=+ .* in [\d.]+s.*=+\n", output, flags=re.MULTILINE)[-1].splitlines()


@pytest.mark.exhaustive
def test_a_test_that_passes_alone_is_flaky_and_one_that_fails_twice_fails(
    run: Run, tmp_path: Path
) -> None:
    suite = PASSES + FAILS_ONCE + FAILS_TWICE + FAILS_AT_TEARDOWN
    suite += CRASHES + LEAVES_A_PROCESS + HANGS
    done = run(suite, "-n", "2", "--dist", "worksteal", plugin="tests.conftest")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert _counts(done.stdout) == {"passed": 1, "failed": 1, "flaky": 5}
    flaky = _last_lines(done.stdout)
    assert all(line.startswith("FLAKY ") for line in flaky)
    assert {line.split()[1] for line in flaky} == {
        f"test_suite.py::test_{name}"
        for name in ("fails_once", "fails_at_teardown", "crashes", "leaves_a_process", "hangs")
    }
    assert (tmp_path / FLAKY).read_text().splitlines() == flaky
    # Others had ended by then, and what failed first is shown.
    before, *reruns = done.stdout.split("= rerun alone: ")
    assert len(reruns) == 6
    assert "[100%]" in before
    assert "assert not once('failure')" in before


# Each worker begins with three tests. One worker crashes; when the other one has ended its second
# test, xdist takes a test from the queue of the first, which has crashed by then. Its end is made
# known when xdist has sent that command, or at the latest after a minute.
CRASHES_UNSEEN = """
import time

def until(condition):
    while not condition():
        time.sleep(0.01)

@pytest.mark.parametrize("n", range(3))
def test_crashing(n):
    if n == 0 and once("crash"):
        until(Path(__file__).with_name("go").exists)
        os._exit(3)

@pytest.mark.parametrize("n", range(3))
def test_passing(n): pass
"""
TELLS_OF_CRASHES_LATE = """
import threading
from pathlib import Path
from test_suite import until
from xdist.workermanage import Marker

crashed, sent = threading.Event(), threading.Event()

def pytest_configure_node(node):
    process, send = node.process_from_remote, node.sendcommand

    def process_later(event):
        if event is Marker.END and not crashed.is_set():
            node.gateway._io.wait()
            crashed.set()
            sent.wait(60)
        process(event)

    def sendcommand(name, **arguments):
        try:
            send(name, **arguments)
        finally:
            if crashed.is_set():
                sent.set()

    node.process_from_remote, node.sendcommand = process_later, sendcommand

def pytest_runtest_logreport(report):
    if not hasattr(report, "node") or report.when != "teardown":
        return
    if report.nodeid.endswith("test_passing[1]"):
        Path(__file__).with_name("go").touch()
        assert crashed.wait(60)
"""


@pytest.mark.exhaustive
def test_a_command_to_a_worker_that_has_crashed_does_not_end_the_run(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(TELLS_OF_CRASHES_LATE)
    done = run(CRASHES_UNSEEN, "-n", "2", "--dist", "worksteal")
    assert "INTERNALERROR" not in done.stdout
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert _counts(done.stdout) == {"passed": 5, "flaky": 1}
    (line,) = _last_lines(done.stdout)
    assert line.startswith("FLAKY test_suite.py::test_crashing[0]")


def test_flaky_tests_alone_do_not_fail_the_run(run: Run, tmp_path: Path) -> None:
    """What the command deselects is no part of the reruns either."""
    (tmp_path / FLAKY).write_text("FLAKY of a run before\n")
    suite = PASSES + FAILS_ONCE + FAILS_TWICE
    done = run(suite, "-n", "0", "-k", "not twice")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert _counts(done.stdout) == {"passed": 1, "flaky": 1, "deselected": 1}
    (line,) = _last_lines(done.stdout)
    assert re.fullmatch(
        r"FLAKY test_suite.py::test_fails_once - test_suite.py:\d+: AssertionError", line
    )
    assert (tmp_path / FLAKY).read_text().splitlines() == ["FLAKY of a run before", line]


@pytest.mark.exhaustive
def test_a_run_without_failures_reruns_nothing(run: Run, tmp_path: Path) -> None:
    done = run(PASSES, "-n", "0")
    assert done.returncode == pytest.ExitCode.OK
    assert "rerun" not in done.stdout
    assert not (tmp_path / FLAKY).exists()


SHARED_TEARDOWN = """
@pytest.fixture(scope="module")
def shared():
    yield
    assert not once("teardown")

def test_one(shared): pass
"""
MANY = """
@pytest.mark.parametrize("n", range(21))
def test_many(n): assert not once(str(n))
"""


@pytest.mark.parametrize(
    ("suite", "options", "reason"),
    [
        pytest.param(
            *(SHARED_TEARDOWN, [], "the teardown of a fixture that tests share failed"),
            marks=pytest.mark.exhaustive,
        ),
        (MANY, [], "21 failed, and at most 20 may"),
        pytest.param(
            *(FAILS_ONCE + PASSES, ["--maxfail", "1"], "stopping after 1 failures"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *(FAILS_ONCE, ["--continue-on-collection-errors", "."], "the collection failed"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["shared", "many", "maxfail", "collection"],
)
def test_failures_that_no_rerun_can_explain_fail_the_run(
    run: Run, tmp_path: Path, suite: str, options: list[str], reason: str
) -> None:
    if "." in options:
        (tmp_path / "test_other.py").write_text("import nothing_of_this_name\n")
    done = run(suite, "-n", "0", *options)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert f"No failed test is rerun: {reason}" in done.stdout
    assert "rerun alone" not in done.stdout
    assert not (tmp_path / FLAKY).exists()


@pytest.mark.exhaustive
def test_a_test_that_is_skipped_in_its_rerun_has_failed(run: Run) -> None:
    suite = "def test_once():\n    if not once('run'): pytest.skip('no more')\n    assert False\n"
    done = run(suite, "-n", "0")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert _counts(done.stdout) == {"failed": 1}


@pytest.mark.exhaustive
def test_a_run_of_no_test_is_no_success(run: Run) -> None:
    assert run("", "-n", "0").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


EXPLORES = """
from hypothesis import given, strategies

@pytest.mark.exhaustive
@pytest.mark.parametrize("n", range(2))
@given(number=strategies.integers(0, 10**9))
def test_explores(n, number):
    with Path(__file__).with_name("drawn").open("a") as file:
        print(n, number, file=file)
    assert number < 10**8
"""


@pytest.mark.exhaustive
def test_a_rerun_has_the_seed_and_the_share_of_the_run(run: Run, tmp_path: Path) -> None:
    """The test that failed is rerun, not drawn by lot once more; and its examples are the same."""
    done = run(
        EXPLORES,
        *("-n", "0", "--exhaustive", "--share", "2", "--hypothesis-seed", "7"),
        *("-o", "markers=exhaustive"),
        plugin="tests.conftest",
    )
    assert _counts(done.stdout) == {"failed": 1, "deselected": 1}, done.stdout
    drawn = (tmp_path / "drawn").read_text().splitlines()
    half = len(drawn) // 2
    assert len(set(drawn[:half])) > 2
    assert drawn[:half] == drawn[half:]


@pytest.mark.exhaustive
def test_exhaustive_reruns_need_a_seed(run: Run) -> None:
    done = run(EXPLORES, "-n", "0", "--exhaustive", plugin="tests.conftest")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs --hypothesis-seed=N" in done.stderr


MAKEFILE = """
test:
	@echo "FLAKY test_a" >> "$(FLAKY)"
test-exhaustive:
	@echo "FLAKY test_b" >> "$(FLAKY)"; exit {status}
"""


@pytest.mark.parametrize("status", [0, 1])
def test_continuous_integration_prints_the_flaky_tests_last(
    tmp_path: Path, repository: Path, status: int
) -> None:
    for folder in (".ci", "hybrid", "perfmodel", "sched", "tests"):
        (tmp_path / folder).mkdir()
    shutil.copy(repository / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / ".ci/services").write_text("#!/bin/sh\n")
    (tmp_path / ".ci/services").chmod(0o755)
    (tmp_path / "Makefile").write_text(MAKEFILE.format(status=status))
    (tmp_path / "flaky-tests.txt").write_text("FLAKY test_of_another_run\n")
    # What `make test FLAKY=…` says is for that make alone.
    mine = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "FLAKY")
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    done = subprocess.run(
        [tmp_path / ".ci/run"],
        env=environment | {"PIPOLLUX_KUBERNETES": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == bool(status), done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["FLAKY test_a", "FLAKY test_b"]
    assert "FLAKY test_of_another_run" not in lines
