"""The engine that runs every attempt as a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pipollux_sched.backend.base import (
    BackendError,
    Ended,
    Launch,
    ReplicaKey,
    ReplicaProgram,
    ReplicaState,
    Signal,
)
from pipollux_sched.backend.result import ReplicaResult, ScriptError

from . import names
from .api import Pod, Secret, TrainJob
from .engine import KubernetesEngine
from .informer import Informer, Selection
from .pod_state import KILL_GRACE, PodView
from .pods import make_secret
from .trainjobs import TrainJobView, check_even, make_trainjob, trainjob_name, view_trainjob

_LOG = logging.getLogger(__name__)


class TrainJobEngine(KubernetesEngine):
    """Runs attempts as TrainJobs: for clusters with Kubeflow Trainer, its queues and its gangs.

    All pods come from one template: placements are even, and any change of an allocation is another
    TrainJob. They cannot carry our finalizer, so the exit status of a deleted pod is known only
    from the watch; pods deleted while no scheduler runs count as lost.
    """

    name = "kubernetes"
    even = True
    grows = False  # the number of pods of a TrainJob is fixed

    def _more_mirrors(self) -> list[Informer[Any]]:
        label = {names.SCHEDULER_LABEL: self._options.scheduler}
        self._trainjobs: Informer[TrainJobView] = Informer(
            Selection(TrainJob, self.namespace, label), view_trainjob
        )
        return [self._trainjobs]

    @staticmethod
    def _last_view(pod: PodView) -> PodView:
        return pod._replace(deletion_grace=0)

    def start(self, program: ReplicaProgram, launch: Launch, replica: int) -> None:  # noqa: ARG002  # one TrainJob for all replicas
        """Create the TrainJob of an attempt, with its first replica."""
        name = trainjob_name(launch.job, launch.attempt)
        if self._trainjobs.find((self.namespace, name)) is not None:
            return
        check_even(launch)
        owner = self._owners(program.sweep or program.job)
        self._api.create(Secret, make_secret(program, owner, self._options))
        made = self._api.create(TrainJob, make_trainjob(program, launch, owner, self._options))
        if made is None:
            made = self._api.get(TrainJob, name)
        if made is not None:
            self._trainjobs.note(made)

    def signal(self, key: ReplicaKey, signal: Signal) -> None:
        """Suspend the TrainJob, which deletes all of its pods; a kill does not wait for them."""
        attempt = key.job, key.attempt
        name = trainjob_name(*attempt)
        self._trainjobs.check()
        trainjob = self._trainjobs.find((self.namespace, name))
        if trainjob is None:
            return
        of_job = self._pods.group(key.job)
        pods = {key.replica: pod for key, pod in _by_key(of_job).items() if key[:2] == attempt}
        self._states.order(
            ReplicaKey(*attempt, replica)
            for replica in range(trainjob.num_nodes)
            if replica not in pods or pods[replica].terminated is None
        )
        if not trainjob.suspended and not trainjob.failure:
            for pod in pods.values():
                self._keep_log(pod)
            patched = self._api.patch(TrainJob, name, {"spec": {"suspend": True}})
            if patched is not None:
                self._trainjobs.note(patched)
        if signal is Signal.STOP:
            return
        for pod in self._pods.group(key.job):  # a replica may have two: see `_by_key`
            grace = pod.deletion_grace
            if pod.key == key and pod.terminated is None and (grace is None or grace > KILL_GRACE):
                self._api.delete(Pod, pod.name, KILL_GRACE)

    def _keep_log(self, pod: PodView) -> None:
        self._expect_end(pod)
        if pod.terminated is not None:
            with suppress(BackendError):  # the outcome is known without its last lines
                self.fetch_log(pod.key)

    def _make_replicas(self) -> dict[ReplicaKey, ReplicaState]:
        states = {pod.name: state for pod, state in self._states.all()}
        pods = _by_key(pod for pod, _ in self._states.all())
        found: dict[ReplicaKey, ReplicaState] = {}
        for trainjob in self._trainjobs.values():
            for replica in range(trainjob.num_nodes):
                key = ReplicaKey(trainjob.job, trainjob.attempt, replica)
                pod = pods.get(key)
                found[key] = states[pod.name] if pod else _without_pod(trainjob)
        return found

    def forget(self, job: str, attempt: int) -> None:
        """Delete the TrainJob, and with it all objects that the Trainer has created."""
        try:
            self._api.delete(TrainJob, trainjob_name(job, attempt))
            for pod in self._pods.group(job):
                if pod.key[:2] == (job, attempt):
                    self._pods.drop((self.namespace, pod.name))
        except BackendError as error:
            _LOG.warning("attempt %d of job %s is not removed: %s", attempt, job, error)
        self._forget_keys(job, attempt)

    def _find(self, key: ReplicaKey) -> PodView | None:
        return _by_key(self._pods.group(key.job)).get(key)


def _by_key(pods: Iterable[PodView]) -> dict[ReplicaKey, PodView]:
    """Return the pods by replica; if one pod replaced another, the one that has ended."""
    found: dict[ReplicaKey, PodView] = {}
    for pod in pods:
        if pod.key not in found or pod.terminated is not None:
            found[pod.key] = pod
    return found


def _without_pod(trainjob: TrainJobView) -> ReplicaState:
    handle = f"trainjob/{trainjob.name}"
    if trainjob.failure:
        error = ScriptError(f"TrainJob {trainjob.name} failed: {trainjob.failure}", True)
        return ReplicaState(handle, ended=Ended(None, ReplicaResult(error=error)))
    if trainjob.suspended:
        return ReplicaState(
            handle, ended=Ended(None, lost="Its pod is gone, and its exit status is unknown.")
        )
    return ReplicaState(handle, f"TrainJob {trainjob.name} has no pod for it yet.")
