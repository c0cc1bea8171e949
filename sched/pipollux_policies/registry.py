"""The policies by name, with their options, for command lines and benchmarks."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipollux_policies.baselines.fifo import FifoPolicy
from pipollux_policies.baselines.optimus import OptimusPolicy
from pipollux_policies.baselines.tiresias import TiresiasPolicy
from pipollux_policies.exact.completion_time import CompletionTime
from pipollux_policies.exact.policy import ExactPolicy
from pipollux_policies.pollux.policy import PolluxPolicy
from pipollux_policies.sia.policy import SiaPolicy

from .base import Policy
from .options import Option, options_of, parse_options, show


class PolicyEntry(NamedTuple):
    """A policy's class, and the class of its only argument if that has the options."""

    policy: Callable[..., Policy]
    argument: Callable[..., Any] | None = None

    @property
    def options(self) -> Mapping[str, Option]:
        """Its options by name."""
        return options_of(self.argument or self.policy)

    def make(self, seed: int, options: Mapping[str, Any]) -> Policy:
        """Return a new policy; ValueError if an option is unknown or its value not allowed."""
        if self.argument is not None:
            return self.policy(self.argument(**options))
        random = "seed" in inspect.signature(self.policy).parameters
        return self.policy(**options, **({"seed": seed} if random else {}))


DEFAULT_POLICY = "exact"
INDENT = 8 * " "
"""Of meanings in `policy_help`."""

POLICIES: Mapping[str, PolicyEntry] = {
    "exact": PolicyEntry(ExactPolicy, CompletionTime),
    "pollux": PolicyEntry(PolluxPolicy),
    "sia": PolicyEntry(SiaPolicy),
    "optimus": PolicyEntry(OptimusPolicy),
    "tiresias": PolicyEntry(TiresiasPolicy),
    "fifo": PolicyEntry(FifoPolicy),
}


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a policy.

    Raises:
        ValueError: the policy or an option is unknown, or a value is not allowed; the message says
            what is.

    Example:
        >>> parse_policy("exact:rank_power=0.5,tail=1")
        ('exact', {'rank_power': 0.5, 'tail': 1.0})
    """
    name, colon, options = (part.strip() for part in text.partition(":"))
    if name not in POLICIES:
        close = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"policy: {name!r} is not known; {hint}choose from {', '.join(POLICIES)}")
    return name, parse_options(name, options, POLICIES[name].options) if colon else {}


def split_policies(text: str) -> list[str]:
    """Return the policies of a comma-separated list, in which options follow their policy.

    Example:
        >>> split_policies("exact:rank_power=0.5,tail=1,fifo")
        ['exact:rank_power=0.5,tail=1', 'fifo']
    """
    found: list[str] = []
    for piece in (part.strip() for part in text.split(",")):
        if found and "=" in piece and ":" not in piece:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def policy_text(name: str, options: Mapping[str, Any]) -> str:
    """Return a policy as `parse_policy` reads it."""
    values = ",".join(f"{option}={show(value)}" for option, value in options.items())
    return f"{name}:{values}" if values else name


def make_policy(policy: str = DEFAULT_POLICY, *, seed: int = 0, **options: Any) -> Policy:
    """Return a new policy.

    Args:
        policy: one of `POLICIES`, possibly with options, such as "exact:rank_power=0.5,tail=1".
        seed: of its random numbers; deterministic policies ignore it.
        options: more options of the policy.

    Raises:
        ValueError: as of `parse_policy`.

    Example:
        >>> type(make_policy("pollux", seed=3)).__name__
        'PolluxPolicy'
        >>> make_policy("exact", fairness=1.25).options
        {'fairness': 1.25}
    """
    name, given = parse_policy(policy)
    entry = POLICIES[name]
    more = ",".join(f"{option}={show(value)}" for option, value in options.items())
    if more:
        given |= parse_options(name, more, entry.options)
    return entry.make(seed, given)


def policy_help() -> str:
    """Return the options of every policy, with meanings and defaults, as text."""
    lines = ["Policies and their options, as in --policy exact:rank_power=0.5,tail=1:"]
    for name, entry in POLICIES.items():
        lines += ["", f"  {name}{'' if entry.options else ': no options'}"]
        for option in entry.options.values():
            lines.append(f"    {option.name}: {option.allowed}; default {show(option.default)}")
            lines += textwrap.wrap(
                option.meaning, 80, initial_indent=INDENT, subsequent_indent=INDENT
            )
    return "\n".join(lines)
