"""Random faults of a Kubernetes cluster during one long workload, and their effect on the jobs.

    sudo PIPOLLUX_KUBERNETES=… python benchmarks/clusters/kubernetes_faults.py [--faults 50]
    python benchmarks/clusters/kubernetes_faults.py --memory [--seed 0] [--only-counting]

On real kubelets, or with `--memory` on the cluster in memory of the tests. The jobs and the
invariants after every fault and at the end are those of benchmarks/faults; after every fifth fault
the scheduler is killed as well. Prints Markdown; at the first violation exits with status 1, and
keeps the scheduler's state.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "faults"), str(Path(__file__).parent)]

from faults import Run  # of benchmarks/faults
from injections import Injection
from invariants import Invariants
from kubernetes_site import CRD, NAMESPACE, PROGRAM, end_in_order, free_port  # same folder
from lightkube.resources.core_v1 import Pod
from process_faults import agents, noticed, workers
from workload import COUNTING, Work
from world import World

from pipollux_sched.store import JobRecord, NodeCondition
from tests.kubernetes.cluster import IMAGE, Cluster
from tests.kubernetes.harness.control_plane import ControlPlane
from tests.kubernetes.memory.cluster import MemoryCluster

NODES = ("n1", "n2")
AWAY_SECONDS = 30.0
"""Seconds without an API server."""
KILL_EVERY = 5
"""The scheduler is killed as well after each multiple of this number of faults."""

KubernetesFault = Callable[["KubernetesWorld", random.Random], str | None]


class KubernetesWorld(World):
    """A started cluster, and a scheduler of one namespace; slots are the resource `device`."""

    def __init__(self, cluster: Cluster, slots: int, device: str) -> None:
        self.kubernetes, self._device = cluster, device
        self._port = free_port(cluster.address)
        self.saves = cluster.shared / "checkpoints"
        self.saves.mkdir()
        self.saves.chmod(0o777)
        self.num_kills = self.num_strikes = 0
        cluster.declare(CRD)
        cluster.create_namespace(NAMESPACE)
        folder = cluster.kubeconfig.parent / "world"
        folder.mkdir()
        super().__init__(folder, dict.fromkeys(NODES, slots))

    def command(self) -> list[str]:
        """Return the command of a scheduler: see `World`."""
        address = self.kubernetes.address
        return [
            *(*PROGRAM, "serve", "--backend=kubernetes", f"--state-dir={self.directory.path}"),
            *(f"--namespace={NAMESPACE}", f"--image-python={sys.executable}"),
            *(f"--host={address}", f"--port={self._port}"),
            *(f"--advertise-url=http://{address}:{self._port}",),
            *(f"--device-resource={self._device}", f"--checkpoint-host-path={self.saves}"),
            *(f"--checkpoint-folder={self.saves}", "--interval=2", "--hints-interval=5"),
            *("--checkpoint-interval=3", "--grace=20", "--heartbeat-timeout=12"),
            "--pod-security=baseline",  # the image is root's
        ]

    def environment(self) -> Mapping[str, str]:
        """Return variables of the scheduler: see `World`."""
        return {"KUBECONFIG": str(self.kubernetes.kubeconfig)}

    def is_ours(self, environment: Mapping[str, str]) -> bool:
        """Whether a process belongs to a job: see `World`."""
        where = environment.get("PIPOLLUX_CHECKPOINT_DIR", "")
        return where.startswith(str(self.saves))

    def submit(self, name: str, work: Work, **fields: Any) -> None:
        """Submit a job: see `World`."""
        super().submit(name, work, image=IMAGE, **fields)

    def checkpoints(self, job: JobRecord) -> Path:
        """Return the checkpoint folder of a job."""
        (folder,) = (self.saves / job.name).iterdir()
        return folder

    def pods(self) -> list[str]:
        """Return the names of existing pods."""
        return sorted(self.kubernetes.pods(NAMESPACE))

    def running_pod(self, rng: random.Random) -> str | None:
        """Return the name of a random running pod."""
        pods = self.kubernetes.pods(NAMESPACE).values()
        names = sorted(
            pod.metadata.name
            for pod in pods
            if pod.status.phase == "Running" and pod.metadata.deletionTimestamp is None
        )
        return rng.choice(names) if names else None

    def job_of(self, pod: str) -> JobRecord:
        """Return the current state of a pod's job."""
        return self.jobs()[pod.rsplit("-a", 1)[0]]


class KubernetesInvariants(Invariants):
    """Requires all nodes to be back, besides the invariants of one machine."""

    world: KubernetesWorld

    def settled(self) -> bool:
        """Whether all nodes take jobs, and no decision is still being carried out."""
        nodes = self.world.store.nodes().values()
        ready = {node.name for node in nodes if node.condition is NodeCondition.READY}
        return ready >= set(self.world.nodes) and super().settled()

    def _started_twice(self) -> Iterator[Path]:  # type: ignore[override]  # only iterated over
        return self.world.saves.glob("*/*/violations")


def take_api_server_away(world: KubernetesWorld, _: random.Random) -> str | None:
    """The API server does not answer for half a minute; jobs continue."""
    world.strike()
    world.kubernetes.stop_api_server()
    time.sleep(AWAY_SECONDS)
    world.kubernetes.start_api_server()
    return "the API server"


def expire_watches(world: KubernetesWorld, _: random.Random) -> str | None:
    """Every watch ends, and cannot resume: 410 Gone."""
    world.strike()
    world.kubernetes.expire_watches()
    return "all watches"


def delete_pod(world: KubernetesWorld, rng: random.Random) -> str | None:
    """A pod is deleted from outside, with its grace period or without."""
    if (name := world.running_pod(rng)) is None:
        return None
    world.strike()
    grace = rng.choice([None, 1])
    job = world.job_of(name)
    with world.kubernetes.client(NAMESPACE) as client:
        client.delete(Pod, name, grace_period=grace)
    noticed(world, job)
    return f"{name}, {'its own grace' if grace is None else 'a second of grace'}"


def evict_pod(world: KubernetesWorld, rng: random.Random) -> str | None:
    """A pod is evicted, as by a drain."""
    if (name := world.running_pod(rng)) is None:
        return None
    world.strike()
    job = world.job_of(name)
    world.kubernetes.evict(NAMESPACE, name)
    noticed(world, job)
    return name


def cordon_node(world: KubernetesWorld, rng: random.Random) -> str | None:
    """A node takes no new pods for some seconds; jobs leave it."""
    node = rng.choice(NODES)
    world.strike()
    world.kubernetes.cordon(node)
    time.sleep(rng.uniform(1.0, 8.0))
    world.kubernetes.cordon(node, cordoned=False)
    return node


def delete_node(world: KubernetesWorld, rng: random.Random) -> str | None:
    """A node's machine ends and the node is deleted; then one with the same name joins."""
    node = rng.choice(NODES)
    world.strike()
    world.kubernetes.delete_node(node)
    time.sleep(rng.uniform(1.0, 20.0))
    world.kubernetes.add_node(node)
    return node


def kill_worker(world: KubernetesWorld, rng: random.Random) -> str | None:
    """SIGKILL of a training process."""
    return _kill_one(world, rng, workers)


def kill_agent(world: KubernetesWorld, rng: random.Random) -> str | None:
    """SIGKILL of a torchrun agent, the first process of a container."""
    return _kill_one(world, rng, agents)


def _kill_one(
    world: KubernetesWorld, rng: random.Random, find: Callable[[World, str], list[int]]
) -> str | None:
    for job in rng.sample(world.training(), len(world.training())):
        if pids := find(world, job.name):
            world.signal(rng.choice(pids), signal.SIGKILL)
            return f"{noticed(world, job)}, attempt {job.state.attempt}"
    return None


def kill_scheduler(world: KubernetesWorld, rng: random.Random) -> str | None:
    """SIGKILL of the scheduler, and deletion of a pod before the next scheduler starts."""
    name = world.running_pod(rng)
    if name is None:
        return None
    job = world.job_of(name)
    world.kill()
    with world.kubernetes.client(NAMESPACE) as client:
        client.delete(Pod, name)
    world.serve()
    noticed(world, job)
    return f"the scheduler, and pod {name} deleted"


FAULTS: Mapping[str, tuple[int, KubernetesFault]] = {
    "API server away for 30 s": (1, take_api_server_away),
    "watches expired": (2, expire_watches),
    "pod deleted": (3, delete_pod),
    "pod evicted": (2, evict_pod),
    "node cordoned": (2, cordon_node),
    "node deleted, and a new one": (1, delete_node),
    "worker killed": (2, kill_worker),
    "agent killed": (2, kill_agent),
    "scheduler killed, pod deleted meanwhile": (1, kill_scheduler),
}
"""Every kind of fault, and its relative frequency."""


def with_a_kill(world: World, rng: random.Random, fault: KubernetesFault) -> str | None:
    """Inject a fault; kill the scheduler in the middle of every fifth one."""
    assert isinstance(world, KubernetesWorld)
    hit = fault(world, rng)
    if hit is None:
        return None
    world.num_strikes += 1
    if world.num_strikes % KILL_EVERY == 0:
        time.sleep(rng.uniform(0.0, 2.0))
        world.kill()
        world.num_kills += 1
        world.serve()
        return f"{hit}; scheduler killed"
    return hit


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600.0, help="no faults after so long")
    parser.add_argument("--memory", action="store_true", help="on the cluster of the tests")
    parser.add_argument("--only-counting", action="store_true", help="no jobs that train")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    end_in_order()
    if options.only_counting:
        _leave_out_training()
    with tempfile.TemporaryDirectory() as folder:
        cluster: Cluster
        if options.memory:
            packages = os.environ.get("PYTHONPATH", "")
            environment = {"PYTHONPATH": packages, "PATH": os.environ["PATH"]}
            place = Path(folder) / "cluster"
            cluster = MemoryCluster(place, NODES, 4, environment=environment)
            slots, device = 4, "nvidia.com/gpu"
        else:
            cluster = ControlPlane(nodes=len(NODES))
            slots, device = os.cpu_count() or 1, "cpu"
        with cluster:
            run_on(cluster, slots, device, options)


def run_on(cluster: Cluster, slots: int, device: str, options: argparse.Namespace) -> None:
    """Inject the faults on a cluster, and print their effect on the jobs."""
    injections: dict[str, tuple[int, Injection]] = {
        name: (weight, partial(with_a_kill, fault=fault))
        for name, (weight, fault) in FAULTS.items()
    }
    last = time.monotonic() + 60.0 * options.minutes
    world = KubernetesWorld(cluster, slots, device)
    try:
        checks = KubernetesInvariants(world)
        run = Run(world.folder, options.seed, options.jobs, options.out, checks, injections)
        world.until("the nodes are there", lambda: len(world.store.nodes()) == len(NODES))
        while run.total < options.faults and time.monotonic() < last:
            run.keep_busy()
            run.inject()
        world.until("all jobs have ended", lambda: not world.under_way(), 900.0)
        world.until("no pod is left", lambda: not world.pods(), 60.0)
        run.finish()
        print(run.report())
        print(f"\nThe scheduler was killed in the middle of {world.num_kills}; no pod is left.")
    except BaseException:  # also Ctrl-C
        kept = Path(tempfile.mkdtemp(prefix="pipollux-kubernetes-faults-"))
        shutil.copytree(world.folder, kept, dirs_exist_ok=True)
        print(f"what is left of it lies in {kept}", file=sys.stderr)
        world.kill()
        for pid in world.processes():
            world.signal(pid, signal.SIGKILL)
        raise


def _leave_out_training() -> None:
    import faults  # of benchmarks/faults

    faults.KINDS = tuple(kind for kind in faults.KINDS if kind["script"] == COUNTING)


if __name__ == "__main__":
    main()
