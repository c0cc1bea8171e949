"""The engines by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.store import StateDir

from .base import BackendError, Engine
from .local.engine import LocalEngine

DEFAULT_BACKEND = "local"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Arguments for an engine."""

    state_dir: StateDir
    cluster: ClusterSpec | Path | None = None
    """The nodes, or the path of their file, for an engine that does not find them itself."""
    grace: float = 30.0
    """Seconds that a replica has to save after a stop signal."""
    pass_environment: Collection[str] = ()
    """Further variables of this process to pass to jobs."""
    own: Any = None
    """Options of one engine alone; see its module."""


Factory: TypeAlias = Callable[[EngineOptions], Engine]


def _local(options: EngineOptions) -> Engine:
    if options.cluster is None:
        raise BackendError("the local backend has no nodes; give it a cluster")
    return LocalEngine(
        options.cluster, options.state_dir, pass_environment=options.pass_environment
    )


def _later(module: str) -> Factory:
    """Return the factory `make` of a module that is imported on first use."""

    def make(options: EngineOptions) -> Engine:
        engine: Engine = import_module(module).make(options)
        return engine

    return make


ENGINES: Mapping[str, Factory] = {
    "local": _local,
    "kubernetes": _later("pipollux_sched.backend.kubernetes.factory"),
    "ray": _later("pipollux_sched.backend.ray.engine"),
    "slurm": _later("pipollux_sched.backend.slurm.engine"),
}


def make_engine(name: str, options: EngineOptions) -> Engine:
    """Return a new engine; `BackendError`: the name is unknown, or it cannot have these nodes."""
    if name not in ENGINES:
        known = ", ".join(sorted(ENGINES))
        raise BackendError(f"there is no backend {name!r}; known are: {known}")
    return ENGINES[name](options)
