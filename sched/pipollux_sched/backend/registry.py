"""The engines by name."""

from __future__ import annotations

import importlib.util
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


def _later(name: str, module: str, package: str | None = None) -> Factory:
    """Return the factory `make` of a module that is imported on first use.

    An engine that needs a `package`, which the extra of its name installs, finds its nodes itself.
    """

    def make(options: EngineOptions) -> Engine:
        if package and options.cluster is not None:
            raise BackendError(
                f"the {name} backend finds its nodes itself; leave the cluster file out"
            )
        if package and importlib.util.find_spec(package) is None:
            raise BackendError(
                f"the {name} backend needs the package {package}; install it with "
                f"pip install 'pipollux[{name}]'"
            )
        engine: Engine = import_module(f"{__package__}.{name}.{module}").make(options)
        return engine

    return make


ENGINES: Mapping[str, Factory] = {
    "local": _local,
    "kubernetes": _later("kubernetes", "factory", "lightkube"),
    "ray": _later("ray", "engine", "ray"),
    "slurm": _later("slurm", "engine"),
}


def make_engine(name: str, options: EngineOptions) -> Engine:
    """Return a new engine; `BackendError`: the name is unknown, or it cannot have these nodes."""
    if name not in ENGINES:
        known = ", ".join(sorted(ENGINES))
        raise BackendError(f"there is no backend {name!r}; choose from {known}")
    return ENGINES[name](options)
