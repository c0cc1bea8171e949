"""The life of one pod in memory: its containers run and end, and its status tells so."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from .answers import Object
from .conditions import set_condition
from .containers import ConfigError, Container, kill_marked
from .store import now

if TYPE_CHECKING:
    from .kubelet import Kubelet

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
