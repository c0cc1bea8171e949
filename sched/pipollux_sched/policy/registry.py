"""The policies by name, for command lines and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from .exact import ExactPolicy
from .fifo import FifoPolicy
from .job_info import JobInfo, NodeInfo
from .optimus import OptimusPolicy
from .pollux import PolluxPolicy
from .sia import SiaPolicy
from .tiresias import TiresiasPolicy


class Policy(Protocol):
    """What every policy can do."""

    def allocate_job(self, job_info: JobInfo, nodes: Mapping[Any, NodeInfo]) -> list[Any]:
        """Place one arriving job without moving any other."""

    def optimize(
        self,
        jobs: Mapping[Any, JobInfo],
        nodes: Mapping[Any, NodeInfo],
        base_allocations: Mapping[Any, Sequence[Any]],
        node_template: NodeInfo,
    ) -> tuple[Mapping[Any, Sequence[Any]], int]:
        """Allocate all jobs anew."""


Factory: TypeAlias = Callable[[int], Policy]
"""Makes a policy for a seed; those that draw nothing take no notice of it."""


POLICIES: Mapping[str, Factory] = {
    "exact": lambda seed: ExactPolicy(),  # noqa: ARG005  # draws nothing
    "pollux": lambda seed: PolluxPolicy(seed=seed),
    "sia": lambda seed: SiaPolicy(),  # noqa: ARG005  # draws nothing
    "optimus": lambda seed: OptimusPolicy(),  # noqa: ARG005  # draws nothing
    "tiresias": lambda seed: TiresiasPolicy(),  # noqa: ARG005  # draws nothing
    "fifo": lambda seed: FifoPolicy(),  # noqa: ARG005  # draws nothing
}
"""Every policy with its defaults, by name."""


def make_policy(name: str, *, seed: int = 0) -> Policy:
    """Return a new policy.

    Args:
        name: one of `POLICIES`.
        seed: of its random numbers, if it draws any.

    Raises:
        ValueError: there is no policy of this name.

    Example:
        >>> type(make_policy("pollux", seed=3)).__name__
        'PolluxPolicy'
    """
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is not known; give one of {', '.join(POLICIES)}")
    return POLICIES[name](seed)
