"""What a restart is taken to cost, and how that weighs in a decision (OSDI'21, §4.2).

What a job's own restarts have cost is measured: `store/restart_cost.py` averages it.
"""

from __future__ import annotations

DEFAULT_RESTART_SECONDS = 30.0
"""Assumed cost of a checkpoint-restart before a job's own was measured (the paper's)."""


def restart_factor(age: float, num_restarts: int, restart_seconds: float) -> float:
    """Return the factor on a job's speedup if its allocation changes now, in [0, 1].

    It is the share of its life that the job would have trained after one more restart, at the rate
    of restarts so far. A young or often restarted job is thereby left alone.

    Args:
        age: seconds since the job came.
        num_restarts: how often it was restarted.
        restart_seconds: what one of its restarts costs.

    Example:
        >>> restart_factor(age=270.0, num_restarts=1, restart_seconds=30.0)
        0.8
    """
    total = age + restart_seconds
    lost = num_restarts * restart_seconds
    return max(age - lost, 0.0) / total if total > 0 else 1.0
