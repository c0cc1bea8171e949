"""The kubelets of the cluster in memory: they run pods, and say in their status how they fare."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from .answers import ApiError, Object, bad_request
from .containers import (
    ConfigError,
    Container,
    expanded,
    kill_marked,
    records,
    substituted,
    time_before,
    variables_of,
    volume_folders,
)
from .http import Front
from .quantities import requested, total
from .registry import Registry, set_condition
from .requests import LogStream
from .resources import NODES, PODS, Resource
from .store import now

FORCED_GRACE = 2
"""Seconds that containers have whose pod was taken out of the cluster without waiting for them."""


class PodWorker(threading.Thread):
    """Runs one pod on one node until it has ended.

    Args:
        kubelet: of its node.
        pod: as it is when it comes to the node.
    """

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        super().__init__(name=f"pod-{pod['metadata']['name']}", daemon=True)
        self.kubelet, self.pod = kubelet, pod
        self.uid = pod["metadata"]["uid"]
        self.containers: dict[str, Container] = {}
        self._waiting: dict[str, Object] = {}
        self._news = threading.Condition()
        self._gone = self._lost = False
        self.is_over = False
        self._began = time.monotonic()
        self._failure: Object = {}

    @property
    def where(self) -> tuple[str, str]:
        """Namespace and name of the pod."""
        return self.pod["metadata"]["namespace"], self.pod["metadata"]["name"]

    def tell(self, pod: Object | None) -> None:
        """Tell it how the pod is now; None: it is not in the cluster any more."""
        with self._news:
            self._gone = self._gone or pod is None
            self.pod = pod or self.pod
            self._news.notify_all()

    def fail(self, reason: str, message: str) -> None:
        """Kill the containers, and leave the pod as failed."""
        with self._news:
            self._failure = {"reason": reason, "message": message}
            self._news.notify_all()

    def lose(self) -> None:
        """End everything at once and say nothing, as when the machine loses its power."""
        with self._news:
            self._lost = True
            self._news.notify_all()
        kill_marked(self.uid)

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    def run(self) -> None:
        """Start the containers, wait for their end, report."""
        try:
            self._start()
            self._attend()
            if not self._lost:
                self._end()
        finally:
            kill_marked(self.uid)
            for container in self.containers.values():
                container.join()

    def _start(self) -> None:
        self._report()
        specs = self.pod["spec"]["containers"]
        for spec in specs:
            try:
                self.containers[spec["name"]] = self.kubelet.start(self.pod, spec, self._wake)
            except ConfigError as error:
                reason = self.kubelet.reason(spec)
                self._waiting[spec["name"]] = {"reason": reason, "message": str(error)}
            except OSError as error:
                at = {"startedAt": now(), "finishedAt": now()}
                self._waiting[spec["name"]] = {"reason": "", "message": str(error), "at": at}
        self._report()

    def _attend(self) -> None:
        """Wait until the containers have ended, or the pod is to end."""
        deadline = self.pod["spec"].get("activeDeadlineSeconds")
        while not (self._lost or self._gone):
            with self._news:
                if self._has_ended() or self._failure:
                    return
                if "deletionTimestamp" in self.pod["metadata"]:
                    break
                left = deadline - (time.monotonic() - self._began) if deadline else None
                if left is not None and left <= 0:
                    self._failure = {
                        "reason": "DeadlineExceeded",
                        "message": "Pod was active on the node longer than the specified deadline",
                    }
                    return
                self._news.wait(left)
            self._report()

    def _has_ended(self) -> bool:
        pending = any(state["reason"] for state in self._waiting.values())
        running = any(c.exit_code is None for c in self.containers.values())
        return not pending and not running

    def _end(self) -> None:
        """End the containers within the grace, report, and take the pod out if it is deleted."""
        begun = time.monotonic()
        for container in self.containers.values():
            container.terminate()
        while any(c.exit_code is None for c in self.containers.values()) and not self._lost:
            with self._news:
                metadata, spec = self.pod["metadata"], self.pod["spec"]
                usual = spec["terminationGracePeriodSeconds"]
                grace = metadata.get("deletionGracePeriodSeconds", usual)
                grace = min(grace, FORCED_GRACE) if self._gone else grace
                left = grace - (time.monotonic() - begun)
                if left <= 0:
                    break
                self._news.wait(min(left, 0.5))
        for container in self.containers.values():
            container.kill()
        for container in self.containers.values():
            container.join()
        self.is_over = True
        if self._lost or self._gone:
            return
        self._report()
        while not (self._lost or self._gone):
            with self._news:
                if "deletionTimestamp" in self.pod["metadata"]:
                    break
                self._news.wait()
        if not self._lost:
            self.kubelet.remove(self.pod)

    def _report(self) -> None:
        """Write the status of the pod; wait where the API server is away."""
        if self._lost or self._gone:
            return
        statuses = [self._container_status(spec) for spec in self.pod["spec"]["containers"]]
        states = [status["state"] for status in statuses]
        if self._failure:
            phase = "Failed"
        elif all("terminated" in state for state in states):
            good = all(state["terminated"]["exitCode"] == 0 for state in states)
            phase = "Succeeded" if good else "Failed"
        elif any("running" in state for state in states):
            phase = "Running"
        else:
            phase = "Pending"
        ready = all("running" in state for state in states)

        def alter(pod: Object) -> None:
            status = pod["status"]
            if phase == "Pending" and status["phase"] == "Pending" and not self.containers:
                status.setdefault("startTime", now())
            status |= {"phase": phase, "hostIP": self.kubelet.address} | self._failure
            status.setdefault("startTime", now())
            status["podIP"] = self.kubelet.pod_address(self.uid)
            status["podIPs"] = [{"ip": status["podIP"]}]
            status["containerStatuses"] = statuses
            done = {"reason": "PodCompleted"} if phase == "Succeeded" else {}
            waits = " ".join(each["name"] for each in statuses if not each["ready"])
            said = f"containers with unready status: [{waits}]"
            not_ready = done or {"reason": "ContainersNotReady", "message": said}
            set_condition(pod, "Initialized", "True", **done)
            for kind in ("Ready", "ContainersReady"):
                more = {} if ready else not_ready
                set_condition(pod, kind, "True" if ready else "False", **more)

        self.kubelet.write(self.pod, alter)

    def _container_status(self, spec: Object) -> Object:
        name = spec["name"]
        container, waiting = self.containers.get(name), self._waiting.get(name)
        if container is not None:
            state = container.state()
        elif waiting is None:
            state = {"waiting": {"reason": "ContainerCreating"}}
        elif waiting["reason"]:
            state = {"waiting": waiting}
        else:  # it could not be started
            ended = {"exitCode": 128, "reason": "StartError", "message": waiting["message"]}
            state = {"terminated": ended | waiting["at"]}
        running = "running" in state
        identity = f"memory://{self.uid}-{container.pid if container else 0}"
        if (ended := state.get("terminated")) is not None:
            ended.setdefault("containerID", identity)
        made = running or ended is not None
        return {
            "name": name,
            "state": state,
            "lastState": {},
            "ready": running,
            "restartCount": 0,
            "image": spec["image"],
            "imageID": f"memory://{spec['image']}" if made else "",
            "started": running,
        } | ({"containerID": identity} if made else {})


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
            self._registry.delete(PODS, metadata["namespace"], metadata["name"], options)

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


def read_log(
    kubelet: Kubelet, pod: Object, wanted: LogStream, listens: Callable[[], bool]
) -> Iterator[bytes]:
    """Return what a container has printed and, if it is followed, prints.

    Raises:
        ApiError: 400, where there is no such container or it has not started.
    """
    names = [spec["name"] for spec in pod["spec"]["containers"]]
    name, where = wanted.container, pod["metadata"]["name"]
    if name is None and len(names) > 1:
        chosen = " ".join(names)
        raise bad_request(
            f"a container name must be specified for pod {where}, choose one of: [{chosen}]"
        )
    name = name or names[0]
    if name not in names:
        raise bad_request(f"container {name} is not valid for pod {where}")
    worker = kubelet.workers.get(pod["metadata"]["uid"])
    if worker is None or name not in worker.containers:
        statuses = pod["status"].get("containerStatuses", [])
        state = next((s["state"] for s in statuses if s["name"] == name), {})
        reason = state.get("waiting", {}).get("reason", "ContainerCreating")
        raise bad_request(f'container "{name}" in pod "{where}" is waiting to start: {reason}')
    return _log_lines(worker, worker.containers[name], wanted.query, listens)


def _log_lines(
    worker: PodWorker, container: Container, query: Mapping[str, str], listens: Callable[[], bool]
) -> Iterator[bytes]:
    follow, stamped = query.get("follow") == "true", query.get("timestamps") == "true"
    since = query.get("sinceTime", "").removesuffix("Z").encode()
    if "sinceSeconds" in query:
        since = time_before(int(query["sinceSeconds"])).encode()
    shown = 0
    first = True
    while True:
        over = container.exit_code is not None
        lines = list(records(container.log))
        if first and "tailLines" in query:
            shown = max(len(lines) - int(query["tailLines"]), 0)
        first = False
        for stamp, text in lines[shown:]:
            if stamp >= since:
                yield stamp + b" " + text if stamped else text
        shown = len(lines)
        if over or not follow or not listens():
            return
        time.sleep(0.05)
