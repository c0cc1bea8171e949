"""What holds for every test: it leaves no process, no environment variable and no file behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.extent import APART, explores, is_exhaustive, load_profile, needs, share_of

pytest_plugins = [
    "tests.hosts.fixtures",
    "tests.kubernetes.fixtures",
    "tests.ray.fixtures",
    "tests.reruns",
]

# One thread a process, also in threads that torchgpipe starts: tests run several processes at once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The server of tests/sched/store/postgresql.py, which that module ends.
LASTING = ("resource_tracker", "postgres")
# What a browser starts when it likes; tests/sched/server/browser.py sees that none of them outlives
# its browser, which itself is no such process.
BROWSERS_OWN = re.compile(r"chrom\S* --type=")
# pytest's own, and what torch sets when parts of it are imported.
CHANGING = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run what `make test` leaves out: whole grids, long runs, hypothesis with fresh seeds",
    )
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="with --exhaustive: of each module one test in N, others with each seed",
    )
    parser.addoption(
        "--kubernetes",
        action="store_true",
        help="run the tests that need real kubelets, and only these",
    )
    parser.addoption(
        "--gpu", action="store_true", help="run the tests that need a GPU, and only these"
    )


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores, up to eight: tests wait for processes of theirs."""
    return min((os.cpu_count() or 1) + 1, 8)


def pytest_configure(config: pytest.Config) -> None:
    # What a shell runs in the background is deaf to Ctrl-C, and so would be whatever tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    load_profile(exhaustive=config.getoption("exhaustive"))
    fresh = config.getoption("exhaustive") and config.getoption("hypothesis_seed") is None
    if fresh and config.getoption("rerun_failed"):
        raise pytest.UsageError(
            "--exhaustive with --rerun-failed needs --hypothesis-seed=N: a rerun must try the"
            " examples that failed"
        )
    if not config.getoption("gpu"):
        # A machine's GPUs are no reason for another verdict.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import and collect without garbage collection, a fifth of the time: nearly all of it stays.

    What is there by then is left out of later collections, too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    exhaustive = config.getoption("exhaustive")
    chosen = [x for x in items if is_exhaustive(x) == exhaustive or (exhaustive and explores(x))]
    if exhaustive and not config.getoption("rerun_of"):  # which was drawn before it failed
        chosen = share_of(
            chosen, config.getoption("share"), str(config.getoption("hypothesis_seed"))
        )
    apart = next((name for name in APART if config.getoption(name)), None)
    chosen = [x for x in (items if apart else chosen) if needs(x) == apart]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = chosen


def _children(known: set[int]) -> dict[psutil.Process, str]:
    """Return processes that were started by this one, but those that are known, and their words."""
    found = {}
    for pid in set(psutil.pids()) - known:
        try:
            process = psutil.Process(pid)
            if not any(parent.pid == os.getpid() for parent in process.parents()):
                continue
            # One without a command line is about to have one, or to be a zombie.
            while not (words := process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            command = " ".join(words)
            lasting = any(name in command for name in LASTING) or BROWSERS_OWN.search(command)
            # Whom the fork server forked has its command line.
            lasting = lasting or ("forkserver" in command and process.ppid() == os.getpid())
            if command and not lasting:
                found[process] = command
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process or an environment variable, and kill the process."""
    processes, environment = set(psutil.pids()), dict(os.environ)
    yield
    left = _children(processes)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, f"processes left behind: {list(left.values())}"
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name not in CHANGING
    }
    assert not changed, f"environment variables left changed: {changed}"


@pytest.fixture(scope="session", autouse=True)
def temporary_files_are_ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Everything temporary goes under pytest's own directory."""
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))
    yield
    tempfile.tempdir = before


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent
