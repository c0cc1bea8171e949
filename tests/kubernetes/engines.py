"""An engine on a cluster of a test, and scripts for its replicas that are quick to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightkube import KubeConfig

from pipollux_sched.backend import Launch, ReplicaKey, ReplicaProgram
from pipollux_sched.backend.base import ClusterUnavailableError, Ended, ReplicaState, Signal
from pipollux_sched.backend.kubernetes.engine import KubernetesEngine
from pipollux_sched.backend.kubernetes.options import KubernetesOptions, PodSecurity
from pipollux_sched.store import StateDir
from tests.sched.backends import assignments

from .cluster import IMAGE, Cluster, until

RUNS = "trap 'echo told; exit 143' TERM; echo ready; while :; do sleep 0.2; done"
"""A script that runs until it is told to end, and says so."""
DEAF = "trap '' TERM; echo ready; while :; do sleep 1; done"
"""A script that does not end when it is told to."""


def shell(folder: Path) -> str:
    """Return a program that is called as `python` and runs its script with a shell.

    What is tried here is what becomes of pods; torchrun's agent takes seconds to start.
    """
    path = folder / "shell"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec sh "$@"\n')
    path.chmod(0o755)
    return str(path)


def security(cluster: Cluster) -> PodSecurity:
    """Return the level that pods in tests meet: the image on real kubelets is root's."""
    return "baseline" if cluster.is_real else "restricted"


class Rig:
    """An engine whose replicas run shell scripts.

    Args:
        cluster: where they run.
        namespace: in which.
        folder: of the test, the same inside of containers.
        engine: the engine.
        options: that differ from the usual ones.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        folder: Path,
        *,
        engine: type[KubernetesEngine] = KubernetesEngine,
        **options: Any,
    ) -> None:
        self.cluster, self.folder, self.kind = cluster, folder, engine
        self.state_dir = StateDir(folder / "state")
        folder.mkdir(exist_ok=True, parents=True)
        chosen: dict[str, Any] = {
            "namespace": namespace,
            "python": shell(folder),
            "checkpoint_host_path": str(folder),
            "checkpoint_folder": str(folder),
            "grace": 20.0,
            "pod_security": security(cluster),
        }
        self.options = KubernetesOptions(**{**chosen, **options})
        self.engine = self.again()

    def again(self) -> KubernetesEngine:
        """Return another engine for the same replicas, as after a scheduler was killed."""
        config = KubeConfig.from_file(self.cluster.kubeconfig).get()
        assert config is not None
        self.engine = self.kind(self.options, self.state_dir, config=config, has_resources=False)
        return self.engine

    def start(
        self,
        script: str,
        nodes: Sequence[str] = ("n1",),
        *,
        job: str = "job",
        attempt: int = 1,
        num_stages: int = 1,
        image: str = IMAGE,
        environment: Mapping[str, str] | None = None,
    ) -> tuple[ReplicaKey, ...]:
        """Start an attempt of a shell script; return its replicas."""
        path = self.folder / f"{job}-{attempt}.sh"
        aside = path.with_suffix(".new")
        aside.write_text(script + "\n")
        aside.replace(path)  # a shell that reads it already goes on with the one before
        program = ReplicaProgram(
            job=job,
            script=path,
            image=image,
            num_stages=num_stages,
            environment={"PIPOLLUX_TOKEN": "to-ken", **(environment or {})},
        )
        launch = Launch(
            job=job,
            attempt=attempt,
            assignments=assignments(nodes, num_stages),
            num_first=len(nodes),
            scheduler_url="http://127.0.0.1:1",
            checkpoints=self.engine.checkpoints(program),
        )
        for replica in range(len(nodes)):
            self.engine.start(program, launch, replica)
        return launch.keys

    def state(self, key: ReplicaKey) -> ReplicaState | None:
        return self.engine.listing().replicas.get(key)

    def running(self, *keys: ReplicaKey) -> None:
        """Wait until replicas run and have printed that they are ready."""
        for key in keys:
            until(lambda key=key: self.log(key).startswith("ready"), f"{key} is ready")
            until(lambda key=key: (s := self.state(key)) and not s.waiting, f"{key} runs")

    def ended(self, key: ReplicaKey) -> Ended:
        """Wait for the end of a replica; return it."""
        return until(lambda: (s := self.state(key)) and s.ended, f"{key} has ended")

    def log(self, key: ReplicaKey) -> str:
        """Return the log of a replica, as far as it was brought here."""
        with suppress(ClusterUnavailableError):  # its kubelet does not serve yet, or any more
            self.engine.fetch_log(key)
        path = self.state_dir.log(*key)
        return path.read_text() if path.exists() else ""

    def forget(self, job: str = "job", attempt: int = 1) -> None:
        """Forget an attempt; return when nothing of it is left."""

        def gone() -> bool:
            self.engine.forget(job, attempt)
            return not [key for key in self.engine.listing().replicas if key[:2] == (job, attempt)]

        until(gone, f"attempt {attempt} of {job} is forgotten")

    def close(self) -> None:
        """End what is left, and close the engine."""
        for key, state in self.engine.listing().replicas.items():
            if state.ended is None:
                self.engine.signal(key, Signal.KILL)
        self.engine.close()
