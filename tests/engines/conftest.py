"""A case for each engine: its cluster, which several tests share where it is a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipollux_sched.backend.replica import command
from tests.sched.backends import cpu_nodes
from tests.sched.scripts import LIGHT_AGENT
from tests.sched.supervised import Service

from .case import NODES, SLOTS, EngineCase, Scheduler
from .local import LocalCase

if TYPE_CHECKING:
    from tests.kubernetes.cluster import Cluster

SHARED = dict.fromkeys(("light ray", "ray"), "ray_cluster") | {
    "slurm": "slurm",
    "kubelets": "kubelets",
}
"""The fixture with the cluster of a case, where it outlasts a test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start a shared cluster before the test that asks for it first, of which it is no part."""
    for item in items:
        name = SHARED.get(getattr(getattr(item, "callspec", None), "params", {}).get("case", ""))
        if name and isinstance(item, pytest.Function):
            item.fixturenames = [name, *item.fixturenames]


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineCase]:
    """An engine on nodes where nothing runs; what a test leaves there is ended."""
    with ExitStack() as stack:
        made = _make(request, tmp_path, stack)
        stack.callback(made.close)
        yield made


def _make(request: pytest.FixtureRequest, folder: Path, stack: ExitStack) -> EngineCase:
    if request.param.startswith("light "):  # without torch
        request.getfixturevalue("monkeypatch").setattr(command, "_AGENT", LIGHT_AGENT)
    if request.param in ("light local", "local"):
        return LocalCase(folder)
    if request.param == "slurm":
        from .slurm import SlurmCase

        slurm = request.getfixturevalue("slurm_cluster")
        pool = slurm.allocate(f"--nodelist={','.join(NODES)}", "--gres=gpu:4", "--exclusive")
        stack.callback(slurm.call, "scancel", str(pool))
        return SlurmCase(folder, request.getfixturevalue("hosts"), slurm, pool)

    if request.param in ("light ray", "ray"):
        from .ray import RayCase

        return RayCase(folder, request.getfixturevalue("ray_cluster"))

    from .kubernetes import KubernetesCase, TrainJobCase

    cluster: Cluster = request.getfixturevalue(SHARED.get(request.param, "memory"))
    namespace = folder.name.replace("_", "-").rstrip("-")[:50]
    cluster.create_namespace(namespace)
    if cluster.is_real:
        folder.chmod(0o755)
        stack.callback(cluster.delete_namespace, namespace)
    if request.param == "trainjobs":
        return TrainJobCase(folder, cluster, namespace, stack)
    return KubernetesCase(folder, cluster, namespace)


@pytest.fixture
def scheduler(case: EngineCase, tmp_path: Path) -> Iterator[Scheduler]:
    """A scheduler of the case's engine."""
    nodes = cpu_nodes(**dict.fromkeys(NODES, SLOTS))
    with Service(tmp_path / "service", nodes=nodes, host=case.host, hosts=[case.host]) as service:
        yield Scheduler(case, service)
