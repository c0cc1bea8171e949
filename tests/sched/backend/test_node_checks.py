"""Checks of nodes: which are due, and what is told of those that have failed."""

from __future__ import annotations

import pytest

from pipollux_sched.backend import node_checks
from pipollux_sched.backend.node_checks import NodeChecks
from pipollux_sched.store import StateDir


@pytest.fixture
def started() -> list[str]:
    """The nodes whose check was started, in order."""
    return []


@pytest.fixture
def checks(state_dir: StateDir, started: list[str]) -> NodeChecks[str]:
    return NodeChecks(state_dir, started.append)


def test_each_node_is_checked_once(checks: NodeChecks[str], started: list[str]) -> None:
    """One that went and came is another one."""
    checks.look(["a", "b"])
    checks.look(["a", "b"])
    assert started == ["a", "b"]
    checks.note("a", "")
    assert (checks.results(), checks.unchecked()) == ({"a": ""}, {"b"})
    checks.look(["a", "b", "c"])
    assert started == ["a", "b", "c"]
    checks.look(["b", "c"])
    checks.look(["a", "b", "c"])
    assert started == ["a", "b", "c", "a"]
    checks.note("gone", "whatever")
    assert checks.results() == {}


def test_a_failed_node_is_checked_again(
    checks: NodeChecks[str], started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while; at once, if its check told nothing."""
    checks.look(["a", "b"])
    checks.note("a", "node a does not see /x")
    checks.note("b", None)
    checks.look(["a", "b"])
    assert started == ["a", "b", "b"]
    monkeypatch.setattr(node_checks, "REPEAT_INTERVAL", 0.0)
    checks.note("a", "node a does not see /x")
    checks.note("b", "")
    checks.look(["a", "b"])
    assert started == ["a", "b", "b", "a"]
    assert checks.results() == {"a": "node a does not see /x", "b": ""}
    checks.note("a", "")
    assert checks.results() == {"a": "", "b": ""}


def test_a_check_that_got_lost_is_started_again(state_dir: StateDir, started: list[str]) -> None:
    checks = NodeChecks(state_dir, started.append, lost_after=0.0)
    checks.look(["a"])
    checks.look(["a"])
    assert started == ["a", "a"]
    checks.note("a", "")
    checks.look(["a"])
    assert started == ["a", "a"]


def test_what_a_node_lacks_is_named(checks: NodeChecks[str], state_dir: StateDir) -> None:
    """The mark is of this scheduler alone, and leaves nothing."""
    mark, python, _ = checks.paths
    folder = state_dir.path
    assert checks.describe("n1", "") == ""
    assert checks.describe("n1", mark).startswith(f"node n1 does not see {folder}; keep the state")
    assert checks.describe("n1", str(folder)).startswith(f"node n1 cannot write to {folder}; keep")
    assert checks.describe("n1", python).startswith(f"node n1 does not see {python}; install")
    after_a_crash = NodeChecks(state_dir, lambda _: None)
    assert after_a_crash.paths[0] != mark
    assert [str(path) for path in folder.glob(".shared-*")] == [after_a_crash.paths[0]]
    after_a_crash.close()
    assert list(folder.glob(".shared-*")) == []
