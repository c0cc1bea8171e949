"""The factory of the engine for `serve --backend kubernetes`."""

from __future__ import annotations

from dataclasses import replace

from pipollux_sched.backend.base import Engine
from pipollux_sched.backend.registry import EngineOptions

from .engine import KubernetesEngine
from .options import KubernetesOptions
from .trainjob_engine import TrainJobEngine


def make(options: EngineOptions) -> Engine:
    """Return the engine; `BackendError`: no cluster is configured."""
    own: KubernetesOptions = options.own or KubernetesOptions()
    engine = TrainJobEngine if own.via == "trainjob" else KubernetesEngine
    return engine(replace(own, grace=options.grace), options.state_dir)
