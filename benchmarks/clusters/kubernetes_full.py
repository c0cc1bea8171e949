"""The API server of the tests, in a process of its own, with as many objects as a large cluster.

Its nodes, pods and custom resources are there when it begins to serve; no kubelet runs them.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

from kubernetes_site import CRD, NAMESPACE  # lies beside
from lightkube import KubeConfig
from lightkube.config.kubeconfig import SingleConfig

from pipollux_sched.backend import Launch, ReplicaProgram
from pipollux_sched.backend.base import Seat
from pipollux_sched.backend.kubernetes import names
from pipollux_sched.backend.kubernetes.options import KubernetesOptions
from pipollux_sched.backend.kubernetes.owner import Owner
from pipollux_sched.backend.kubernetes.pods import make_pod
from pipollux_sched.backend.kubernetes.resource_controller import MADE_BY
from tests.kubernetes.cluster import IMAGE
from tests.kubernetes.memory import defaults, kinds
from tests.kubernetes.memory.cluster import MemoryCluster
from tests.kubernetes.memory.conditions import set_condition
from tests.kubernetes.memory.resources import PODS, Resource

GPUS = 8
WIDTHS = (1, 1, 2, 6)
"""Replicas of four jobs: of 4000 together 10 000."""
OPTIONS = KubernetesOptions(namespace=NAMESPACE, python="python", checkpoint_claim="checkpoints")


class Size(NamedTuple):
    """How much there is."""

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
        """Names of the nodes, which they fill."""
        return [f"node-{n:04d}" for n in range(-(-self.num_replicas // GPUS))]


class FullCluster:
    """That process; a context manager.

    Args:
        folder: an empty one.
        size: how much there is.
        identity: of the state directory that knows the jobs.
    """

    def __init__(self, folder: Path, size: Size, identity: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, folder, size, identity))
        self._process.start()
        config = KubeConfig.from_file(self._ours.recv()).get()
        assert config is not None
        self.config: SingleConfig = config

    def change_pods(self, number: int, pause: float = 0.0) -> None:
        """Let pods drawn at random become ready, or no more, one after the other."""
        self._ours.send(("change", number, pause))
        self._ours.recv()

    def expire_watches(self) -> None:
        """End all watches; none can go on from where it was."""
        self._ours.send(("expire",))
        self._ours.recv()

    def pod_bytes(self) -> int:
        """Return how long a pod is as JSON."""
        self._ours.send(("bytes",))
        return int(self._ours.recv())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # it has failed, and said how
            self._ours.send(("end",))
        self._process.join()


def _serve(commands: Connection, folder: Path, size: Size, identity: str) -> None:
    with MemoryCluster(folder, size.nodes, GPUS, kubelets=False) as cluster:
        assert isinstance(cluster, MemoryCluster)
        cluster.declare(CRD)
        cluster.create_namespace(NAMESPACE)
        pods = _fill(cluster, size, identity)
        commands.send(cluster.kubeconfig)
        drawn, store = random.Random(0), cluster.registry.store
        while True:
            match commands.recv():
                case ("change", number, pause):
                    for name in drawn.choices(pods, k=number):
                        store.change(PODS, NAMESPACE, name, _turn_readiness)
                        time.sleep(pause)
                    commands.send(None)
                case ("expire",):
                    commands.send(cluster.expire_watches())
                case ("bytes",):
                    commands.send(len(json.dumps(store.get(PODS, NAMESPACE, pods[0]))))
                case _:
                    return


def _fill(cluster: MemoryCluster, size: Size, identity: str) -> list[str]:
    """Add jobs and their pods; return the names of these."""
    store, pods = cluster.registry.store, []
    resource = kinds.find(store, names.GROUP, names.VERSION, names.PLURAL)
    places = (node for node in size.nodes for _ in range(GPUS))
    for job, width in size.widths.items():
        spec = {"image": IMAGE, "script": "/train.py", "suspend": False}
        metadata = {"name": job, "annotations": {MADE_BY: identity}}
        made = cluster.registry.create(resource, NAMESPACE, _object(resource, metadata, spec))
        owner = Owner(job, made["metadata"]["uid"])
        program = ReplicaProgram(job=job, script=Path("/train.py"), image=IMAGE)
        launch = Launch(
            job=job,
            generation=1,
            seats={replica: Seat(next(places), (0,)) for replica in range(width)},
            num_first=width,
            supervisor_url="http://pipollux:8080",
            checkpoints=f"/checkpoints/{job}/1",
        )
        for replica, seat in launch.seats.items():
            wanted = make_pod(program, launch, replica, owner, OPTIONS)
            pod = _object(PODS, wanted["metadata"], {**wanted["spec"], "nodeName": seat.node})
            defaults.fill_in(PODS, pod)
            _let_run(pod)
            pods.append(store.create(PODS, pod)["metadata"]["name"])
    return pods


def _object(
    resource: Resource, metadata: Mapping[str, Any], spec: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"namespace": NAMESPACE, **metadata},
        "spec": dict(spec),
    }


def _let_run(pod: dict[str, Any]) -> None:
    """Give a pod the status of one that runs, and what servers note about who wrote what."""
    status = pod["status"] = {**pod["status"], "phase": "Running", "podIP": "10.0.0.1"}
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
    written = {f"f:{key}": {} for key in pod["spec"]}
    written |= {f'k:{{"name":"{entry["name"]}"}}': {".": {}} for entry in container["env"]}
    pod["metadata"]["managedFields"] = [
        {"manager": "pipollux", "operation": "Update", "apiVersion": "v1", "fieldsV1": written}
    ]


def _turn_readiness(pod: dict[str, Any]) -> None:
    (ready,) = [entry for entry in pod["status"]["conditions"] if entry["type"] == "Ready"]
    ready["status"] = "False" if ready["status"] == "True" else "True"
