"""The kubelets of the cluster in memory: each takes the pods of its node, and runs them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .answers import ApiError, Object
from .containers import ConfigError, Container, expanded, substituted, variables_of, volume_folders
from .deletion import delete
from .http import Front
from .pod_worker import PodWorker
from .quantities import requested, total
from .registry import Registry
from .resources import NODES, PODS, Resource


class Kubelet:
    """Runs the pods of one node.

    Args:
        node: its name.
        number: of the node, for its addresses.
        front: the API server; while it is away, pods go on and nothing is reported.
        folder: for logs and volumes.
        images: what can be run: the entry point of each image.
        environment: of all containers, as an image has it.
    """

    def __init__(
        self,
        node: str,
        number: int,
        front: Front,
        folder: Path,
        images: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
    ) -> None:
        self.node, self.address = node, f"127.{number // 250 + 1}.{number % 250}.1"
        self.workers: dict[str, PodWorker] = {}
        self._front, self._folder = front, folder
        self._images, self._environment = images, environment
        self._addresses: dict[str, str] = {}
        self._lost = False
        self._lock = threading.Lock()

    @property
    def _registry(self) -> Registry:
        return self._front.registry

    def tell(self, pod: Object, *, gone: bool = False) -> None:
        """Take notice of a pod of the node: as it is, or as it was when it went."""
        uid = pod["metadata"]["uid"]
        worker = self.workers.get(uid)
        if worker is not None:
            worker.tell(None if gone else pod)
        elif not gone and pod["status"].get("phase") not in ("Succeeded", "Failed"):
            if (why := self._refusal(pod)) is not None:
                self.write(pod, lambda it: it["status"].update({"phase": "Failed"} | why))
                return
            worker = self.workers[uid] = PodWorker(self, pod)
            worker.start()
        elif not gone and "deletionTimestamp" in pod["metadata"]:
            self.remove(pod)

    def _refusal(self, pod: Object) -> Object | None:
        """Return why a pod cannot be here although it was put here, or None."""
        node = self._registry.store.find(NODES, "", self.node) or {"status": {}}
        others = [worker.pod for worker in self.workers.values() if not worker.is_over]
        used, wanted = total(requested(other) for other in others), requested(pod)
        for name, room in total([node["status"].get("allocatable", {})]).items():
            if wanted.get(name, 0) and used.get(name, 0) + wanted[name] > room:
                said = f"Node didn't have enough resource: {name}"
                return {"reason": f"OutOf{name}", "message": f"Pod {said}"}
        return None

    def pod_address(self, uid: str) -> str:
        """Return the address of a pod: one of this machine's loopback addresses."""
        with self._lock:
            if uid not in self._addresses:
                number = len(self._addresses) + 2
                first = ".".join(self.address.split(".")[:3])
                self._addresses[uid] = f"{first}.{number % 250 + 2}"
            return self._addresses[uid]

    def reason(self, spec: Object) -> str:
        """Return the word for why a container cannot be made."""
        if spec["image"] in self._images:
            return "CreateContainerConfigError"
        return "ErrImageNeverPull" if spec["imagePullPolicy"] == "Never" else "ErrImagePull"

    def start(self, pod: Object, spec: Object, ended: Callable[[], None]) -> Container:
        """Start a container.

        Raises:
            ConfigError: it cannot be made.
            OSError: it cannot be started.
        """
        if spec["image"] not in self._images:
            if spec["imagePullPolicy"] == "Never":
                said = f'Container image "{spec["image"]}" is not present with pull policy of Never'
                raise ConfigError(said)
            raise ConfigError(f'rpc error: failed to pull image "{spec["image"]}": not found')
        metadata = pod["metadata"]

        def contents(kind: str, name: str) -> Object | None:
            resource = Resource("", "v1", kind, {"secrets": "Secret"}.get(kind, "ConfigMap"))
            return self._registry.store.find(resource, metadata["namespace"], name)

        address = self.pod_address(metadata["uid"])
        shown = pod | {"status": pod["status"] | {"podIP": address, "hostIP": self.address}}
        variables = variables_of(shown, spec, {}, contents)
        paths = volume_folders(pod, spec, self._folder, contents)
        last_words = self._folder / "pods" / metadata["uid"] / f"{spec['name']}.termination"
        last_words.parent.mkdir(parents=True, exist_ok=True)
        last_words.touch()
        paths[spec["terminationMessagePath"]] = str(last_words)
        argv = list(spec.get("command") or self._images[spec["image"]])
        if "command" not in spec or spec.get("args"):
            argv += spec.get("args", [])
        argv = [substituted(expanded(word, variables), paths) for word in argv]
        environment = {
            "PATH": os.pathsep.join(
                [str(Path(sys.executable).parent), os.defpath, "/usr/local/bin"]
            ),
            "HOME": str(self._folder),
            "HOSTNAME": pod["spec"].get("hostname", metadata["name"]),
            **self._environment,
            **{key: substituted(value, paths) for key, value in variables.items()},
            "PIPOLLUX_TEST_CONTAINER": spec["name"],
        }
        if "workingDir" in spec:
            spec = spec | {"workingDir": substituted(spec["workingDir"], paths)}
        log = self.log(metadata["uid"], spec["name"])
        return Container(spec, argv, environment, log, metadata["uid"], ended, last_words)

    def log(self, uid: str, container: str) -> Path:
        """Return the file of what a container prints."""
        return self._folder / "logs" / uid / f"{container}.log"

    def write(self, pod: Object, alter: Callable[[Object], None]) -> None:
        """Change what the cluster knows of a pod; wait where the API server is away."""
        metadata = pod["metadata"]

        def alter_same(found: Object) -> None:
            if found["metadata"]["uid"] == metadata["uid"]:
                alter(found)

        if self._is_served():
            self._registry.store.change(PODS, metadata["namespace"], metadata["name"], alter_same)

    def remove(self, pod: Object) -> None:
        """Take a deleted pod out of the cluster, now that nothing of it runs."""
        metadata = pod["metadata"]
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        if not self._is_served():
            return
        with contextlib.suppress(ApiError):
            delete(self._registry.store, PODS, metadata["namespace"], metadata["name"], options)

    def _is_served(self) -> bool:
        """Wait for the API server; return False where this kubelet ends before it comes back."""
        while not self._front.serving.wait(0.1):
            if self._lost:
                return False
        return not self._lost

    def lose(self) -> None:
        """End everything on this node at once, and report nothing."""
        self._lost = True
        for worker in self.workers.values():
            worker.lose()

    def join(self) -> None:
        """Wait for all workers."""
        for worker in self.workers.values():
            worker.join()
