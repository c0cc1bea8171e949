"""What tests rely on of real kubelets: torch in pods, the network, what is left of it all."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lightkube import Client
from lightkube.resources.core_v1 import Node, Pod, ServiceAccount

from tests.services import require_kubernetes

from .cluster import until
from .harness.control_plane import ControlPlane
from .harness.daemons import MARK
from .objects import SAMPLES, pod, sample
from .steps import LISTENS, create_pod, ended, printed

pytestmark = pytest.mark.kubernetes

SUM = """
import os, socket, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", int(total), "over", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(kubelets: ControlPlane) -> Iterator[ControlPlane]:
    yield kubelets
    kubelets.restore()


def test_torchrun_meets_over_nodes(cluster: ControlPlane, client: Client) -> None:
    script = cluster.shared / "sum.py"
    script.write_text(SUM)

    # Where the first one is, is known when it runs.
    waits = (
        "until test -e $0/address; do sleep 0.1; done; exec torchrun --nnodes=2 --node-rank=$1 "
        "--master-addr=`cat $0/address` --master-port=29500 $0/sum.py"
    )
    for rank in (0, 1):
        command = ["sh", "-c", waits, str(cluster.shared), str(rank)]
        node = f"n{rank + 1}"
        create_pod(client, f"rank-{rank}", command, gpus=2, node=node, folder=cluster.shared)
    address = until(lambda: client.get(Pod, "rank-0").status.podIP, "the pod has an address")
    (cluster.shared / "new").write_text(address)
    (cluster.shared / "new").rename(cluster.shared / "address")
    for name in ("rank-0", "rank-1"):
        assert ended(client, name).exitCode == 0, "".join(client.log(name))
    assert "sum 3 over 2\n" in list(client.log("rank-0"))


def test_containers_reach_this_machine(cluster: ControlPlane, client: Client) -> None:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer((cluster.address, 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://{cluster.address}:{server.server_port}"
        asks = f"import urllib.request as r; print(r.urlopen({url!r}).read())"
        create_pod(client, "it", ["python", "-c", asks])
        assert ended(client, "it").exitCode == 0
        server.shutdown()
        thread.join()
    assert list(client.log("it")) == ["b'hello'\n"]


def test_a_container_finds_the_api_server(cluster: ControlPlane, client: Client) -> None:
    asks = (
        "import lightkube, lightkube.core.exceptions as e\n"
        "from lightkube.resources.core_v1 import Pod\n"
        "try: list(lightkube.Client().list(Pod))\n"
        "except e.ApiError as error: print(error.status.reason)\n"
    )

    def has_token() -> bool:
        return bool(client.get(ServiceAccount, "default").secrets)

    asking = pod("it", ["python", "-c", asks])
    del asking["spec"]["automountServiceAccountToken"]
    until(has_token, "the namespace's account has a token")
    client.create(Pod.from_dict(asking))
    assert ended(client, "it").exitCode == 0
    assert list(client.log("it")) == ["Forbidden\n"], "it has a token, and no rights"


def test_a_cut_link_is_noticed(cluster: ControlPlane, client: Client) -> None:
    create_pod(client, "it", LISTENS, node="n2")
    printed(client, "it", "ready")
    cluster.hosts.link_down("n2")

    def state(wanted: str) -> bool:
        conditions = client.get(Node, "n2").status.conditions
        return any(c.type == "Ready" and c.status == wanted for c in conditions)

    until(lambda: state("Unknown"), "the node is not heard of")
    cluster.hosts.link_up("n2")
    until(lambda: state("True"), "it is heard of again")
    assert client.get(Pod, "it").status.phase == "Running"


def test_kubectl_shows_custom_resources(cluster: ControlPlane, namespace: str) -> None:
    cluster.declare(SAMPLES)
    manifest = cluster.shared / "sample.json"
    manifest.write_text(json.dumps(sample("mine")))
    cluster.kubectl("--namespace", namespace, "apply", "--filename", str(manifest))
    assert "mine" in cluster.kubectl("--namespace", namespace, "get", "samples")


def test_nothing_is_left(tmp_path: Path) -> None:
    """Two control planes side by side, of which one ends."""
    require_kubernetes()

    def marked(owner: str) -> set[int]:
        found = set()
        for process in psutil.process_iter(["environ", "status"]):
            if (process.info["environ"] or {}).get(MARK) == owner:
                found.add(process.pid)
        return found

    with ControlPlane() as cluster:
        cluster.add_node("mine")
        assert "mine" in cluster.kubectl("get", "nodes")
        owner = cluster._daemons._owner
        assert marked(owner)
        folder = cluster.folder
    assert not marked(owner)
    assert not folder.exists()
    mounts = subprocess.run(["mount"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in mounts
