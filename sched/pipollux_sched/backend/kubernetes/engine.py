"""The engine that runs every replica as a pod of a Kubernetes cluster."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from lightkube.config.kubeconfig import SingleConfig
from lightkube.operators import not_in

from pipollux_sched.backend.base import (
    POLL_INTERVAL,
    BackendError,
    ClusterUnavailableError,
    Engine,
    Launch,
    Listing,
    Node,
    ReplicaKey,
    ReplicaProgram,
    ReplicaState,
    Signal,
)
from pipollux_sched.backend.job_actions import JobActions
from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import StateDir

from . import names
from .api import Api, Job, NodeObject, Object, Pod, Secret, Service, load_config
from .job_resource import JobResource, view_job
from .mirror import Mirror, Mirrors, Selection
from .node_state import ClusterNode, Usage, make_nodes, usage_by_node, view_node, view_usage
from .options import KubernetesOptions
from .owner import Owners, no_owners
from .pod_log import LogFollower, PodLog
from .pod_state import KILL_GRACE, PodView, replica_state, view_pod, without_finalizer
from .pods import GRACE_MARGIN, make_pod, make_secret, make_service
from .resource_controller import ResourceController

__all__ = ["KubernetesEngine"]

_LOG = logging.getLogger(__name__)
ABSENCE = 15.0
"""Seconds after which a node that is not there counts as gone: its own watch may be late."""
RECOVERY = 30.0
"""Seconds that pods of an earlier scheduler have to end once they were killed."""


class KubernetesEngine(Engine):
    """Runs replicas as pods.

    Args:
        options: what the administrator has decided.
        state_dir: where logs are kept.
        config: how to reach the cluster; None: as `kubectl` would, or as our own pod is told.
        has_resources: whether each job has a custom resource, which its objects belong to.
    """

    name = "kubernetes"
    grows = True

    def __init__(
        self,
        options: KubernetesOptions,
        state_dir: StateDir,
        *,
        config: SingleConfig | None = None,
        has_resources: bool = True,
    ) -> None:
        config = load_config() if config is None else config
        self._options, self._state_dir = options, state_dir
        self._api = Api(config, options.namespace)
        ours = Selection(Pod, self._api.namespace, {names.SCHEDULER_LABEL: options.scheduler})
        running = Selection(Pod, "*", fields={"status.phase": not_in(["Succeeded", "Failed"])})
        self._pods: Mirror[PodView] = Mirror(ours, view_pod, self._note_change, self._last_view)
        self._others: Mirror[Usage] = Mirror(running, self._usage_of_others)
        self._nodes: Mirror[ClusterNode] = Mirror(Selection(NodeObject), view_node)
        self._logs: dict[ReplicaKey, PodLog] = {}
        self._follower = LogFollower(self.namespace, self._pods.last_values, self._log)
        self._versions = count(1)
        self._ordered: set[ReplicaKey] = set()
        self._prepared: set[tuple[str, int]] = set()
        self._absent: dict[str, float] = {}
        mirrors: list[Mirror[Any]] = [self._pods, self._others, self._nodes, *self._more_mirrors()]
        self._owners: Owners = no_owners
        self._controller: ResourceController | None = None
        if has_resources:
            self._controller = self._make_controller(mirrors)
            self._owners = self._controller.owner
        self._mirrors = Mirrors(config, mirrors, [self._follower.run])

    @property
    def namespace(self) -> str:
        """The namespace of the pods."""
        return self._api.namespace

    def check(self, spec: JobSpec) -> None:
        """Refuse a job without an image, without a script in it, or without a place to save."""
        if spec.image is None:
            raise SpecError(
                f"job '{spec.name}': image: is missing; the kubernetes backend runs containers: "
                "give a reference such as registry.example/train:2.1, and as script a path in it"
            )
        if spec.script is None:
            raise SpecError(
                f"job '{spec.name}': script: is missing; the kubernetes backend starts it in the "
                f"image '{spec.image}' itself: give the path of a Python script in that image"
            )
        if len(spec.name) > names.MOST_CHARACTERS:
            raise SpecError(
                f"job '{spec.name}': name: has {len(spec.name)} characters; with the kubernetes "
                f"backend it has at most {names.MOST_CHARACTERS}, as pods add theirs; shorten it"
            )
        if spec.checkpoint_dir is None and not self._options.has_volume:
            raise SpecError(
                f"job '{spec.name}': checkpoint_dir: is missing, and this scheduler mounts no "
                "volume for checkpoints; give a folder on a volume of the job's template, or start "
                "the scheduler with --checkpoint-claim"
            )

    def nodes(self) -> Mapping[str, Node]:
        """Return the nodes that have devices for us: see `Engine`."""
        views = self._nodes.values()
        by_object = {view.object_name: view.name for view in views}
        ours: dict[str, int] = {}
        for pod in self._pods.values():
            if pod.node and self._state(pod).ended is None:
                name = by_object.get(pod.node, pod.node)
                ours[name] = ours.get(name, 0) + pod.slots(self._options.device)
        wanted = self._options.node_selector.items()
        chosen = [view for view in views if wanted <= view.labels.items()]
        return make_nodes(chosen, usage_by_node(self._others.values()), ours, self._options)

    def checkpoints(self, program: ReplicaProgram) -> str:
        """Return the job's own folder, or one on the volume for checkpoints."""
        if program.checkpoints is not None:
            return str(program.checkpoints)
        if not self._options.has_volume:
            raise BackendError(
                f"job {program.job!r} has no checkpoint_dir, and the scheduler mounts no volume "
                "for checkpoints; start it with --checkpoint-claim"
            )
        first = program.first_generation
        name = self._state_dir.checkpoints(program.job, first).name
        return f"{self._options.checkpoint_folder}/{program.job}/{name}"

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Create the pod of a replica, before it what all pods of its generation need."""
        owner = self._owners(program.job)
        generation = program.job, launch.generation
        if generation not in self._prepared:
            self._api.create(Secret, make_secret(program, launch.generation, owner, self._options))
            self._api.create(Service, make_service(program.job, owner, self._options))
            self._prepared.add(generation)
        made = self._api.create(Pod, make_pod(program, launch, replica, owner, self._options))
        if made is None:  # it is there already
            made = self._api.get(Pod, names.pod_name(launch.key(replica)))
        if made is not None:
            self._pods.note(made)

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Delete the pod of a replica; its kubelet tells it, and waits for the grace period."""
        pod = self._find(key)
        if pod is None or pod.terminated is not None:
            return
        grace = KILL_GRACE
        if signal is Signal.STOP:
            grace = int(self._options.grace) + GRACE_MARGIN
        if pod.deletion_grace is None or (signal is Signal.KILL and pod.deletion_grace > grace):
            self._ordered.add(key)
            if signal is Signal.STOP:
                self._expect_end(pod)
            self._api.delete(Pod, pod.name, grace)

    def listing(self) -> Listing:
        """Return what the watches know: see `Engine`."""
        self._nodes.values()  # raises where nobody knows whether nodes are still there
        pods = self._pods.values()
        return Listing(next(self._versions), {pod.key: self._state(pod) for pod in pods})

    def forget(self, job: str, generation: int) -> None:
        """Remove a generation's pods and its secret, and the service of a job that has no pods."""
        try:
            pods = [pod for pod in self._pods.values() if pod.key.job == job]
            for pod in pods:
                if pod.key.generation == generation:
                    self._remove(pod)
            self._api.delete(Secret, names.secret_name(job, generation))
            if all(pod.key.generation == generation for pod in pods):
                self._api.delete(Service, names.service_name(job))
        except BackendError as error:
            _LOG.warning("generation %d of job %s is not removed: %s", generation, job, error)
        self._forget_keys(job, generation)

    def forget_replica(self, key: ReplicaKey) -> None:
        """Remove the pod of a replica that has left: see `Engine`."""
        pod = self._find(key)
        try:
            if pod is not None:
                self._remove(pod)
        except BackendError as error:
            _LOG.warning("pod %s is not removed: %s", names.pod_name(key), error)
        else:
            self._forget_key(key)

    def _forget_keys(self, job: str, generation: int) -> None:
        self._prepared.discard((job, generation))
        for key in [key for key in (*self._ordered, *self._logs) if key[:2] == (job, generation)]:
            self._forget_key(key)

    def _forget_key(self, key: ReplicaKey) -> None:
        self._ordered.discard(key)
        self._logs.pop(key, None)
        self._follower.drop(key)

    def fetch_log(self, key: ReplicaKey) -> None:
        """Bring the log of a replica: see `Engine`."""
        pod = self._find(key)
        if pod is None:
            return
        if pod.terminated is not None:
            self._follower.await_end(key)
        try:
            self._log(key).fetch(self._api, pod.name, pod.main)
        except ClusterUnavailableError:
            raise
        except BackendError as error:  # its container was not started, or the node is gone
            _LOG.debug("no log of pod %s: %s", pod.name, error)

    def recover(self, adopted: Collection[tuple[str, int]], grace: float) -> list[str]:
        """End pods that nobody looks after: see `Engine`."""
        left = [pod for pod in self._pods.values() if pod.key[:2] not in adopted]
        found = [f"pod {pod.name} on {pod.node or 'no node'}" for pod in left]
        for signal, seconds in ((Signal.STOP, grace), (Signal.KILL, RECOVERY)):
            running = [pod.key for pod in left if self._state(pod).ended is None]
            for key in running:
                self.signal(key, signal)
            self._await_end(running, seconds)
        if running := self._running(pod.key for pod in left):
            raise BackendError(
                "pods that an earlier scheduler left behind cannot be ended: "
                + ", ".join(map(names.pod_name, running))
            )
        for pod in left:
            with suppress(ClusterUnavailableError):
                self.fetch_log(pod.key)
        for job, generation in sorted({pod.key[:2] for pod in left}):
            self.forget(job, generation)
        return found

    def close(self) -> None:
        """End the watches, and close the connections."""
        self._mirrors.close()
        self._api.close()

    def keep_records(self, jobs: JobActions, ending: threading.Event) -> None:
        """Keep custom resources in step with jobs: see `Engine`."""
        if self._controller is None:
            super().keep_records(jobs, ending)
        else:
            self._controller.run(jobs, ending)

    _last_view: Callable[[PodView], PodView] | None = None
    """What is kept of a pod that was deleted; our finalizer makes it unnecessary."""

    def _more_mirrors(self) -> list[Mirror[Any]]:
        """Return what a subclass looks at, too."""
        return []

    def _make_controller(self, mirrors: list[Mirror[Any]]) -> ResourceController:
        """Return what keeps custom resources in step, and add their mirror."""
        resources: Mirror[JobResource] = Mirror(
            Selection(Job, self.namespace), view_job, lambda: controller.wake()
        )
        controller = ResourceController(self._api, resources, self._state_dir)
        mirrors.append(resources)
        return controller

    def _note_change(self) -> None:
        self._follower.wake()

    def _expect_end(self, pod: PodView) -> None:
        """Follow the log of a pod that runs and is about to be told to end."""
        if pod.is_running:
            if self._log(pod.key).since() is None:  # nothing of it was brought so far
                with suppress(BackendError):
                    self.fetch_log(pod.key)
            self._follower.expect_end(pod.key, lambda: self._mirrors.call(self._follower.wake))

    def _log(self, key: ReplicaKey) -> PodLog:
        return self._logs.setdefault(key, PodLog(self._state_dir.log(*key)))

    def _find(self, key: ReplicaKey) -> PodView | None:
        return self._pods.find((self._api.namespace, names.pod_name(key)))

    def _state(self, pod: PodView) -> ReplicaState:
        node = self._nodes.find(("", pod.node)) if pod.node else None
        gone = self._is_gone(pod.node) if pod.node and node is None else False
        if node is not None:
            self._absent.pop(pod.node, None)
        return replica_state(pod, node, gone=gone, ordered=pod.key in self._ordered)

    def _is_gone(self, node: str) -> bool:
        """Return whether a node that is not there has not been for a while."""
        now = time.monotonic()
        return now - self._absent.setdefault(node, now) >= ABSENCE

    def _usage_of_others(self, pod: Object) -> Usage | None:
        metadata = pod["metadata"]
        label = (metadata.get("labels") or {}).get(names.SCHEDULER_LABEL)
        if metadata["namespace"] == self.namespace and label == self._options.scheduler:
            return None
        return view_usage(pod)

    def _running(self, keys: Iterable[ReplicaKey]) -> list[ReplicaKey]:
        pods = filter(None, map(self._find, keys))
        return [pod.key for pod in pods if self._state(pod).ended is None]

    def _await_end(self, keys: Collection[ReplicaKey], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running(keys) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)

    def _remove(self, pod: PodView) -> None:
        """Delete a pod that has ended; it goes when our finalizer does."""
        if pod.deletion_grace != 0:
            self._api.delete(Pod, pod.name, 0)
        self._api.patch(Pod, pod.name, {"metadata": {"finalizers": without_finalizer(pod)}})
