"""Policies by name, for command lines and benchmarks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

DEFAULT_POLICY = "pollux"
"""Who decides where nobody is named."""


def _factory(module: str, name: str) -> Callable[..., Any]:
    """Return what makes a policy; its module is imported when that is called."""

    def make(*, seed: int = 0) -> Any:
        policy = getattr(import_module(f".{module}", __package__), name)
        # Policies that use no random numbers take no seed.
        takes_seed = "seed" in inspect.signature(policy).parameters
        return policy(seed=seed) if takes_seed else policy()

    return make


POLICIES: Mapping[str, Callable[..., Any]] = {
    "pollux": _factory("pollux", "PolluxPolicy"),
    "exact": _factory("exact", "ExactPolicy"),
    "fifo": _factory("fifo", "FifoPolicy"),
    "tiresias": _factory("tiresias", "TiresiasPolicy"),
    "optimus": _factory("optimus", "OptimusPolicy"),
    "sia": _factory("sia", "SiaPolicy"),
}
"""What makes each policy, given ``seed=``; every one has `optimize` and `allocate_job`."""


def make_policy(name: str = DEFAULT_POLICY, *, seed: int = 0) -> Any:
    """Return a new policy.

    Args:
        name: one of `POLICIES`.
        seed: of its random numbers, if it uses any.

    Raises:
        ValueError: no policy has this name; the message names those that there are.

    Example:
        >>> type(make_policy("pollux", seed=3)).__name__
        'PolluxPolicy'
    """
    if name not in POLICIES:
        close = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"policy: {name!r} is not known; {hint}known are {', '.join(POLICIES)}")
    return POLICIES[name](seed=seed)
