"""Conversion between jobs and custom resources: specs and statuses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipollux_sched.lifecycle import Phase
from pipollux_sched.spec.job import JobSpec, SpecError, parse_job
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import JobRecord, SweepSummary, TrialState
from pipollux_utils.text import listing

from .api import Object
from .pod_state import main_container
from .pods import Owner

CONDITIONS = (Phase.CREATED, Phase.RUNNING, Phase.SUSPENDED, Phase.COMPLETE, Phase.FAILED)
"""The conditions that a TrainJob has, too; other states are visible in the phase only."""
REFUSED = "Refused"
"""Reason of the phase Failed of a resource that is no valid job."""
TEMPLATE_REFUSED = "TemplateRefused"
"""Condition of a job whose template was changed to one that is not allowed."""
CHANGE_IGNORED = "ChangeIgnored"
"""Condition of a job whose resource was changed to differ from the job."""
WAITS_FOR_JOBS = "WaitsForJobs"
"""Reason of the phase Created of a resource that waits for a job which is not there yet."""
SUCCEEDING = "EarlierJobEnds"
"""Reason of the phase Created of a resource whose name is not free yet."""
_CHANGED_ELSEWHERE = ("allocation", "team", "priority", "user", "notify")
"""Fields of a job that change by a move to another team, come from a token, or are kept apart."""
_KEPT_AS_THEY_ARE = ("environment", "hints", "grid", "list", "search")
_BOUNDS = ("low", "high", "step")


@dataclass(frozen=True)
class JobResource:
    """The relevant fields of a custom resource."""

    name: str
    uid: str
    generation: int
    """Grows with each change of its spec."""
    deleted: bool
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def suspended(self) -> bool:
        """Whether it requests the suspension of its job."""
        return bool(self.spec.get("suspend"))

    @property
    def owner(self) -> Owner:
        """The owner of the job's objects."""
        return Owner(self.name, self.uid, self.spec.get("template") or {})


def view_job(resource: Object) -> JobResource:
    """Return the relevant fields of a resource."""
    metadata = resource["metadata"]
    return JobResource(
        metadata["name"],
        metadata.get("uid", ""),
        int(metadata.get("generation") or 0),
        metadata.get("deletionTimestamp") is not None,
        metadata.get("annotations") or {},
        resource.get("spec") or {},
        resource.get("status") or {},
    )


def job_spec(resource: JobResource) -> JobSpec:
    """Return the job that a resource describes; raise `SpecError` if it is not valid."""
    fields = {
        _snake(name): _renamed(name, value, _snake)
        for name, value in resource.spec.items()
        if name not in ("suspend", "template")
    }
    if isinstance(fields.get("sweep"), Mapping):
        fields["sweep"] = {**fields["sweep"], **_search_of_resource(fields["sweep"])}
    if "image" not in fields and (image := _image(resource.spec.get("template") or {})):
        fields["image"] = image
    return parse_job({"name": resource.name, **fields}, f"{resource.name}")


def resource_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of the resource for a job that was submitted without one."""
    default = JobSpec(name="x", script="x").model_dump(mode="json")
    made = {
        camel_case(name): _renamed(name, value, camel_case)
        for name, value in spec.items()
        if name not in ("name", "allocation", "sweep") and value != default.get(name)
    }
    if spec.get("sweep") is not None:
        made["sweep"] = _sweep_of_job(spec["sweep"])
    return made


def _sweep_of_job(sweep: Mapping[str, Any]) -> dict[str, Any]:
    spec = SweepSpec.model_validate(sweep).model_dump(mode="json", exclude_defaults=True)
    made = {camel_case(name): value for name, value in spec.items()}
    for bounds in made.get("search", {}).values():
        # The API server writes 1.0 as 1, which would make a range of whole numbers.
        bounds |= {
            name: str(value)
            for name, value in bounds.items()
            if name in _BOUNDS and isinstance(value, float)
        }
    return made


def _search_of_resource(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ranges of a search with the bounds that are numbers in quotes as numbers."""
    search = sweep.get("search")
    if not isinstance(search, Mapping):
        return {}
    return {
        "search": {
            name: {key: _bound(key, value) for key, value in bounds.items()}
            if isinstance(bounds, Mapping)
            else bounds
            for name, bounds in search.items()
        }
    }


def _bound(key: str, value: Any) -> Any:
    if key not in _BOUNDS or not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def job_status(
    job: JobRecord, resource: JobResource, scheduler: str, step: int | None
) -> dict[str, Any]:
    """Return the status of a resource with a job, managed by the state directory `scheduler`."""
    state = job.state
    return {
        "phase": state.phase.value,
        "reason": state.reason,
        "message": state.message,
        "replicas": len(state.running_on),
        "numStages": state.num_stages or int(job.spec.get("num_stages", 1)),
        "attempt": state.attempt,
        "nodes": list(state.running_on),
        "observedGeneration": resource.generation,
        "scheduler": scheduler,
        "conditions": [
            {
                "type": entry.type.value,
                "status": "True" if entry.status else "False",
                "reason": entry.reason or entry.type.value,
                "message": entry.message,
                "lastTransitionTime": rfc3339(entry.time),
            }
            for entry in state.conditions
            if entry.type in CONDITIONS
        ],
        **({} if step is None else {"step": step}),
        **({"team": team} if (team := job.spec.get("team")) else {}),
    }


def sweep_status(summary: SweepSummary, trials: Sequence[JobRecord]) -> dict[str, Any]:
    """Return the fields of the status of a sweep's resource that other jobs have otherwise.

    Args:
        summary: how far it has come.
        trials: jobs of its unfinished trials.
    """
    nodes = [node for trial in trials for node in trial.state.running_on]
    told: dict[str, Any] = {
        "progress": f"{summary.num_ended}/{summary.num_trials}",
        "trials": summary.num_trials,
        TrialState.WAITING.value: summary.num_waiting,
        **{
            state.value: summary.counts.get(state, 0)
            for state in TrialState
            if state is not TrialState.WAITING
        },
        "metric": summary.metric,
    }
    if (best := summary.best) is not None:
        told["best"] = {
            "trial": best.number,
            "job": best.job,
            "value": best.value,
            "parameters": dict(best.parameters),
        }
    return {"replicas": len(nodes), "nodes": nodes, "sweep": told}


def refused_status(resource: JobResource, message: str, now: float) -> dict[str, Any]:
    """Return the status of a resource that is no valid job."""
    return _status(resource, Phase.FAILED, REFUSED, message, now)


def ignored_change(
    resource: JobResource, spec: Mapping[str, Any], now: float
) -> dict[str, Any] | None:
    """Return a condition if a resource differs from its job, which our rules in CEL forbid."""
    try:
        wanted = job_spec(resource)
    except SpecError as error:
        message = f"The job stays as it was submitted: {error}"
    else:
        kept = parse_job(spec)
        names = [
            camel_case(name)
            for name in JobSpec.model_fields
            if name not in _CHANGED_ELSEWHERE and getattr(wanted, name) != getattr(kept, name)
        ]
        if not names:
            return None
        message = (
            f"The job stays as it was submitted: {', '.join(names)} cannot be changed; delete the "
            "job, and create it again."
        )
    return _condition(resource, CHANGE_IGNORED, "Immutable", message, now)


def refused_template(resource: JobResource, message: str, now: float) -> dict[str, Any]:
    """Return the condition of a job whose next attempt cannot use its template."""
    return _condition(resource, TEMPLATE_REFUSED, REFUSED, message, now)


def waiting_status(resource: JobResource, now: float) -> dict[str, Any]:
    """Return the status of a resource that was created suspended: its job is not submitted yet."""
    message = "The job is submitted when spec.suspend is false."
    return _status(resource, Phase.SUSPENDED, "Suspended", message, now)


def held_status(resource: JobResource, missing: Sequence[str], now: float) -> dict[str, Any]:
    """Return the status of a resource that waits for jobs which are not there yet."""
    names = listing(missing)
    there = "is no job of this name" if len(missing) == 1 else "are no jobs of these names"
    message = f"The job is submitted when it can wait for {names}: there {there} yet."
    return _status(resource, Phase.CREATED, WAITS_FOR_JOBS, message, now)


def succeeding_status(resource: JobResource, now: float) -> dict[str, Any]:
    """Return the status of a resource whose name belongs to a job that is being deleted."""
    message = (
        "The earlier job of this name is being deleted; this one follows when its pods are gone."
    )
    return _status(resource, Phase.CREATED, SUCCEEDING, message, now)


def rfc3339(seconds: float) -> str:
    """Return a time in whole seconds, as the API writes it."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _status(
    resource: JobResource, phase: Phase, reason: str, message: str, now: float
) -> dict[str, Any]:
    """Return the status of a resource without a job."""
    return {
        "phase": phase.value,
        "reason": reason,
        "message": message,
        "observedGeneration": resource.generation,
        "conditions": [_condition(resource, phase.value, reason, message, now)],
    }


def _condition(
    resource: JobResource, kind: str, reason: str, message: str, now: float
) -> dict[str, Any]:
    """Return a true condition, with the time of its last change."""
    made = {"type": kind, "status": "True", "reason": reason, "message": message}
    for known in resource.status.get("conditions") or ():
        if {**known, **made} == dict(known):
            return dict(known)
    return {**made, "lastTransitionTime": rfc3339(now)}


def _image(template: Mapping[str, Any]) -> str | None:
    containers = (template.get("spec") or {}).get("containers")
    return main_container(containers).get("image") if containers else None


def _renamed(field: str, value: Any, rename: Any) -> Any:
    if isinstance(value, Mapping) and field not in _KEPT_AS_THEY_ARE:
        return {rename(name): _renamed(name, entry, rename) for name, entry in value.items()}
    if isinstance(value, list):
        return [_renamed(field, entry, rename) for entry in value]
    if isinstance(value, float):  # a duration: the API has integers and strings only
        return int(value) if value.is_integer() else f"{value:.9f}".rstrip("0") + "s"
    return value


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name)


def camel_case(name: str) -> str:
    """Return the name of a job file's field in the spelling of the API.

    Example:
        >>> camel_case("process_per_stage")
        'processPerStage'
    """
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)
