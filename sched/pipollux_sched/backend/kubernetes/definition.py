"""The CustomResourceDefinition of jobs, generated from the model of the job file (`JobSpec`).

To write the file, run this in the root of the repository:
`python -m pipollux_sched.backend.kubernetes.definition > deploy/kubernetes/crd.yaml`
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import yaml
from pydantic import BaseModel

from pipollux_sched.spec.dependencies import Dependency
from pipollux_sched.spec.job import ExitCodesSpec, JobSpec, ResourceSpec
from pipollux_sched.spec.notify import NotifySpec
from pipollux_sched.spec.sweep import SweepSpec
from pipollux_sched.store import TrialState

from . import names
from .job_resource import camel_case

Schema = dict[str, Any]

_HEADER = """\
# The custom resource of a job. Its fields are those of a job file, in the API's spelling.
# Generated; write it anew after a change of the job file:
#   python -m pipollux_sched.backend.kubernetes.definition > deploy/kubernetes/crd.yaml
"""
_NOT_IN_RESOURCE = ("name", "allocation")
"""Fields of a job file that a resource has otherwise, as its name or status, or not at all."""
_EITHER = "x-kubernetes-int-or-string"
_ANYTHING: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_OPAQUE: Mapping[str, Schema] = {
    "hints": _ANYTHING,
    "grid": _ANYTHING,
    "search": _ANYTHING,
    "list": {"type": "array", "items": _ANYTHING},
}
"""Fields whose content only the scheduler validates."""
_NESTED: Mapping[str, type[BaseModel]] = {
    model.__name__: model
    for model in (ResourceSpec, Dependency, NotifySpec, ExitCodesSpec, SweepSpec)
}
MUTABLE: Mapping[str, Schema] = {
    "suspend": {
        "description": "true lets the job save and release its devices; false lets it go on.",
        "type": "boolean",
        "default": False,
    },
    "template": {
        "description": (
            "A PodTemplateSpec that the pods are made from. Its container called 'replica', or its "
            "first, runs the script. A change holds from the next attempt on."
        ),
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    },
}
"""Fields of a resource that a job file does not have; only these can be changed."""
_DESCRIPTIONS = {
    "script": "Path of a Python script in the image.",
    "image": "Container image that every replica runs in; left out: that of the template.",
    "python": "Path of the interpreter in the image; left out: python3.",
    "user": "Whose job it is, as the creator of the resource says.",
    "environment": "Environment variables of the script; secrets belong into the template.",
    "working_dir": "Folder that the script runs in; left out: that of the image.",
    "sweep": "Runs the script many times, each time with other parameters.",
    "grid": "Values of each parameter, as lists by name; every combination is a trial.",
    "list": "The parameters of each trial, as objects of values by name.",
    "search": (
        "Ranges by name, from which Optuna proposes parameters: low, high, log and step, or "
        "choices. In quotes, a bound such as '1.0' makes a range of numbers, not of whole ones."
    ),
    "checkpoint_dir": (
        "Folder that the job saves in, for itself alone, on a volume that all replicas share; left "
        "out: one on the scheduler's volume."
    ),
}
_NAME_RULES = (
    (
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must begin with a lower-case letter, go on with lower-case letters, digits "
        "and '-', and end with a letter or digit",
    ),
    (
        f"size(self.metadata.name) <= {names.MOST_CHARACTERS}",
        f"metadata.name must have at most {names.MOST_CHARACTERS} characters, as pods add "
        "attempt and replica",
    ),
)
_RULES = (
    ("self.minReplicas <= self.maxReplicas", "minReplicas must not be more than maxReplicas"),
    (
        "!has(self.requestedReplicas) || self.requestedReplicas >= self.minReplicas",
        "requestedReplicas must not be less than minReplicas",
    ),
    (
        "!has(self.requestedReplicas) || self.requestedReplicas <= self.maxReplicas",
        "requestedReplicas must not be more than maxReplicas",
    ),
    (
        "!has(self.stageChoices) || size(self.stageChoices) == 0 || "
        "self.numStages in self.stageChoices",
        "stageChoices must contain numStages, which the job starts with",
    ),
    (
        "has(self.script) || has(self.module) || has(self.command)",
        "script is missing; give the path of a Python script in the image, or a module or command",
    ),
    (
        "has(self.image) || has(self.template)",
        "image is missing; give a reference such as registry.example/train:2.1, or a template "
        "whose container has one",
    ),
)
"""Checks of `JobSpec` across fields, for the API server to enforce."""
_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Replicas", "integer", ".status.replicas", 0),
    ("Stages", "integer", ".status.numStages", 0),
    ("Attempt", "integer", ".status.attempt", 0),
    ("Step", "integer", ".status.step", 0),
    ("Trials", "string", ".status.sweep.progress", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Team", "string", ".status.team", 1),
    ("Reason", "string", ".status.reason", 1),
    ("Message", "string", ".status.message", 1),
)


def custom_resource_definition() -> Schema:
    """Return the CustomResourceDefinition, as decoded JSON."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": ["pxj"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path}
                        | ({"priority": priority} if priority else {})
                        for name, kind, path, priority in _COLUMNS
                    ],
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "required": ["spec"],
                            "x-kubernetes-validations": _validations(_NAME_RULES),
                            "properties": {"spec": _spec(), "status": _status()},
                        }
                    },
                }
            ],
        },
    }


def definition_file() -> str:
    """Return the text of `deploy/kubernetes/crd.yaml`."""
    document = yaml.dump(custom_resource_definition(), Dumper=_Dumper, sort_keys=False, width=100)
    return _HEADER + document


class _Dumper(yaml.SafeDumper):
    """Writes repeated values out: anchors are harder to read."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _spec() -> Schema:
    document = JobSpec.model_json_schema()
    properties = _properties(JobSpec, document, document["$defs"])
    required: list[str] = []
    unchanged = [
        _unchanged(field, always=field in required or "default" in part)
        for field, part in properties.items()
    ]
    return {
        "type": "object",
        "x-kubernetes-validations": _validations([*_RULES, *unchanged]),
        "properties": {**properties, **MUTABLE},
    }


def _unchanged(field: str, *, always: bool) -> tuple[str, str]:
    """Return the rule that a field is neither changed, added nor removed; `always`: all have it."""
    same = f"self.{field} == oldSelf.{field}"
    if not always:
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return same, f"{field} of a job cannot be changed; delete the job, and create it again"


def _validations(rules: Iterable[tuple[str, str]]) -> list[Schema]:
    return [{"rule": rule, "message": message} for rule, message in rules]


def _properties(model: type[BaseModel], schema: Schema, known: Mapping[str, Schema]) -> Schema:
    docs = _field_docs(model)
    made: Schema = {}
    for field, part in schema["properties"].items():
        if model is JobSpec and field in _NOT_IN_RESOURCE:
            continue
        inner = _OPAQUE[field] if field in _OPAQUE else _structural(part, known)
        described = _DESCRIPTIONS.get(field) or _as_in_resource(docs.get(field, ""))
        if _EITHER in inner:
            described += f" A number, or {part['description']}."
        made[camel_case(field)] = ({"description": described} if described else {}) | inner
    return made


def _structural(part: Schema, known: Mapping[str, Schema]) -> Schema:
    """Return a JSON schema in the form for Kubernetes: without references, unions and titles."""
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return {"type": "object", "properties": _properties(_NESTED[name], known[name], known)}
    if "anyOf" in part:  # a union with null: the resource omits the field
        kinds = [kind for kind in part["anyOf"] if kind != {"type": "null"}]
        if len(kinds) > 1:
            return {_EITHER: True}
        return _structural(kinds[0], known)
    kept = ("type", "minimum", "minLength", "maxLength", "pattern", "enum")
    made = {name: part[name] for name in kept if name in part}
    if isinstance(part.get("default"), int | str):
        made["default"] = part["default"]
    for inner in ("items", "additionalProperties"):
        if isinstance(part.get(inner), dict):
            made[inner] = _structural(part[inner], known)
    return made


def _field_docs(model: type[BaseModel]) -> dict[str, str]:
    body = [
        statement
        for definition in ast.parse(textwrap.dedent(inspect.getsource(model))).body
        if isinstance(definition, ast.ClassDef)
        for statement in definition.body
    ]
    docs = {}
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def _as_in_resource(text: str) -> str:
    """Return a docstring in the terms of a resource: camel case, and no None."""
    text = re.sub(r"`([a-z_]+)`", lambda found: camel_case(found[1]), text)
    text = re.sub(r"\bFalse\b", "false", re.sub(r"\bTrue\b", "true", text))
    return re.sub(r"(^|[.;] )None:", lambda found: f"{found[1]}{_LEFT_OUT[found[1]]}:", text)


_LEFT_OUT = {"": "Left out", ". ": "Left out", "; ": "left out"}


def _status() -> Schema:
    text: Schema = {"type": "string"}
    number: Schema = {"type": "integer"}
    condition = {
        "type": text,
        "status": text | {"enum": ["True", "False", "Unknown"]},
        "reason": text,
        "message": text,
        "lastTransitionTime": text | {"format": "date-time"},
    }
    properties: Schema = {
        "phase": text,
        "reason": text,
        "message": text,
        "replicas": number | {"description": "Pipeline replicas that run or are being started."},
        "numStages": number,
        "attempt": number | {"description": "Number of the last launch."},
        "step": number | {"description": "Optimizer steps so far."},
        "team": text | {"description": "The team that the job counts to."},
        "nodes": {"type": "array", "items": text, "description": "Node of each replica."},
        "sweep": _sweep_status(text, number),
        "observedGeneration": number,
        "scheduler": text | {"description": "The state directory that knows the job."},
        "conditions": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {"type": "object", "required": list(condition), "properties": condition},
        },
    }
    return {"type": "object", "properties": properties}


def _sweep_status(text: Schema, number: Schema) -> Schema:
    best: Schema = {
        "trial": number,
        "job": text,
        "value": {"type": "number"},
        "parameters": _ANYTHING,
    }
    properties: Schema = {
        "progress": text | {"description": "Trials that have ended, of all trials."},
        "trials": number,
        **{state.value: number | {"description": _TRIALS[state]} for state in TrialState},
        "metric": text,
        "best": {
            "description": "The complete trial with the best value of the metric.",
            "type": "object",
            "properties": best,
        },
    }
    return {
        "description": "Progress and result of a sweep; other jobs have none.",
        "type": "object",
        "properties": properties,
    }


_TRIALS = {
    TrialState.WAITING: "Trials that have no job yet.",
    TrialState.UNFINISHED: "Trials that are queued or run.",
    TrialState.COMPLETE: "Trials that are complete.",
    TrialState.PRUNED: "Trials that were stopped, as others are better.",
    TrialState.FAILED: "Trials that have failed.",
    TrialState.CANCELLED: "Trials that were cancelled.",
}


if __name__ == "__main__":
    sys.stdout.write(definition_file())
