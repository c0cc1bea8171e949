"""The policies by name, for command lines and benchmarks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TypeAlias

from pipollux_policies.baselines.fifo import FifoPolicy
from pipollux_policies.baselines.optimus import OptimusPolicy
from pipollux_policies.baselines.tiresias import TiresiasPolicy
from pipollux_policies.exact.completion_time import CompletionTime
from pipollux_policies.exact.policy import ExactPolicy
from pipollux_policies.pollux.policy import PolluxPolicy
from pipollux_policies.sia.policy import SiaPolicy

from .base import Policy

Factory: TypeAlias = Callable[[int], Policy]
"""Returns a policy for a seed; deterministic policies ignore it."""

DEFAULT_POLICY = "exact"

POLICIES: Mapping[str, Factory] = {
    "exact": lambda seed: ExactPolicy(),  # noqa: ARG005  # deterministic
    "pollux": lambda seed: PolluxPolicy(seed=seed),
    "sia": lambda seed: SiaPolicy(),  # noqa: ARG005  # deterministic
    "optimus": lambda seed: OptimusPolicy(),  # noqa: ARG005  # deterministic
    "tiresias": lambda seed: TiresiasPolicy(),  # noqa: ARG005  # deterministic
    "fifo": lambda seed: FifoPolicy(),  # noqa: ARG005  # deterministic
}

KNOBS = {"fairness": "promise", "scarcity": "charge", "tail": "weight", "rank_power": "weight"}
"""The kind of each `CompletionTime` option of `make_policy`, for error messages."""


def make_policy(
    name: str = DEFAULT_POLICY,
    *,
    seed: int = 0,
    fairness: float | None = None,
    scarcity: float | None = None,
    tail: float | None = None,
    rank_power: float | None = None,
) -> Policy:
    """Return a new policy.

    Args:
        name: one of `POLICIES`.
        seed: of its random numbers; deterministic policies ignore it.
        fairness: `CompletionTime.fairness`; None: no promise.
        scarcity: `CompletionTime.scarcity`; None: the default.
        tail: `CompletionTime.tail`; None: the default.
        rank_power: `CompletionTime.rank_power`; None: the default.

    Raises:
        ValueError: the name is unknown, and the message lists the known ones; or an option of
            "exact" is used with another policy.

    Example:
        >>> type(make_policy("pollux", seed=3)).__name__
        'PolluxPolicy'
    """
    if name not in POLICIES:
        close = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"policy: {name!r} is not known; {hint}known are {', '.join(POLICIES)}")
    said = {"fairness": fairness, "scarcity": scarcity, "tail": tail, "rank_power": rank_power}
    chosen = {knob: value for knob, value in said.items() if value is not None}
    if not chosen:
        return POLICIES[name](seed)
    if name != "exact":
        knob, value = next(iter(chosen.items()))
        raise ValueError(
            f"{knob}: {value} is a {KNOBS[knob]} of the policy exact, not of {name}; leave it "
            "out, or take the policy exact"
        )
    return ExactPolicy(CompletionTime(**chosen))
