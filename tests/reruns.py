"""Reruns failed tests once, each in a process of its own, after all others have ended.

`pytest --rerun-failed FILE` starts its own command again for each failed test, with `-n 0` and
`--rerun-of TEST`: options and the seed of hypothesis stay as they are. A test that passes then is
flaky. It does not fail the run; it is counted as flaky, and printed last and appended to FILE in a
line that begins with FLAKY. The run fails as it would without reruns if

* a test fails twice, or is skipped in its rerun;
* more than `MOST_RERUNS` tests failed: that is no race;
* something else than a test failed: the collection, a worker of xdist between two tests, or the
  teardown of a fixture that several tests share, which no single test repeats;
* a test did not run at all, as with `--maxfail`.

A worker of xdist that crashes does not end the run, whatever xdist is about to send it.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest

MOST_RERUNS = 20
RERUN_SECONDS = 600.0
"""After so long no further rerun begins. The one that runs then has its own timeout."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rerun-failed",
        metavar="FILE",
        help="rerun failed tests once, each alone, after all others; append to FILE what passes",
    )
    parser.addoption(
        "--rerun-of",
        metavar="TEST",
        help="run this test only; --rerun-failed starts the same command with it",
    )


def pytest_configure(config: pytest.Config) -> None:
    if test := config.getoption("rerun_of"):
        config.args = [str(config.rootpath / test)]
        config.pluginmanager.register(_Rerun())
    elif config.getoption("rerun_failed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reruns(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have xdist send a worker that has crashed nothing, rather than end the run.

    The worker's end is among the events that xdist has still to look at. Then it gives the worker's
    tests, also those that were sent in vain, to others.
    """
    send = node.sendcommand

    def sendcommand(name: str, **arguments: object) -> None:
        with suppress(OSError):
            send(name, **arguments)

    node.sendcommand = sendcommand


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Mark the report of a failed teardown of a fixture that several tests share."""
    report = yield
    report.shared = (
        call.when == "teardown" and call.excinfo is not None and _is_shared(call.excinfo.value)
    )
    return report


def _is_shared(error: BaseException) -> bool:
    """Whether an exception was raised by a fixture of more than one test."""
    if isinstance(error, BaseExceptionGroup) and any(map(_is_shared, error.exceptions)):
        return True
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(isinstance(x, pytest.FixtureDef) and x.scope != "function" for x in owners)


class _Rerun:
    """Fails the rerun of a test that neither failed nor passed."""

    def __init__(self) -> None:
        self._passed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed |= report.when == "call" and report.passed

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and not self._passed:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


class _Reruns:
    """Reruns what failed when the failures are printed, before the counts are."""

    def __init__(self, config: pytest.Config) -> None:
        self._file = config.invocation_params.dir / config.getoption("rerun_failed")
        self._flaky: list[str] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield
        reporter = _reporter(session.config)
        if self._flaky and not _failures(reporter):
            session.exitstatus = pytest.ExitCode.OK
        for line in self._flaky:
            reporter.write_line(line, yellow=True)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        if exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        failures = _failures(terminalreporter)
        if refusal := self._refusal(failures):
            terminalreporter.write_line(f"No failed test is rerun: {refusal}.")
            return
        firsts = {report.nodeid: report for report in reversed(failures)}
        deadline = time.monotonic() + RERUN_SECONDS
        passed = {}
        for test, report in reversed(firsts.items()):
            if time.monotonic() < deadline and _passes(config, test):
                passed[test] = report
        self._count_as_flaky(passed)

    def _refusal(self, failures: list[pytest.TestReport | pytest.CollectReport]) -> str | None:
        """Return why these are failures whatever reruns would say, if they are."""
        session, stats = self._session, _reporter(self._session.config).stats
        reports = [x for kind in stats.values() for x in kind if isinstance(x, pytest.TestReport)]
        if any(isinstance(failure, pytest.CollectReport) for failure in failures):
            return "the collection failed"
        if session.shouldfail or session.shouldstop:
            return str(session.shouldfail or session.shouldstop)
        if missing := session.testscollected - len({report.nodeid for report in reports}):
            return f"{missing} tests did not run"
        if shared := [x.nodeid for x in failures if getattr(x, "shared", False)]:
            return f"the teardown of a fixture that tests share failed after {shared[0]}"
        if (number := len({failure.nodeid for failure in failures})) > MOST_RERUNS:
            return f"{number} failed, and at most {MOST_RERUNS} may"
        return None

    def _count_as_flaky(self, passed: dict[str, pytest.TestReport]) -> None:
        """Count tests as flaky rather than as what they were before the rerun."""
        stats = _reporter(self._session.config).stats
        for kind, reports in stats.items():
            stats[kind] = [
                x for x in reports if not (isinstance(x, pytest.TestReport) and x.nodeid in passed)
            ]
        stats["flaky"] = list(passed.values())
        for test, report in passed.items():
            where = "".join(report.longreprtext.rstrip().splitlines()[-1:])
            self._flaky.append(f"FLAKY {test} - {where}")
        if passed:
            with self._file.open("a") as file:
                file.writelines(f"{line}\n" for line in self._flaky)


def _reporter(config: pytest.Config) -> pytest.TerminalReporter:
    return config.pluginmanager.get_plugin("terminalreporter")


def _failures(
    reporter: pytest.TerminalReporter,
) -> list[pytest.TestReport | pytest.CollectReport]:
    return [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]


def _passes(config: pytest.Config, test: str) -> bool:
    """Run a test alone and return whether it passes."""
    reporter = _reporter(config)
    reporter.write_sep("=", f"rerun alone: {test}", bold=True)
    reporter.flush()
    command = [sys.executable, "-m", "pytest", *config.invocation_params.args]
    rerun = subprocess.run(
        [*command, "-n", "0", "--maxfail", "0", "--no-header", "--rerun-of", test],
        cwd=config.invocation_params.dir,
    )
    return rerun.returncode == pytest.ExitCode.OK
