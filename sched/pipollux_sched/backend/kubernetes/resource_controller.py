"""Synchronisation of jobs and their custom resources.

Users create, suspend and delete the resource of a job; the store has the job's state. A job
submitted over REST gets a resource. Each side records its link to the other, so that either may be
unavailable for a while: a job keeps the uid of its resource in a file of its folder
(`ResourceLink`), and a resource's status names the state directory that knows its job. Then

* a resource without a job is submitted, or deleted if its job was known and was deleted;
* a job without a resource is given one, or cancelled and deleted if it had one;
* the trials of a sweep have none: its resource owns their pods, and shows their progress;
* of `spec.suspend` and the job's own suspension, the one that changed last wins.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pipollux_sched.backend.base import ClusterUnavailableError, JobActions
from pipollux_sched.errors import SchedulerError
from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec, SpecError, cycle_of, spell_cycle
from pipollux_sched.store import JobRecord, StateDir, SweepSummary
from pipollux_sched.store.errors import ConflictError, DependencyError
from pipollux_utils.atomic_write import write_aside

from . import names
from .api import Api, Event, Job, JobStatus, Object
from .informer import Informer
from .job_resource import (
    JobResource,
    held_status,
    ignored_change,
    job_spec,
    job_status,
    refused_status,
    refused_template,
    resource_spec,
    rfc3339,
    succeeding_status,
    sweep_status,
    waiting_status,
)
from .options import KubernetesOptions
from .pod_security import check_template
from .pods import Owner

_LOG = logging.getLogger(__name__)
STEP_INTERVAL = 10.0
"""Seconds between two updates of a status in which only the step has changed."""
PAUSE = 0.5
"""Seconds between two passes over the store."""
SHARE = 0.1
"""Largest share of a core for these passes: the store of thousands of jobs changes constantly."""
LONGEST_REST = 5.0
MADE_BY = f"{names.GROUP}/made-by"
"""Annotation of a resource that was created for a job: the state directory that knows the job."""
_WARNINGS = (Phase.FAILED, Phase.RESTARTING)
_MESSAGE_LIMIT = 1000
"""Most characters of a message; the API server accepts 1024."""


class _Sweep(NamedTuple):
    """The progress of a sweep, and the jobs of its unfinished trials."""

    summary: SweepSummary
    trials: tuple[JobRecord, ...]


_Progress: TypeAlias = int | _Sweep | None
"""The step of a job, or how far a sweep has come."""
_Both: TypeAlias = tuple[JobResource, JobRecord, _Progress]


@dataclass(frozen=True)
class ResourceLink:
    """The link from a job to its resource."""

    uid: str
    suspend: bool
    """The suspension that both sides last agreed on."""


class ResourceController:
    """Keeps jobs and their custom resources in step; `options` restrict pod templates."""

    def __init__(
        self,
        api: Api,
        resources: Informer[JobResource],
        state_dir: StateDir,
        options: KubernetesOptions,
    ) -> None:
        self._api, self._resources, self._state_dir = api, resources, state_dir
        self._options = options
        self._identity = state_dir.identity("kubernetes")
        self._written: dict[str, float] = {}
        self._in_step: dict[str, _Both] = {}
        """Pairs that were in step, by job: nothing to do until they change."""
        self._changed = threading.Event()
        self._actions: JobActions
        self._jobs: Mapping[str, JobRecord] = {}
        self._found: Mapping[str, JobResource] = {}
        """The jobs and resources of the present pass, by name."""
        self._problems: dict[str, str] = {}

    def run(self, jobs: JobActions, ending: threading.Event) -> None:
        """Synchronise until the end."""
        seen: tuple[int, int] | None = None
        while not ending.is_set():
            begun = time.thread_time()
            found = jobs.version(), self._resources.changes
            if found != seen and self.step(jobs):
                seen = found
            ending.wait(rest_after(time.thread_time() - begun))
            self._changed.wait(PAUSE)
            self._changed.clear()

    def wake(self) -> None:
        """Signal that a resource has changed; any thread may call it."""
        self._changed.set()

    def step(self, actions: JobActions) -> bool:
        """Synchronise both sides once; return False if something must be retried."""
        self._actions = actions
        try:
            resources = {found.name: found for found in self._resources.values()}
            everything = actions.jobs()
            jobs = {job.name: job for job in everything if job.trial is None}
            progress: dict[str, _Progress] = {**actions.steps(), **_sweeps(actions, everything)}
        except ClusterUnavailableError as error:
            _LOG.debug("the resources cannot be read: %s", error)
            return False
        done = True
        self._jobs, self._found = jobs, resources
        for name in sorted(resources.keys() | jobs.keys()):
            try:
                self._bring_in_step(name, resources.get(name), jobs.get(name), progress.get(name))
            except ClusterUnavailableError as error:
                _LOG.info("job %s and its resource are not in step yet: %s", name, error)
                return False
            except (SchedulerError, OSError) as error:
                done = False
                if self._problems.get(name) != str(error):
                    _LOG.warning("job %s and its resource are not in step: %s", name, error)
                self._problems[name] = str(error)
            else:
                self._problems.pop(name, None)
        return done

    def owner(self, job: str) -> Owner:
        """Return a job's owner, or raise `ClusterUnavailableError` while there is no resource."""
        found = self._resources.find((self._api.namespace, job))
        link = self._link(job)
        if found is None or link is None or link.uid != found.uid:
            raise ClusterUnavailableError(f"the resource of job {job!r} is not there")
        return found.owner

    def _bring_in_step(
        self, name: str, resource: JobResource | None, job: JobRecord | None, progress: _Progress
    ) -> None:
        # For thousands of jobs, reading all links and composing all statuses takes too long.
        known = self._in_step.pop(name, None)
        if known is not None and known == (resource, job, progress):
            self._in_step[name] = known
            return
        link = self._link(name) if job is not None else None
        if job is None:
            if resource is not None and not resource.deleted:
                self._take_up(resource)
        elif resource is None:
            if link is None:
                self._make_resource(job)
            else:
                self._remove_job(job, progress)
        elif link is None:
            self._adopt(job, resource)
        elif link.uid != resource.uid or resource.deleted:
            self._remove_job(job, progress)
            if not resource.deleted:  # it is submitted when the earlier job is gone
                self._write_status(resource, succeeding_status(resource, time.time()))
        else:
            self._agree_on_suspension(job, resource, link)
            if self._write_job_status(job, resource, progress) and self._link(name) == link:
                self._in_step[name] = resource, job, progress

    def _take_up(self, resource: JobResource) -> None:
        """Submit the job of a new resource, or delete the resource of a deleted job."""
        if self._identity in (resource.status.get("scheduler"), resource.annotations.get(MADE_BY)):
            self._api.delete(Job, resource.name)
            return
        refused = resource.status.get("phase") == "Failed"
        if refused and resource.status.get("observedGeneration") == resource.generation:
            return
        if resource.suspended:
            self._write_status(resource, waiting_status(resource, time.time()))
            return
        self._keep_link(resource.name, ResourceLink(resource.uid, False))
        try:
            check_template(resource.name, resource.owner.template, self._options)
            spec = job_spec(resource)
            self._check_cycle(spec)
            self._actions.submit(spec)
        except (SpecError, ConflictError, DependencyError) as error:
            self._drop_link(resource.name)
            status = refused_status(resource, str(error), time.time())
            if isinstance(error, DependencyError):
                missing = [entry.job for entry in spec.after if entry.job not in self._jobs]
                status = held_status(resource, missing, time.time()) if missing else status
            self._write_status(resource, status)
        except SchedulerError:
            self._drop_link(resource.name)
            raise

    def _check_cycle(self, spec: JobSpec) -> None:
        """Raise `SpecError` if a resource and others without a job wait in a circle."""
        waiting, todo = {spec.name: spec}, [spec]
        while todo:
            for entry in todo.pop().after:
                other = self._found.get(entry.job)
                if other is None or entry.job in self._jobs or entry.job in waiting:
                    continue
                with suppress(SpecError):
                    waiting[entry.job] = job_spec(other)
                    todo.append(waiting[entry.job])
        cycle = cycle_of(list(waiting.values()))
        if cycle is not None and spec.name in cycle:
            raise SpecError(f"job '{spec.name}': after: {spell_cycle(cycle)}")

    def _make_resource(self, job: JobRecord) -> None:
        spec = resource_spec(job.spec) | {"suspend": job.state.suspended}
        made = self._api.create(
            Job,
            {
                "metadata": {"name": job.name, "annotations": {MADE_BY: self._identity}},
                "spec": spec,
            },
        )
        if made is not None:
            self._resources.note(made)
            self._keep_link(job.name, ResourceLink(made["metadata"]["uid"], job.state.suspended))

    def _adopt(self, job: JobRecord, resource: JobResource) -> None:
        """Link a job to the resource that was created for it before a scheduler was killed."""
        if resource.annotations.get(MADE_BY) == self._identity:
            self._keep_link(job.name, ResourceLink(resource.uid, job.state.suspended))
            return
        message = f"There is a job {job.name!r} already, which was not made from this resource."
        if resource.status.get("message") != message:
            self._write_status(resource, refused_status(resource, message, time.time()))

    def _remove_job(self, job: JobRecord, progress: _Progress) -> None:
        if isinstance(progress, _Sweep) and progress.trials and job.phase.ended:
            return  # until its trials have saved and ended
        if job.phase.ended:
            self._actions.delete(job.name)
        elif job.state.intent is None or job.state.intent.value != "cancel":
            self._actions.cancel(job.name)

    def _agree_on_suspension(
        self, job: JobRecord, resource: JobResource, link: ResourceLink
    ) -> None:
        """Apply the suspension of the side that has changed; the resource wins if both have."""
        if job.phase.ended:
            return
        if resource.suspended != link.suspend:
            if resource.suspended != job.state.suspended:
                (self._actions.suspend if resource.suspended else self._actions.resume)(job.name)
            self._keep_link(job.name, ResourceLink(link.uid, resource.suspended))
        elif job.state.suspended != link.suspend:
            self._api.patch(Job, job.name, {"spec": {"suspend": job.state.suspended}})
            self._keep_link(job.name, ResourceLink(link.uid, job.state.suspended))

    def _write_job_status(self, job: JobRecord, resource: JobResource, progress: _Progress) -> bool:
        step = None if isinstance(progress, _Sweep) else progress
        wanted = job_status(job, resource, self._identity, step)
        if isinstance(progress, _Sweep):
            wanted |= sweep_status(progress.summary, progress.trials)
        if not job.phase.ended:
            self._note_template(resource, wanted)
            if resource.generation > 1:  # its spec was changed
                ignored = ignored_change(resource, job.spec, time.time())
                wanted["conditions"] += [] if ignored is None else [ignored]
        old = dict(resource.status)
        if old == wanted:
            return True
        if {**old, "step": step} == {**wanted, "step": step}:
            if time.monotonic() - self._written.get(job.name, 0.0) < STEP_INTERVAL:
                return False
        elif (old.get("phase"), old.get("reason")) != (wanted["phase"], wanted["reason"]):
            event = phase_event(resource, self._api.namespace, wanted, time.time())
            self._api.create(Event, event)
        self._write_status(resource, wanted)
        return False

    def _note_template(self, resource: JobResource, status: dict[str, Any]) -> None:
        """Add a condition if the template was changed to one that cannot be used."""
        try:
            check_template(resource.name, resource.owner.template, self._options)
        except SpecError as error:
            status["conditions"].append(refused_template(resource, str(error), time.time()))

    def _write_status(self, resource: JobResource, status: Mapping[str, Any]) -> None:
        known = dict(resource.status)
        if known == dict(status):
            return
        patch = {**dict.fromkeys(known), **status}
        written = self._api.patch(JobStatus, resource.name, {"status": patch})
        if written is not None:
            self._resources.note(written)
            self._written[resource.name] = time.monotonic()

    # The link from a job to its resource

    def _link_file(self, job: str) -> Path:
        return self._state_dir.job(job) / "kubernetes.json"

    def _link(self, job: str) -> ResourceLink | None:
        try:
            kept = json.loads(self._link_file(job).read_text(encoding="utf-8"))
            return ResourceLink(str(kept["uid"]), bool(kept["suspend"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep_link(self, job: str, link: ResourceLink) -> None:
        self._link_file(job).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_aside(self._link_file(job), json.dumps(asdict(link)).encode())

    def _drop_link(self, job: str) -> None:
        with suppress(OSError):
            self._link_file(job).unlink()
            self._link_file(job).parent.rmdir()  # if it is empty


def rest_after(seconds: float) -> float:
    """Return the pause after a pass that has computed for some seconds.

    Example:
        >>> rest_after(0.02), rest_after(0.2), rest_after(10.0)
        (0.0, 1.3, 5.0)
    """
    return min(max(seconds * (1.0 / SHARE - 1.0) - PAUSE, 0.0), LONGEST_REST)


def _sweeps(actions: JobActions, jobs: Sequence[JobRecord]) -> dict[str, _Progress]:
    trials: dict[str, list[JobRecord]] = {}
    for job in jobs:
        if job.trial is not None and not job.phase.ended:
            trials.setdefault(job.sweep or "", []).append(job)
    return {
        name: _Sweep(summary, tuple(trials.get(name, ())))
        for name, summary in actions.sweeps().items()
    }


def phase_event(
    resource: JobResource, namespace: str, status: Mapping[str, Any], now: float
) -> Object:
    """Return the event of a job that has entered another phase."""
    phase = status["phase"]
    return {
        "metadata": {"name": f"{resource.name}.{secrets.token_hex(8)}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": resource.name,
            "namespace": namespace,
            "uid": resource.uid,
        },
        "reason": status["reason"] or phase,
        "message": (status["message"] or f"The job is {phase}.")[:_MESSAGE_LIMIT],
        "type": "Warning" if phase in _WARNINGS else "Normal",
        "count": 1,
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "source": {"component": "pipollux"},
        "reportingComponent": names.GROUP,
        "reportingInstance": "pipollux",
    }
