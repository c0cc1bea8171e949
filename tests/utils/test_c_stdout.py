"""What C libraries print on standard output past Python, and that it is silenced."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import scipy.optimize

from pipollux_policies import ExactPolicy, Policy
from pipollux_policies.sia.policy import SiaPolicy
from tests.policies.policy_cases import TEMPLATE, random_case

LIBRARY = ctypes.CDLL(None)
CODE = """
import ctypes, threading
from pipollux_utils.c_stdout import silent_c_stdout
puts = ctypes.CDLL(None).puts
puts(b"before")
with silent_c_stdout():
    puts(b"dropped")
    other = threading.Thread(target=lambda: print("by another thread"))
    other.start()
    other.join()
    with silent_c_stdout():
        puts(b"dropped, too")
    puts(b"dropped still")
puts(b"after")
"""


def test_only_what_c_prints_is_dropped_and_only_meanwhile() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["after", "before", "by another thread"]


@pytest.mark.parametrize(
    ("policy", "solvers"),
    [(ExactPolicy(), {"exact.milp", "exact.relaxation"}), (SiaPolicy(), {"sia.milp"})],
)
def test_the_solver_of_a_policy_prints_nothing(
    policy: Policy,
    solvers: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """HiGHS does so at times; here each call prints a line."""
    called = set()
    real = scipy.optimize.milp

    def solve(*args: Any, **more: Any) -> Any:
        LIBRARY.puts(b"a line of the solver's own")
        called.add(sys._getframe(1).f_globals["__name__"].removeprefix("pipollux_policies."))
        return real(*args, **more)

    monkeypatch.setattr(scipy.optimize, "milp", solve)
    case = random_case(0, max_nodes=3, max_jobs=3, mixed=True)
    policy.optimize(case.jobs, case.nodes, case.base, TEMPLATE)
    LIBRARY.fflush(None)
    assert called == solvers
    assert capfd.readouterr().out == ""
