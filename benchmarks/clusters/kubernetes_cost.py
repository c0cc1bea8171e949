"""Cost of the Kubernetes backend: CPU and requests of a scheduler, time to a first process.

    python benchmarks/clusters/kubernetes_cost.py requests [--replicas 200] [--seconds 60]
    python benchmarks/clusters/kubernetes_cost.py listings [--jobs 4000] [--seconds 60] [--real]
    sudo PIPOLLUX_KUBERNETES=… python benchmarks/clusters/kubernetes_cost.py latency [--turns 8]

`requests` serves the cluster in memory, whose containers are idle shells, and measures the
scheduler's process: without jobs, while all replicas start, and when they run. `listings` measures
the engine beside an API server in another process with as many pods as a large cluster: that of the
tests, or with --real Kubernetes' own, with etcd. `latency` starts `kubectl run` and a replica of
the engine in turn on a real kubelet.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from kubernetes_full_memory import FullInMemory  # same folder
from kubernetes_full_real import FullControlPlane  # same folder
from kubernetes_listings import listings  # same folder
from kubernetes_site import NAMESPACE, Site, end_in_order  # same folder

from pipollux_sched.backend.base import Signal
from tests.kubernetes.cluster import IMAGE, until
from tests.kubernetes.engines import Rig, shell
from tests.kubernetes.harness.control_plane import ControlPlane
from tests.kubernetes.memory.cluster import MemoryCluster
from tests.kubernetes.memory.resources import PODS

REPLICAS_OF_A_JOB = 8
GPUS = 4
TELL = "date +%s.%N; exec sleep 1000"
"""The first process prints the time of its start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["requests", "listings", "latency"])
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args()
    end_in_order()
    if options.what == "requests":
        requests(options.replicas, options.seconds)
    elif options.what == "listings":
        serves = FullControlPlane if options.real else FullInMemory
        listings(serves, options.jobs, options.seconds)
    else:
        latency(options.turns)


def requests(num_replicas: int, seconds: float) -> None:
    """Print the usage of a scheduler with `--replicas` idle replicas, and without any."""
    nodes = [f"n{number}" for number in range(1, -(-num_replicas // GPUS) + 1)]
    with (
        tempfile.TemporaryDirectory() as folder,
        MemoryCluster(Path(folder) / "cluster", nodes, GPUS) as cluster,
    ):
        script = cluster.shared / "idle.sh"
        script.write_text("exec sleep 100000\n")
        site = Site(cluster, "--interval", "60", "--image-python", shell(cluster.shared))
        usage = Usage(site, cluster)
        try:
            usage.take("no job", seconds)
            begun = usage.now()
            num_jobs = num_replicas // REPLICAS_OF_A_JOB
            for number in range(num_jobs):
                size = {"minReplicas": REPLICAS_OF_A_JOB, "maxReplicas": REPLICAS_OF_A_JOB}
                site.apply(f"job-{number}", script, [], **size)
            site.until("all replicas run", lambda: _running(cluster) == num_replicas)
            usage.show(f"{num_replicas} replicas start", begun)
            time.sleep(5)
            usage.take(f"{num_replicas} replicas run", seconds)
        finally:
            site.kill()
            site.close()


def _running(cluster: MemoryCluster) -> int:
    """Return how many pods run, without a request."""
    pods = cluster.registry.store.list(PODS, NAMESPACE)
    return sum((pod.get("status") or {}).get("phase") == "Running" for pod in pods)


class Usage:
    """Resources that the scheduler has used between two moments; one request per job is our own."""

    def __init__(self, site: Site, cluster: MemoryCluster) -> None:
        self._process, self._front = site.process, cluster.front
        print("| | seconds | CPU seconds a minute | requests a minute | most of them |")
        print("|---|---|---|---|---|")

    def now(self) -> tuple[float, float, Counter[tuple[str, str]]]:
        """Return the time, the CPU seconds and the requests until now."""
        times = self._process.cpu_times()
        return time.monotonic(), times.user + times.system, Counter(self._front.requests)

    def take(self, what: str, seconds: float) -> None:
        """Wait for an interval without own requests, then print the usage."""
        begun = self.now()
        time.sleep(seconds)
        self.show(what, begun)

    def show(self, what: str, begun: tuple[float, float, Counter[tuple[str, str]]]) -> None:
        """Print the usage since the start."""
        ended = self.now()
        minutes = (ended[0] - begun[0]) / 60.0
        made = ended[2] - begun[2]
        most = ", ".join(f"{verb} {kind} {n}" for (verb, kind), n in made.most_common(5))
        print(
            f"| {what} | {60 * minutes:.0f} | {(ended[1] - begun[1]) / minutes:.2f} | "
            f"{made.total() / minutes:.0f} | {most} |",
            flush=True,
        )


def latency(turns: int) -> None:
    """Print the seconds to the first process, of `kubectl run` and the engine in turn."""
    with ControlPlane(nodes=1) as cluster:
        cluster.create_namespace(NAMESPACE)
        cluster.shared.chmod(0o777)
        rig = Rig(cluster, NAMESPACE, cluster.shared / "rig")
        took: dict[str, list[float]] = {"kubectl run": [], "a replica": []}
        try:
            for turn in range(turns + 1):  # the first one warms up
                pair = _by_kubectl(cluster, f"plain-{turn}"), _by_engine(rig, turn + 1)
                if turn:
                    for times, seconds in zip(took.values(), pair, strict=True):
                        times.append(seconds)
        finally:
            rig.close()
    ratios = [b / a for a, b in zip(*took.values(), strict=True)]
    print("| | median | least | most |\n|---|---|---|---|")
    for what, times in took.items():
        print(f"| {what} | {median(times):.2f} s | {min(times):.2f} s | {max(times):.2f} s |")
    least, most = min(ratios), max(ratios)
    print(
        f"| replica / kubectl run, turn by turn | {median(ratios):.2f} | {least:.2f} | {most:.2f} |"
    )


def _by_kubectl(cluster: ControlPlane, name: str) -> float:
    begun = time.time()
    run = ["--image", IMAGE, "--image-pull-policy=Never", "--restart=Never"]
    cluster.kubectl("-n", NAMESPACE, "run", name, *run, "--command", "--", "sh", "-c", TELL)
    with cluster.client(NAMESPACE) as client:
        told = until(lambda: "".join(client.log(name)), f"pod {name} says when it began")
    cluster.kubectl("-n", NAMESPACE, "delete", "pod", name, "--now")
    return float(told.split()[0]) - begun


def _by_engine(rig: Rig, attempt: int) -> float:
    begun = time.time()
    (key,) = rig.start(TELL, attempt=attempt)
    told = until(lambda: rig.log(key), f"{key} says when it began")
    rig.engine.signal(key, Signal.KILL)
    rig.ended(key)
    rig.forget(attempt=attempt)
    return float(told.split()[0]) - begun


if __name__ == "__main__":
    main()
