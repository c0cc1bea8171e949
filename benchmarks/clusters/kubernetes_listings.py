"""Cost of listing many replicas for the Kubernetes backend: see `kubernetes_cost.py listings`."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from statistics import median

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1] / "service-load"))

from kubernetes_full import GPUS, OPTIONS, Full, FullCluster, Size  # same folder
from store import point, spec  # of benchmarks/service-load

from pipollux_sched.backend.base import ClusterUnavailableError
from pipollux_sched.backend.kubernetes.engine import KubernetesEngine
from pipollux_sched.backend.kubernetes.resource_controller import ResourceController
from pipollux_sched.controller.controller import StoredJobs
from pipollux_sched.lifecycle import Allocate, Started
from pipollux_sched.store import ReceivedReport, StateDir, Store, Submission

LOOK = 1.0
"""Seconds between two listings with 4000 jobs, and between two readings of the nodes."""
CALLS = 20
CHANGES = 500
"""Pods that change, in a burst and one at a time."""
APART = 0.02
"""Seconds between changes one at a time."""
PATIENCE = 300.0


def listings(serves: type[Full], num_jobs: int, seconds: float) -> None:
    """Print the usage of the engine, in this process, with `num_jobs` running jobs.

    `serves` is the API server, in another process; nothing changes for the first `seconds`.
    """
    size = Size(num_jobs)
    with tempfile.TemporaryDirectory() as name:
        state_dir = StateDir(Path(name) / "state")
        state_dir.create()
        identity = "0123456789abcdef"
        (state_dir.path / "kubernetes.id").write_text(identity)
        with FullCluster(serves, Path(name) / "cluster", size, identity) as cluster:
            length, num_nodes = cluster.pod_bytes(), len(size.nodes)
            print(f"{size.num_replicas} pods of {length} bytes, {num_nodes} nodes\n")
            print(f"To create them: {cluster.used()}\n")
            print("| | CPU | |\n|---|---|---|")
            with Store(state_dir.store, create=True) as store:
                _run_jobs(store, size)
                with took("first list"):
                    engine = KubernetesEngine(OPTIONS, state_dir, config=cluster.config)
                    _await_all(engine, size)
                try:
                    _engine(engine, cluster, size, seconds)
                    _controller(engine, store)
                finally:
                    engine.close()
                print(f"\nIn the end: {cluster.used()}")


def _engine(engine: KubernetesEngine, cluster: FullCluster, size: Size, seconds: float) -> None:
    """Measure listings and readings of nodes."""
    calls = (("listing()", engine.listing), ("nodes()", engine.nodes))
    for what, call in calls:
        call()
        show(f"{what}, nothing has changed", median(_cost(call) for _ in range(CALLS)))
    for what, call in calls:
        costs = []
        for _ in range(CALLS):
            _change(engine, cluster, 1)
            costs.append(_cost(call))
        show(f"{what}, one pod has changed", median(costs))
    for what, pause in (("in a burst", 0.0), ("each by itself", APART)):
        begun = time.process_time()
        _change(engine, cluster, CHANGES, pause)
        show(f"a changed pod, {CHANGES} {what}", (time.process_time() - begun) / CHANGES)
    with took(f"{seconds:.0f} s in which nothing changes"):
        for _ in range(round(seconds / LOOK)):
            time.sleep(LOOK)
            engine.listing()
            engine.nodes()
    # A real API server restarts for that; meanwhile all may have been listed again.
    with took("all watches end, and all is listed again"):
        cluster.expire_watches()
        _await_all(engine, size)


def _controller(engine: KubernetesEngine, store: Store) -> None:
    """Measure the controller of jobs and their resources."""
    controller = engine._controller
    assert isinstance(controller, ResourceController)
    jobs = StoredJobs(store, None)  # type: ignore[arg-type]  # no command is given
    with took("statuses of all jobs are written"):
        while not (controller.step(jobs) and controller.step(jobs)):
            time.sleep(0.1)
    time.sleep(2.0)  # until the watch has delivered them
    show(
        "jobs and resources compared, nothing has changed",
        median(_cost(lambda: controller.step(jobs)) for _ in range(5)),
    )
    costs = []
    for number in range(5):
        store.add_report(f"job-{number:04d}", 1, [point(2, time.time())])
        costs.append(_cost(lambda: controller.step(jobs)))
    show("jobs and resources compared, one job has made a step", median(costs))


def _run_jobs(store: Store, size: Size) -> None:
    """Store the jobs as running, each with a report."""
    places = (node for node in size.nodes for _ in range(GPUS))
    held = {job: tuple(islice(places, width)) for job, width in size.widths.items()}
    store.submit_all([Submission(job, spec(job), "token", max_restarts=3) for job in held])
    store.transition_all([(job, Allocate(nodes, "there is room")) for job, nodes in held.items()])
    store.transition_all([(job, Started(1, nodes)) for job, nodes in held.items()])
    store.add_all_reports([ReceivedReport(job, 1, [point(1, time.time())], None) for job in held])


def _await_all(engine: KubernetesEngine, size: Size) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(ClusterUnavailableError):
            nodes, replicas = engine.nodes(), engine.listing().replicas
            assert (len(nodes), len(replicas)) == (len(size.nodes), size.num_replicas)
            return
        time.sleep(0.1)
    raise AssertionError("not everything is listed")


def _change(engine: KubernetesEngine, cluster: FullCluster, number: int, pause: float = 0) -> None:
    """Change pods; return when the watch has delivered the changes."""
    before = engine._pods.changes
    cluster.change_pods(number, pause)
    while engine._pods.changes < before + number:
        time.sleep(0.005)
    time.sleep(0.05)  # the other watches


def _cost(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


@contextmanager
def took(what: str) -> Iterator[None]:
    """Print the usage of a step, and this process's memory after it."""
    wall, cpu = time.monotonic(), time.process_time()
    yield
    seconds, used = time.monotonic() - wall, time.process_time() - cpu
    now = psutil.Process().memory_info().rss / 2**20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    show(what, used, f"{seconds:.1f} s, then {now:.0f} MiB, at most {most:.0f} MiB so far")


def show(what: str, seconds: float, more: str = "") -> None:
    amount = f"{seconds:.2f} s" if seconds >= 1.0 else f"{1000 * seconds:.2f} ms"
    print(f"| {what} | {amount} | {more} |", flush=True)
