"""The factory of the engine for `serve --backend kubernetes`."""

from __future__ import annotations

from dataclasses import replace

from pipollux_sched.backend.base import BackendError, Engine
from pipollux_sched.backend.registry import EngineOptions

from .options import KubernetesOptions

__all__ = ["make"]


def make(options: EngineOptions) -> Engine:
    """Return the engine; `BackendError`: no client library, or no cluster is configured."""
    if options.cluster is not None:
        raise BackendError(
            "the kubernetes backend finds its nodes itself; leave the cluster file out"
        )
    try:
        from .engine import KubernetesEngine
        from .trainjob_engine import TrainJobEngine
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the kubernetes backend needs the package {error.name}; install it with "
            "pip install 'pipollux[kubernetes]'"
        ) from error
    own: KubernetesOptions = options.own or KubernetesOptions()
    engine = TrainJobEngine if own.via == "trainjob" else KubernetesEngine
    return engine(replace(own, grace=options.grace), options.state_dir)
