"""The suite's nodes as those of a Kubernetes cluster, real or in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightkube.resources.core_v1 import Pod

from pipollux_sched.backend import Engine
from pipollux_sched.backend.kubernetes.engine import KubernetesEngine
from pipollux_sched.backend.kubernetes.trainjob_engine import TrainJobEngine
from tests.kubernetes.cluster import IMAGE, Cluster, until
from tests.kubernetes.engines import Rig
from tests.kubernetes.objects import pod
from tests.kubernetes.trainer import Trainer

from . import quick_agent
from .case import SLOTS, EngineCase


class KubernetesCase(EngineCase):
    """Replicas are pods; on real kubelets with torchrun's own agent.

    Args:
        folder: of the test.
        cluster: where they run.
        namespace: in which.
    """

    kind: type[KubernetesEngine] = KubernetesEngine
    image = IMAGE
    sees_others = True
    refused = (
        ({"image": None}, "image: is missing"),
        ({"script": None}, "script: is missing"),
        ({"name": "a" * 50}, "at most 48"),
    )

    def __init__(self, folder: Path, cluster: Cluster, namespace: str) -> None:
        super().__init__(folder)
        self.host, self._cluster, self._namespace = cluster.address, cluster, namespace
        python = "python"
        if not cluster.is_real:
            program = folder / "python"
            # A quick agent, but the real one where it runs servers.
            program.write_text(
                f'#!/bin/sh\n[ -z "$PIPOLLUX_NUM_SERVERS" ] || exec {sys.executable} "$@"\n'
                f'exec {sys.executable} {quick_agent.__file__} "$@"\n'
            )
            program.chmod(0o755)
            python = str(program)
        self._rig = Rig(cluster, namespace, folder, engine=self.kind, python=python)

    def make(self) -> Engine:
        return self._rig.again() if self._engines else self._rig.engine

    def take_away(self, handle: str) -> None:
        with self._cluster.client(self._namespace) as client:
            client.delete(Pod, handle.removeprefix("pod/"), grace_period=1)

    @contextmanager
    def occupy(self, node: str, slots: int = SLOTS) -> Iterator[None]:
        with self._cluster.client(self._namespace) as client:
            theirs = pod("theirs", ["sleep", "600"], gpus=slots, node=node)
            client.create(Pod.from_dict(theirs))
            until(lambda: client.get(Pod, "theirs").spec.nodeName, "their pod is placed")
            yield
            client.delete(Pod, "theirs", grace_period=0)


class TrainJobCase(KubernetesCase):
    """Attempts are TrainJobs, of which the tests' stand-in for the Trainer makes pods."""

    kind = TrainJobEngine
    is_even = True

    def __init__(self, folder: Path, cluster: Cluster, namespace: str, stack: ExitStack) -> None:
        trainer = Trainer(cluster, stack.enter_context(cluster.client(namespace)))
        trainer.start()
        stack.callback(trainer.close)
        super().__init__(folder, cluster, namespace)
