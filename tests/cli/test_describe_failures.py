"""The failures of a job, as `pipollux describe` writes them."""

from __future__ import annotations

import pytest

from pipollux_sched.cli.describe import _failures


@pytest.mark.parametrize(
    ("failures", "allowed", "text"),
    [
        (0, 3, "0 of 3 restarts used"),
        (3, 3, "3 of 3 restarts used"),
        (1, 0, "1 (max_restarts is 0)"),
        (4, 3, "4 (max_restarts is 3)"),
    ],
)
def test_no_more_restarts_are_used_than_allowed(failures: int, allowed: int, text: str) -> None:
    assert _failures(failures, allowed) == text
