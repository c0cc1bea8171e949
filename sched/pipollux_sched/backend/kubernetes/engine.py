"""The engine that runs every replica as a pod of a Kubernetes cluster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from lightkube.config.kubeconfig import SingleConfig
from lightkube.operators import not_equal, not_in

from pipollux_sched.backend.base import (
    BackendError,
    ClusterUnavailableError,
    Engine,
    JobActions,
    Launch,
    Listing,
    Node,
    ReplicaKey,
    ReplicaProgram,
    ReplicaState,
    Signal,
)
from pipollux_sched.backend.run_as import refuse_user
from pipollux_sched.spec.job import JobSpec, SpecError
from pipollux_sched.store import StateDir

from . import names
from .api import Api, Job, NodeObject, Pod, Secret, Service, load_config
from .informer import Derived, Informer, Selection
from .job_resource import JobResource, view_job
from .node_state import ClusterNode, make_nodes, usage_by_node, view_node, view_usage
from .options import KubernetesOptions
from .pod_log import LogFollower, PodLog
from .pod_security import check_template
from .pod_state import KILL_GRACE, PodView, view_pod, without_finalizer
from .pods import GRACE_MARGIN, Owners, make_pod, make_secret, make_service, no_owners
from .replica_states import ReplicaStates
from .resource_controller import ResourceController
from .watches import Mirrors

_LOG = logging.getLogger(__name__)


class KubernetesEngine(Engine):
    """Runs replicas as pods.

    Args:
        config: the client configuration; None: that of `kubectl`, or of the scheduler's own pod.
        has_resources: whether each job has a custom resource, which owns its objects.
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
        running = {"status.phase": not_in(["Succeeded", "Failed"])}
        # Two watches, so that our own pods, perhaps most of the cluster's, are sent once.
        others = Selection(
            Pod, "*", {names.SCHEDULER_LABEL: not_in([options.scheduler])}, fields=running
        )
        namesakes = Selection(
            Pod, "*", ours.labels, {"metadata.namespace": not_equal(self.namespace), **running}
        )
        self._logs: dict[ReplicaKey, PodLog] = {}
        self._follower = LogFollower(self.namespace, self._log)
        self._pods: Informer[PodView] = Informer(
            ours, view_pod, self._follower.look, self._last_view, lambda pod: pod.key.job
        )
        self._others = [Informer(others, view_usage), Informer(namesakes, view_usage)]
        self._nodes: Informer[ClusterNode] = Informer(Selection(NodeObject), view_node)
        self._versions = count(1)
        self._prepared: set[tuple[str, int]] = set()
        more = self._more_mirrors()
        self._states = ReplicaStates(self._pods, self._nodes)
        # Nodes first: a replica is not lost while its node is unknown.
        seen: list[Informer[Any]] = [self._nodes, self._pods]
        self._replicas = Derived([*seen, self._states, *more], self._make_replicas)
        self._free = Derived([*seen, self._states, *self._others], self._make_nodes)
        informers: list[Informer[Any]] = [*seen, *self._others, *more]
        self._owners: Owners = no_owners
        self._controller: ResourceController | None = None
        if has_resources:
            self._controller = self._make_controller(informers)
            self._owners = self._controller.owner
        self._informers = Mirrors(config, informers, [self._follower.run])

    @property
    def namespace(self) -> str:
        """The namespace of the pods."""
        return self._api.namespace

    def check(self, spec: JobSpec) -> None:
        """Reject a job without an image, without a script in it, or without a checkpoint folder."""
        if spec.image is None:
            raise SpecError(
                f"job '{spec.name}': image: is missing; the kubernetes backend runs containers: "
                "give a reference such as registry.example/train:2.1, and as script a path in it"
            )
        if not spec.has_program:
            raise SpecError(
                f"job '{spec.name}': script: is missing; the kubernetes backend starts it in the "
                f"image '{spec.image}' itself: give the path of a Python script in that image, or "
                "a module or command"
            )
        if spec.servers and self.even:
            raise SpecError(
                f"job '{spec.name}': servers: {spec.servers} cannot run with TrainJobs, whose pods "
                "are all alike; serve with --via pod, or leave it out"
            )
        refuse_user(spec, self.name, "whose pods run as their image says")
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
        """Return the nodes that have devices: see `Engine`."""
        return self._free.get()

    def checkpoints(self, program: ReplicaProgram) -> str:
        """Return the job's own checkpoint folder, or one on the checkpoint volume."""
        if program.checkpoints is not None:
            return str(program.checkpoints)
        if not self._options.has_volume:
            raise BackendError(
                f"job {program.job!r} has no checkpoint_dir, and the scheduler mounts no volume "
                "for checkpoints; start it with --checkpoint-claim"
            )
        first = program.first_attempt
        name = self._state_dir.checkpoints(program.job, first).name
        return f"{self._options.checkpoint_folder}/{program.job}/{name}"

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:
        """Create the pod of a replica, after the objects that all pods of its attempt need."""
        owner = self._owners(program.sweep or program.job)
        check_template(program.job, owner.template, self._options)
        attempt = program.job, launch.attempt
        if attempt not in self._prepared:
            self._api.create(Secret, make_secret(program, owner, self._options))
            self._api.create(Service, make_service(program.job, owner, self._options))
            self._prepared.add(attempt)
        made = self._api.create(Pod, make_pod(program, launch, replica, owner, self._options))
        if made is None:  # it exists already
            made = self._api.get(Pod, names.pod_name(launch.key(replica)))
        if made is not None:
            self._pods.note(made)
            self._look_at(names.pod_name(launch.key(replica)))

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Delete the pod of a replica; its kubelet signals it, and waits for the grace period."""
        pod = self._find(key)
        if pod is None or pod.terminated is not None:
            return
        grace = KILL_GRACE
        if signal is Signal.STOP:
            grace = int(self._options.grace) + GRACE_MARGIN
        if pod.deletion_grace is None or (signal is Signal.KILL and pod.deletion_grace > grace):
            self._states.order([key])
            if signal is Signal.STOP:
                self._expect_end(pod)
            self._api.delete(Pod, pod.name, grace)

    def listing(self) -> Listing:
        """Return the replicas that the watches know: see `Engine`."""
        return Listing(next(self._versions), self._replicas.get())

    def forget(self, job: str, attempt: int) -> None:
        """Remove an attempt's pods, and the service of a job without pods."""
        try:
            pods = self._pods.group(job)
            for pod in pods:
                if pod.key.attempt == attempt:
                    self._remove(pod)
            if all(pod.key.attempt == attempt for pod in pods):
                self._api.delete(Service, names.service_name(job))
        except BackendError as error:
            _LOG.warning("attempt %d of job %s is not removed: %s", attempt, job, error)
        self._forget_keys(job, attempt)

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

    def _forget_keys(self, job: str, attempt: int) -> None:
        self._prepared.discard((job, attempt))
        for key in [
            key for key in (*self._states.ordered, *self._logs) if key[:2] == (job, attempt)
        ]:
            self._forget_key(key)

    def _forget_key(self, key: ReplicaKey) -> None:
        self._states.forget(key)
        self._logs.pop(key, None)
        self._follower.drop(key)

    def fetch_log(self, key: ReplicaKey) -> None:
        """Copy the log of a replica: see `Engine`."""
        pod = self._find(key)
        if pod is None:
            return
        if pod.terminated is not None:
            self._follower.await_end(key)
        try:
            self._log(key).fetch(self._api, pod.name, pod.main)
        except ClusterUnavailableError:
            raise
        except BackendError as error:  # the container was not started, or the node is gone
            _LOG.debug("no log of pod %s: %s", pod.name, error)

    def close(self) -> None:
        """End the watches, and close the connections."""
        self._informers.close()
        self._api.close()

    def keep_records(self, jobs: JobActions, ending: threading.Event) -> None:
        """Keep custom resources in step with jobs: see `Engine`."""
        if self._controller is None:
            super().keep_records(jobs, ending)
        else:
            self._controller.run(jobs, ending)

    _last_view: Callable[[PodView], PodView] | None = None
    """Converts the last view of a deleted pod; not needed with our finalizer."""

    def _more_mirrors(self) -> list[Informer[Any]]:
        return []

    def _make_controller(self, informers: list[Informer[Any]]) -> ResourceController:
        resources: Informer[JobResource] = Informer(
            Selection(Job, self.namespace), view_job, lambda *_: controller.wake()
        )
        controller = ResourceController(self._api, resources, self._state_dir, self._options)
        informers.append(resources)
        return controller

    def _expect_end(self, pod: PodView) -> None:
        """Follow the log of a running pod that will be asked to end."""
        if pod.is_running:
            if self._log(pod.key).since() is None:  # nothing was copied so far
                with suppress(BackendError):
                    self.fetch_log(pod.key)
            self._follower.expect_end(pod.key, lambda: self._look_at(pod.name))

    def _look_at(self, name: str) -> None:
        """Pass a pod to the log follower before any watch has shown a change."""

        def look() -> None:
            pod = self._pods.find((self.namespace, name))
            if pod is not None:
                self._follower.look([pod])

        self._informers.call(look)

    def _log(self, key: ReplicaKey) -> PodLog:
        return self._logs.setdefault(key, PodLog(self._state_dir.log(*key)))

    def _find(self, key: ReplicaKey) -> PodView | None:
        return self._pods.find((self._api.namespace, names.pod_name(key)))

    def _make_replicas(self) -> dict[ReplicaKey, ReplicaState]:
        return {pod.key: state for pod, state in self._states.all()}

    def _make_nodes(self) -> dict[str, Node]:
        views = self._nodes.values()
        by_object = {view.object_name: view.name for view in views}
        ours: dict[str, int] = {}
        for pod, state in self._states.all():
            if pod.node and state.ended is None:
                name = by_object.get(pod.node, pod.node)
                ours[name] = ours.get(name, 0) + pod.slots(self._options.device)
        wanted = self._options.node_selector.items()
        chosen = [view for view in views if wanted <= view.labels.items()]
        used = usage_by_node(pod for informer in self._others for pod in informer.values())
        return make_nodes(chosen, used, ours, self._options)

    def _remove(self, pod: PodView) -> None:
        """Delete a pod that has ended; it disappears when our finalizer is removed."""
        if pod.deletion_grace != 0:
            self._api.delete(Pod, pod.name, 0)
        self._api.patch(Pod, pod.name, {"metadata": {"finalizers": without_finalizer(pod)}})
