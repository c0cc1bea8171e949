"""Real nodes: a kubelet and a containerd on each host, with pods on the network of the hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from tests.hosts.harness.hosts import Hosts

from . import image, installation
from .daemons import Daemons
from .keys import Keys

CONTROLLERS = (
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "blkio",
    "pids",
    "systemd",
)
LOGS = Path("/var/log/pods")
"""Where every kubelet keeps the logs of its pods, whatever it is told."""
# Heartbeats of nodes; the controller manager waits `GRACE` seconds for one.
RENEWAL, GRACE = 3, 24


class Nodes:
    """Kubelets on hosts.

    Args:
        hosts: the machines.
        folder: for their state; its path must be short, as sockets lie in it.
        keys: of the control plane.
        server: URL of the API server.
        daemons: starts and ends programs.
    """

    def __init__(
        self, hosts: Hosts, folder: Path, keys: Keys, server: str, daemons: Daemons
    ) -> None:
        self._hosts, self._folder = hosts, folder
        self._keys, self._server, self._daemons = keys, server, daemons
        self._bin = installation.folder() / "bin"
        self._group = f"pipollux-{hosts.gateway.replace('.', '-')}"
        self._subnet = hosts.gateway.rsplit(".", 1)[0]
        self._kill_pods("")
        self._images = image.write_images(folder / "images", self._bin / "busybox")
        self._spec = folder / "runtime.json"
        image.runtime_spec(self._bin / "ctr", self._spec)
        self._write_network()

    def start(self, name: str) -> None:
        """Start what a node consists of; the API server sees it a moment later."""
        place = self._folder / name
        if not place.exists():
            place.mkdir()
            self._connect_pods(name)
            self._hide_logs(name, place / "logs")
            address = self._hosts.address(name)
            names = [f"IP:{address}"]
            self._keys.issue(name, f"/O=system:nodes/CN=system:node:{name}", names)
        self._make_groups(name)
        self._start_containerd(name, place)
        self._start_kubelet(name, place)

    def kill(self, name: str) -> None:
        """End everything on a node at once."""
        for program in ("kubelet", "containerd"):
            self._daemons.stop(f"{program}-{name}", signal.SIGKILL)
        self._hosts.kill(name)
        self._kill_pods(name)

    def close(self) -> None:
        """End everything on all nodes."""
        for name in self._hosts.names:
            self.kill(name)
        self._kill_pods("")
        for controller in CONTROLLERS:
            top = installation.CGROUPS / controller / self._group
            for path, _, _ in os.walk(top, topdown=False):
                with suppress(OSError):
                    os.rmdir(path)

    def _kill_pods(self, name: str) -> None:
        """Kill all that runs in containers of a node; "" means of all of them."""
        top = installation.CGROUPS / "pids" / self._group / name

        def pids() -> set[int]:
            found = set()
            for file in top.rglob("cgroup.procs"):
                with suppress(OSError):
                    found |= {int(word) for word in file.read_text().split()}
            return found

        def are_gone() -> bool:
            for pid in (left := pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        self._daemons.wait(are_gone, f"the containers of {name or 'all nodes'} end")

    def _make_groups(self, name: str) -> None:
        """Make the control groups below which a kubelet makes its own."""
        for controller in CONTROLLERS:
            top = installation.CGROUPS / controller
            for place in (top / self._group, top / self._group / name):
                place.mkdir(exist_ok=True)
                if controller == "cpuset":
                    for kind in ("cpus", "mems"):
                        allowed = (top / f"cpuset.{kind}").read_text()
                        (place / f"cpuset.{kind}").write_text(allowed)

    def _connect_pods(self, name: str) -> None:
        """Put a bridge between the host and its cable, for its pods to hang on."""
        address = f"{self._hosts.address(name)}/24"
        for command in (
            "ip link add cni0 type bridge",
            "ip link set eth0 master cni0",
            f"ip address delete {address} dev eth0",
            f"ip address add {address} dev cni0",
            "ip link set cni0 up",
            f"ip route replace default via {self._hosts.gateway}",
        ):
            self._hosts.call(name, *command.split())

    def _hide_logs(self, name: str, folder: Path) -> None:
        """Give a node its own place for logs: a kubelet removes those of pods unknown to it."""
        folder.mkdir()
        LOGS.mkdir(parents=True, exist_ok=True)
        self._hosts.call(name, "mount", "--bind", str(folder), str(LOGS))

    def _write_network(self) -> None:
        place = self._folder / "network"
        place.mkdir()
        addresses = {
            "type": "host-local",
            "dataDir": str(self._folder / "addresses"),
            "ranges": [
                [
                    {
                        "subnet": f"{self._subnet}.0/24",
                        "rangeStart": f"{self._subnet}.40",
                        "rangeEnd": f"{self._subnet}.250",
                        "gateway": self._hosts.gateway,
                    }
                ]
            ],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": False, "ipam": addresses}
        network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}
        (place / "10-pods.conflist").write_text(json.dumps(network))

    def _start_containerd(self, name: str, place: Path) -> None:
        runtime = 'plugins."io.containerd.grpc.v1.cri"'
        configuration = place / "containerd.toml"
        configuration.write_text(f"""\
version = 2
root = "{place}/root"
state = "{place}/state"
disabled_plugins = ["io.containerd.internal.v1.restart", "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{self._socket(name)}"
[{runtime}]
  sandbox_image = "{image.PAUSE}"
  stream_server_address = "127.0.0.1"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [{runtime}.containerd]
    default_runtime_name = "runc"
    [{runtime}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{self._spec}"
      [{runtime}.containerd.runtimes.runc.options]
        BinaryName = "{self._bin}/runc"
  [{runtime}.cni]
    bin_dir = "{installation.folder()}/cni"
    conf_dir = "{self._folder}/network"
""")
        search = f"{self._bin}:{os.environ['PATH']}"
        command = [str(self._bin / "containerd"), "--config", str(configuration)]
        self._daemons.start(f"containerd-{name}", *self._hosts.inside(name, *command), PATH=search)
        self._daemons.wait(lambda: self._ctr(name, "version"), f"containerd of {name} answers")
        for path in self._images:
            done = self._ctr(name, "--namespace=k8s.io", "images", "import", str(path))
            assert done, self._daemons.logs()

    def _ctr(self, name: str, *arguments: str) -> bool:
        command = [self._bin / "ctr", f"--address={self._socket(name)}", *arguments]
        return subprocess.run(command, capture_output=True).returncode == 0

    def _socket(self, name: str) -> Path:
        return self._folder / name / "c.sock"

    def _start_kubelet(self, name: str, place: Path) -> None:
        address = self._hosts.address(name)
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": self._keys.certificate("ca")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": self._keys.certificate(name),
            "tlsPrivateKeyFile": self._keys.key(name),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._group}/{name}",
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "100Mi"},
            "failSwapOn": False,
            "healthzPort": 0,
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "nodeLeaseDurationSeconds": 4 * RENEWAL,
            "nodeStatusUpdateFrequency": "5s",
            "resolvConf": "",
            "syncFrequency": "5s",
            "volumePluginDir": str(place / "plugins"),
        }
        configuration = place / "kubelet.yaml"
        configuration.write_text(yaml.safe_dump(settings))
        kubeconfig = self._keys.kubeconfig(name, self._server, place / "kubeconfig")
        socket = f"unix://{self._socket(name)}"
        command = [
            str(self._bin / "kubelet"),
            f"--config={configuration}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={name}",
            f"--node-ip={address}",
            f"--root-dir={place}/kubelet",
            f"--cert-dir={place}/certificates",
            "--container-runtime=remote",
            f"--container-runtime-endpoint={socket}",
            f"--image-service-endpoint={socket}",
            f"--runtime-cgroups=/{self._group}",
            f"--kubelet-cgroups=/{self._group}",
        ]
        self._daemons.start(f"kubelet-{name}", *self._hosts.inside(name, *command))


def add_gpus(ask: Callable[..., tuple[int, object]], name: str, gpus: int) -> bool:
    """Give a node GPUs, which nobody has seen: the kubelet keeps what is written there."""
    patch = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(gpus)}]
    code, _ = ask("PATCH", f"/api/v1/nodes/{name}/status", patch, "application/json-patch+json")
    return code == 200
