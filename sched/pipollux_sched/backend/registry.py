"""The backends by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from pipollux_sched.backend.local.backend import LocalBackend
from pipollux_sched.backend.local.hardware import check_gpus
from pipollux_sched.store import StateDir

from .base import Backend, BackendError, Node

Factory: TypeAlias = Callable[[Mapping[str, Node], StateDir, float, Collection[str]], Backend]

DEFAULT_BACKEND = "local"


def _local(
    nodes: Mapping[str, Node], state_dir: StateDir, grace: float, variables: Collection[str]
) -> Backend:
    check_gpus(nodes)
    return LocalBackend(nodes, state_dir, grace=grace, pass_environment=variables)


BACKENDS: Mapping[str, Factory] = {"local": _local}
"""Every backend, by name."""


def make_backend(
    name: str,
    nodes: Mapping[str, Node],
    state_dir: StateDir,
    *,
    grace: float,
    pass_environment: Collection[str] = (),
) -> Backend:
    """Return a new backend.

    Args:
        name: one of `BACKENDS`.
        nodes: the nodes that replicas can be started on, by name.
        state_dir: where the jobs' logs and checkpoints go.
        grace: seconds that a generation has to save when a newer one takes its place.
        pass_environment: further variables of this process to pass to jobs.

    Raises:
        BackendError: there is no backend of this name, or it cannot have these nodes.
    """
    if name not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise BackendError(f"there is no backend {name!r}; known are: {known}")
    return BACKENDS[name](nodes, state_dir, grace, pass_environment)
