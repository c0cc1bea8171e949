"""A cluster with as many objects as a large one, in a separate process.

Its nodes, pods and custom resources exist when it begins to serve; no kubelet runs them. They are
served by the API server of the tests (`kubernetes_full_memory`) or by a real control plane
(`kubernetes_full_real`).
"""

from __future__ import annotations

import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from kubernetes_site import CRD, NAMESPACE  # same folder
from lightkube import KubeConfig
from lightkube.config.kubeconfig import SingleConfig

from pipollux_sched.backend import Launch, ReplicaProgram
from pipollux_sched.backend.base import SlotAssignment
from pipollux_sched.backend.kubernetes import names
from pipollux_sched.backend.kubernetes.options import KubernetesOptions
from pipollux_sched.backend.kubernetes.pods import Owner, make_pod
from pipollux_sched.backend.kubernetes.resource_controller import MADE_BY
from tests.kubernetes.cluster import IMAGE, Cluster
from tests.kubernetes.memory.conditions import set_condition

GPUS = 8
WIDTHS = (1, 1, 2, 6)
"""Replicas of four jobs: 10 000 for 4000 jobs."""
OPTIONS = KubernetesOptions(namespace=NAMESPACE, python="python", checkpoint_claim="checkpoints")
Object = dict[str, Any]


class Size(NamedTuple):
    """The jobs, their replicas, and the nodes that these fill."""

    num_jobs: int

    @property
    def widths(self) -> Mapping[str, int]:
        """Replicas of each job."""
        return {f"job-{n:04d}": WIDTHS[n % len(WIDTHS)] for n in range(self.num_jobs)}

    @property
    def num_replicas(self) -> int:
        """Replicas of all jobs."""
        return sum(self.widths.values())

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, which the replicas fill."""
        return [f"node-{n:04d}" for n in range(-(-self.num_replicas // GPUS))]


class Full(ABC):
    """The server of the objects; `identity` is that of the state directory that knows the jobs."""

    def __init__(self, folder: Path, size: Size, identity: str) -> None:
        self.size, self.identity = size, identity
        self.cluster = self.make(folder)

    @abstractmethod
    def make(self, folder: Path) -> Cluster:
        """Return a cluster that has not started."""

    @abstractmethod
    def fill(self) -> list[str]:
        """Add nodes, jobs and their running pods; return the names of the pods."""

    @abstractmethod
    def turn_readiness(self, pod: str) -> None:
        """Toggle the readiness of a pod."""

    @abstractmethod
    def length(self, pod: str) -> int:
        """Return the length of a pod as JSON."""

    @abstractmethod
    def used(self) -> str:
        """Return the servers' usage so far as text."""

    def jobs(self) -> dict[str, Object]:
        """Return the custom resources of all jobs, by name."""
        spec = {"image": IMAGE, "script": "/train.py", "suspend": False}
        kind = {"apiVersion": f"{names.GROUP}/{names.VERSION}", "kind": names.KIND}
        note = {MADE_BY: self.identity}
        return {
            job: {
                **kind,
                "metadata": {"name": job, "namespace": NAMESPACE, "annotations": note},
                "spec": dict(spec),
            }
            for job in self.size.widths
        }

    def pods(self, uids: Mapping[str, str]) -> Iterator[Object]:
        """Yield the pods of all jobs, without a status; `uids` are those of custom resources."""
        places = (node for node in self.size.nodes for _ in range(GPUS))
        for job, width in self.size.widths.items():
            owner = Owner(job, uids[job])
            program = ReplicaProgram(job=job, script=Path("/train.py"), image=IMAGE)
            launch = Launch(
                job=job,
                attempt=1,
                assignments={
                    replica: SlotAssignment(next(places), (0,)) for replica in range(width)
                },
                num_first=width,
                scheduler_url="http://pipollux:8080",
                checkpoints=f"/checkpoints/{job}/1",
            )
            for replica, assignment in launch.assignments.items():
                made = make_pod(program, launch, replica, owner, OPTIONS)
                yield {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"namespace": NAMESPACE, **made["metadata"]},
                    "spec": {**made["spec"], "nodeName": assignment.node},
                }


class FullCluster:
    """The separate process, a context manager; `serves` is the server of the objects there."""

    def __init__(self, serves: type[Full], folder: Path, size: Size, identity: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        arguments = theirs, serves, folder, size, identity
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()  # so that EOF is received here
        config = KubeConfig.from_file(self._ours.recv()).get()
        assert config is not None
        self.config: SingleConfig = config

    def change_pods(self, number: int, pause: float = 0.0) -> None:
        """Toggle the readiness of random pods, one after another."""
        self._ask("change", number, pause)

    def expire_watches(self) -> None:
        """End all watches, none of which can resume."""
        self._ask("expire")

    def pod_bytes(self) -> int:
        """Return the length of a pod as JSON."""
        return int(self._ask("bytes"))

    def used(self) -> str:
        """Return the servers' usage so far as text."""
        return str(self._ask("used"))

    def _ask(self, *command: object) -> Any:
        self._ours.send(command)
        return self._ours.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # it has failed, and printed why
            self._ours.send(("end",))
        self._process.join()


def let_run(pod: Object) -> Object:
    """Give a pod the status of a running one, and return it."""
    status: Object = pod.setdefault("status", {})
    status |= {"phase": "Running", "podIP": "10.0.0.1"}
    for condition in ("Initialized", "Ready", "ContainersReady", "PodScheduled"):
        set_condition(pod, condition, "True")
    (container,) = pod["spec"]["containers"]
    status["containerStatuses"] = [
        {
            "name": container["name"],
            "ready": True,
            "started": True,
            "restartCount": 0,
            "image": IMAGE,
            "imageID": f"{IMAGE}@sha256:{'0' * 64}",
            "containerID": f"containerd://{'0' * 64}",
            "state": {"running": {"startedAt": "2026-11-25T00:00:00Z"}},
            "lastState": {},
        }
    ]
    return status


def turn_readiness(pod: Object) -> None:
    (ready,) = [entry for entry in pod["status"]["conditions"] if entry["type"] == "Ready"]
    ready["status"] = "False" if ready["status"] == "True" else "True"


def _serve(
    commands: Connection, serves: type[Full], folder: Path, size: Size, identity: str
) -> None:
    full = serves(folder, size, identity)
    with full.cluster as cluster:
        cluster.declare(CRD)
        cluster.create_namespace(NAMESPACE)
        pods = full.fill()
        commands.send(cluster.kubeconfig)
        drawn = Random(0)
        while True:
            match commands.recv():
                case ("change", number, pause):
                    for name in drawn.choices(pods, k=number):
                        full.turn_readiness(name)
                        time.sleep(pause)
                    commands.send(None)
                case ("expire",):
                    commands.send(cluster.expire_watches())
                case ("bytes",):
                    commands.send(full.length(pods[0]))
                case ("used",):
                    commands.send(full.used())
                case _:
                    return
