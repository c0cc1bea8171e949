"""A supervisor that listens, over a real store and backend; nothing steps the executor, so nothing
is started but what a test starts."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from pipollux_sched.allocator.job_infos import node_info
from pipollux_sched.backend import ReplicaGroupManager
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.controller.admission import program
from pipollux_sched.controller.commands import JobService
from pipollux_sched.controller.deletion import JobDeletion
from pipollux_sched.controller.executor import Executor
from pipollux_sched.lifecycle import Allocate
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.server import Limits, create_app, end_waiting
from pipollux_sched.server.http_server import HttpServer
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.store import StateDir, Store
from tests.sched.scripts import TOY

SCRIPT = str(TOY)
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP, each of which would read the authorities of the machine."""
ADMIN = "admin-token"
NODES = (NodeSpec(name="node-a", slots=2, kind="cpu"), NodeSpec(name="node-b", slots=2, kind="cpu"))

POINT = {
    "time": 1.0,
    "step": 7,
    "epoch": 0,
    "samples": 56,
    "loss": 0.5,
    "batchSize": 8,
    "atomicBsz": 8,
    "accumSteps": 0,
    "numReplicas": 1,
    "stepTime": 0.1,
    "predictedStepTime": None,
    "goodput": None,
    "efficiency": None,
}
TIMELINE = {
    "step": 7,
    "numStages": 1,
    "numMicrobatches": 1,
    "schedule": "1f1b",
    "events": [[0, 0, "forward", 0.0, 0.1], [0, 0, "backward", 0.1, 0.3]],
}


class Service:
    """A supervisor that listens; a context manager."""

    job: httpx.Client
    """Bears the token of the job that the tests of a module share, where they do."""

    def __init__(
        self,
        directory: Path,
        limits: Limits | None = None,
        *,
        nodes: Sequence[NodeSpec] = NODES,
        host: str = "127.0.0.1",
        **options: Any,
    ) -> None:
        self.state_dir = StateDir(directory)
        self.state_dir.create()
        self.store = Store(self.state_dir.database, create=True)
        self.store.set_nodes((n.name, n.slots, n.kind, n.model_dump(mode="json")) for n in nodes)
        engine = LocalEngine(ClusterSpec(nodes=tuple(nodes)), self.state_dir)
        backend = ReplicaGroupManager(engine, self.store.launches, self.state_dir, grace=1.0)
        executor = Executor(self.store, backend, lambda job: program(job, {}), grace=1.0)
        self.num_reconsidered = 0
        self.control = JobService(
            self.store,
            executor,
            backend,
            lambda: {node.name: node_info(node) for node in nodes},
            reconsider=self._reconsider,
            stopping=lambda: False,
            state_dir=self.state_dir.path,
            deletion=JobDeletion(self.store, self.state_dir),
        )
        self.metrics = SchedulerMetrics()
        self.app = create_app(
            self.store,
            self.control,
            state_dir=self.state_dir,
            admin_token=ADMIN,
            metrics=self.metrics,
            limits=limits,
            **options,
        )
        self.server = HttpServer(self.app, host, 0, tick=self.control.listening.tick)
        self.server.start()
        self._clients: list[httpx.Client] = []
        self.admin = self.client(ADMIN)

    def client(self, token: str | None) -> httpx.Client:
        """Return a client that shows a token; it is closed with the service."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        client = httpx.Client(
            base_url=self.server.url, headers=headers, trust_env=False, timeout=240, verify=NO_TLS
        )
        self._clients.append(client)
        return client

    def submit(self, name: str, nodes: Sequence[str] = (), **fields: Any) -> httpx.Client:
        """Submit a job and let it be allocated; return a client with its token."""
        body = {"name": name, "script": SCRIPT, **fields}
        self.admin.post("/jobs", json=body).raise_for_status()
        if nodes:
            self.store.transition(name, Allocate(list(nodes), "it is free"))
        return self.client(self.store.job(name).token)

    def stop_serving(self) -> None:
        """Stop as the scheduler does: those who wait are let go first."""
        end_waiting(self.app)
        self.server.stop()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self.stop_serving()
        self.store.close()

    def _reconsider(self) -> None:
        self.num_reconsidered += 1


def report(attempt: int = 1, **changes: object) -> dict[str, object]:
    """The body of a report of one point."""
    point = {**POINT, **changes}
    return {"attempt": attempt, "numEpochs": 3, "points": [point], "timeline": TIMELINE}


def detail(response: httpx.Response) -> str:
    """The one sentence of a refusal."""
    body = response.json()
    assert body.keys() == {"detail"}
    text = body["detail"]
    assert isinstance(text, str)
    assert "\n" not in text
    return text
