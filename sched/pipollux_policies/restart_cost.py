"""What time lost to changes of its allocation weighs in a decision about a job (OSDI'21, §4.2).

What a job's own restarts have cost is measured: `store/restart_cost.py` averages it. Which change
costs how much is said in `change_cost`.
"""

from __future__ import annotations

DEFAULT_RESTART_SECONDS = 30.0
"""Assumed cost of a checkpoint-restart before a job's own was measured (the paper's)."""


def change_factor(age: float, lost: float, seconds: float) -> float:
    """Return the factor on a job's speedup if its allocation changes now, in [0, 1].

    It is the share of its life that the job would have trained after one more change. A young or
    often changed job is thereby left alone.

    Args:
        age: seconds since the job came.
        lost: seconds that its changes so far have cost.
        seconds: what one more change costs.

    Example:
        >>> change_factor(age=270.0, lost=30.0, seconds=30.0)
        0.8
    """
    total = age + seconds
    return max(age - lost, 0.0) / total if total > 0 else 1.0
