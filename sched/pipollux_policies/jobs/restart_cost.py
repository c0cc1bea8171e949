"""The penalty on changes of allocation for the training time that they cost (OSDI'21, §4.2)."""

from __future__ import annotations

DEFAULT_RESTART_SECONDS = 30.0
"""Assumed cost of a restart until the job's own has been measured (the paper's value)."""


def change_factor(age: float, lost: float, seconds: float) -> float:
    """Return the factor on a job's speedup if its allocation changes now, in [0, 1].

    It is the share of its life that the job would have trained after one more change, and protects
    young and often changed jobs. `age` is in seconds since submission, `lost` what its changes have
    cost so far, `seconds` the cost of one more.

    >>> change_factor(age=270.0, lost=30.0, seconds=30.0)
    0.8
    """
    total = age + seconds
    return max(age - lost, 0.0) / total if total > 0 else 1.0
