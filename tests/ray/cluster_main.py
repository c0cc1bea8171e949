"""Runs the raylets of a test's Ray cluster: reads commands as JSON lines, answers each with one.

They are a process of their own because Ray keeps much in the process that uses it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from typing import Any

import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster

SMALL = {
    "node_ip_address": "127.0.0.2",  # Ray replaces 127.0.0.1 by the address of an interface
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}


class Holder:
    """Other work of the cluster, which holds resources."""

    def ready(self) -> None:
        """Return once it is placed."""


class Raylets:
    """The head, and nodes that come and go."""

    def __init__(self, name: str, num_cpus: int) -> None:
        # Ray starts the server of the dashboard even where there is none, and has no option for it.
        Node.start_api_server = lambda *_, **__: None
        head = {**SMALL, "node_name": name, "num_cpus": num_cpus, "num_gpus": 0}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        self._others: dict[str, Any] = {}
        ray.init(
            self._cluster.address, namespace="others", log_to_driver=False, configure_logging=False
        )

    def address(self) -> str:
        """Return the address of the head."""
        return str(self._cluster.address)

    def add(self, name: str, **resources: Any) -> str:
        """Start a node; return its id."""
        resources = {"num_gpus": 0, **resources}
        self._nodes[name] = self._cluster.add_node(node_name=name, **SMALL, **resources)
        return self.id_of(name)

    def remove(self, name: str) -> None:
        """Let the raylet of a node be killed, and with it all that Ray has started there."""
        node = self._nodes.pop(name)
        os.kill(self.raylet(node), signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, name: str) -> None:
        """Let Ray drain a node that its cloud will reclaim in an hour."""
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        until = int((time.time() + 3600) * 1000)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        gcs = ray._private.worker.global_worker.gcs_client
        accepted, why = gcs.drain_node(self.id_of(name), reason, "it is reclaimed", until)
        if not accepted:
            raise RuntimeError(why)

    def raylet(self, node: Any) -> int:
        """Return the process of a raylet."""
        return int(node.all_processes["raylet"][0].process.pid)

    def control_plane(self) -> int:
        """Return the process of the control plane."""
        return int(self._cluster.head_node.all_processes["gcs_server"][0].process.pid)

    def id_of(self, name: str) -> str:
        """Return the id of a live node."""
        return next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeName"] == name)

    def occupy(self, name: str, **amounts: float) -> None:
        """Let other work hold resources of a node."""
        holder = ray.remote(Holder).options(
            label_selector={"ray.io/node-id": self.id_of(name)}, **amounts
        )
        self._others[name] = holder.remote()
        ray.get(self._others[name].ready.remote(), timeout=60)

    def release(self, name: str) -> None:
        """End the other work of a node."""
        ray.kill(self._others.pop(name))

    def reserve(self, group: str, name: str) -> None:
        """Create a placement group of one CPU on a node."""
        made = ray.util.placement_group(
            [{"CPU": 1}],
            name=group,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": self.id_of(name)}],
        )
        ray.get(made.ready(), timeout=60)

    def end_actor(self, name: str, namespace: str) -> None:
        """Let an admin end an actor."""
        ray.kill(ray.get_actor(name, namespace))

    def actors(self) -> list[dict[str, str]]:
        """Return the live actors of all namespaces."""
        return list(ray.util.list_named_actors(all_namespaces=True))

    def groups(self) -> list[str]:
        """Return the names of the placement groups."""
        table = ray.util.placement_group_table().values()
        return [group["name"] for group in table if group["state"] != "REMOVED"]

    def pretend(self, **versions: str) -> dict[str, str]:
        """Let the cluster claim other versions; return those that it has claimed."""
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

        known = json.loads(_internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster"))
        new = json.dumps({**known, **versions}).encode()
        _internal_kv_put(b"CLUSTER_METADATA", new, overwrite=True, namespace=b"cluster")
        return {name: known[name] for name in versions}

    def close(self) -> None:
        """End it all."""
        ray.shutdown()
        self._cluster.shutdown()


def main() -> None:
    """Obey until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    raylets = Raylets(sys.argv[1], int(sys.argv[2]))
    try:
        for line in sys.stdin:
            method, arguments, options = json.loads(line)
            try:
                answer = getattr(raylets, method)(*arguments, **options)
                answers.write(json.dumps({"answer": answer}) + "\n")
            except Exception as error:  # the test reports it
                answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    finally:
        raylets.close()
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


if __name__ == "__main__":
    main()
