"""The options of push and pull."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from pipollux_hybrid.errors import Allowed, at_least, check_values, is_whole, switch

AUTO = "auto"
"""Value of ``sync_every`` that derives H from measured times."""
OUTER = {
    "lr": at_least(0.0, "a finite number of at least 0 is needed; 0.7 is DiLoCo's"),
    "momentum": Allowed(
        lambda value: isinstance(value, (int, float)) and 0.0 <= value < 1.0,
        "a number from 0 to below 1 is needed; 0.9 is DiLoCo's",
    ),
    "nesterov": switch(),
}
PUSH_PULL = {
    "sync_every": Allowed(
        lambda value: value == AUTO or (is_whole(value) and value >= 1),
        "a whole number of steps of at least 1 is needed, or 'auto'",
    ),
    "fragments": at_least(1, "a whole number of at least 1 is needed", whole=True),
    "outer_optimizer": Allowed(
        lambda value: isinstance(value, OuterSGD),
        "pipollux.OuterSGD(lr=…, momentum=…, nesterov=…) is needed, which runs on the servers",
    ),
    "max_staleness": Allowed(
        lambda value: value == math.inf or (is_whole(value) and value >= 0),
        "a whole number of rounds of at least 0 is needed, or math.inf",
    ),
    "quorum": Allowed(
        lambda value: value is None or (is_whole(value) and value >= 1),
        "a whole number of replicas of at least 1 is needed, or None",
    ),
    "overlap": at_least(0, "a whole number of steps of at least 0 is needed", whole=True),
    "compression": Allowed(lambda value: value in (None, "int8"), "None or 'int8' is needed"),
    "adapt_to_speed": switch(),
}


@dataclass(frozen=True, kw_only=True)
class OuterSGD:
    """SGD on the servers, over the replicas' averaged changes of the parameters.

    Args:
        lr: Learning rate of the outer steps.
        momentum: Momentum factor.
        nesterov: Whether the momentum is Nesterov's.

    The defaults are DiLoCo's (arXiv 2311.08105). With ``OuterSGD(lr=1.0, momentum=0.0)`` servers
    average the replicas' parameters, as in Local SGD.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_values(OUTER, vars(self))


@dataclass(frozen=True, kw_only=True)
class PushPull:
    """Training without an all-reduce per step, for replicas with slow links between them.

    Each replica trains on its own and pushes the change of its parameters to servers every H steps
    (:mod:`pipollux.server`). The servers average the changes, weighted by samples, take a step of
    the outer optimizer, and the replica pulls the result and continues from it.

    Example::

        model = HybridParallel(model, optimizer, synchronization=PushPull(sync_every=50))

    Args:
        sync_every: Inner steps H between two pushes of a fragment. ``"auto"``: the smallest number
            for which communication takes less than 5 % of the time, as measured.
        fragments: Number P of groups into which a stage's layers are divided, of similar size. One
            of them is pushed every H/P steps, which lowers the peak of the traffic.
        outer_optimizer: The optimizer of the servers.
        max_staleness: Rounds s by which the slowest replica may be behind when another pulls. 0:
            all replicas finish a round before any begins the next one, as in synchronous DiLoCo;
            ``math.inf``: nobody waits.
        quorum: Pushes of a fragment that make an outer step; None: those of all replicas if
            ``max_staleness`` is 0, else 1.
        overlap: Steps τ that a replica trains on while its push and pull are under way; fewer than
            ``sync_every``. Their change of the parameters is kept and is part of the next push.
        compression: ``"int8"``: pushes have one byte per element and a scale per tensor, with an
            error of at most the largest element/254, which is added to the next push. None: the
            parameters' own dtype, at least float32.
        adapt_to_speed: Whether a replica slower than the fastest one takes fewer steps per round,
            in proportion to its speed, so that all rounds take equally long.

    Raises:
        ConfigurationError: A value is not allowed; the message names it.
    """

    sync_every: int | Literal["auto"] = 100
    fragments: int = 1
    outer_optimizer: OuterSGD = OuterSGD()
    max_staleness: float = 0
    quorum: int | None = None
    overlap: int = 0
    compression: Literal["int8"] | None = None
    adapt_to_speed: bool = True

    def __post_init__(self) -> None:
        check_values(PUSH_PULL, vars(self))
        steps = self.sync_every
        if not isinstance(steps, int):
            return
        upper = {
            "fragments": at_most(steps, "one fragment is pushed every H/P steps"),
            "overlap": at_most(steps - 1, "a pull ends before the next push"),
        }
        check_values(upper, vars(self))

    @property
    def least_pushes(self) -> int | None:
        """Pushes that make an outer step; None: those of all replicas."""
        return 1 if self.quorum is None and self.max_staleness > 0 else self.quorum

    def to_json_object(self) -> dict[str, Any]:
        """Return what the replicas of a job have to agree on."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        outer = self.outer_optimizer
        stale = None if self.max_staleness == math.inf else int(self.max_staleness)
        return {**given, "outer_optimizer": vars(outer), "max_staleness": stale}


def at_most(most: int, why: str) -> Allowed:
    """Return the check for an upper bound that follows from ``sync_every``."""
    return Allowed(lambda value: value <= most, f"at most {most} is allowed, as {why}")
