"""Requests to the API server in memory: which path means what, and what is answered."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from . import answers, deletion, kinds, patches
from .answers import ApiError, Object
from .registry import Registry
from .resources import NAMESPACES, PODS, Resource
from .selectors import Matches, matcher

VERSION = {"major": "1", "minor": "20", "gitVersion": "v1.20.2", "platform": "memory"}
_PATCHES = (patches.JSON, patches.MERGE, patches.STRATEGIC, patches.APPLY)


@dataclass
class Request:
    """A request, read."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    body: bytes = b""


class Answer(NamedTuple):
    """What is answered at once."""

    code: int
    body: Any
    headers: Mapping[str, str] = {}


class Watch(NamedTuple):
    """What is answered by a stream of what happens to objects."""

    resource: Resource
    namespace: str
    matches: Matches
    version: int | None
    """None: begin with the objects that are there."""
    seconds: float | None
    bookmarks: bool


class LogStream(NamedTuple):
    """What is answered by what a container prints."""

    namespace: str
    pod: str
    container: str | None
    query: Mapping[str, str]


class _Target(NamedTuple):
    """What a path means."""

    resource: Resource
    namespace: str
    name: str
    subresource: str


def answer(registry: Registry, request: Request) -> Answer | Watch | LogStream:
    """Carry out a request.

    Raises:
        ApiError: it is refused.
    """
    found = _discovery(registry, request.path.rstrip("/"))
    if found is not None:
        return found
    target = _target(registry, request.path)
    if target.subresource not in ("", "status"):
        return _subresource(registry, request, target)
    if target.subresource and not target.resource.status:
        raise answers.no_such_path()
    handlers: dict[tuple[str, bool], Callable[..., Answer | Watch]] = {
        ("GET", True): _get,
        ("GET", False): _list,
        ("POST", False): _create,
        ("PUT", True): _replace,
        ("PATCH", True): _patch,
        ("DELETE", True): _delete,
        ("DELETE", False): _delete_all,
    }
    handler = handlers.get((request.method, bool(target.name)))
    if handler is None:
        text = "the server does not allow this method on the requested resource"
        raise ApiError(405, "MethodNotAllowed", text, {})
    return handler(registry, request, target)


def _discovery(registry: Registry, path: str) -> Answer | None:
    if path in ("/healthz", "/readyz", "/livez"):
        return Answer(200, "ok")
    if path == "/version":
        return Answer(200, VERSION)
    if path == "/api":
        return Answer(200, {"kind": "APIVersions", "versions": ["v1"]})
    resources = kinds.served(registry.store)
    versions = {(r.group, r.version) for r in resources}
    if path == "/apis":
        groups = []
        for group in sorted({group for group, _ in versions if group}):
            there = [
                {"groupVersion": f"{group}/{v}", "version": v}
                for g, v in sorted(versions)
                if g == group
            ]
            groups.append({"name": group, "versions": there, "preferredVersion": there[0]})
        return Answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
    parts = path.split("/")[1:]
    pair = ("", parts[1]) if parts[0] == "api" and len(parts) == 2 else tuple(parts[1:])
    if pair not in versions:
        return None
    entries = []
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    for resource in resources:
        if (resource.group, resource.version) == pair:
            entry = {
                "name": resource.plural,
                "singularName": resource.kind.lower() if resource.custom else "",
                "namespaced": resource.namespaced,
                "kind": resource.kind,
            }
            entries.append(entry | {"verbs": verbs})
            if resource.status:
                name = {"name": f"{resource.plural}/status", "verbs": ["get", "patch", "update"]}
                entries.append(entry | {"singularName": ""} | name)
    version = "/".join(part for part in pair if part)
    listed = {"kind": "APIResourceList", "groupVersion": version, "resources": entries}
    return Answer(200, listed | ({"apiVersion": "v1"} if pair[0] else {}))


def _target(registry: Registry, path: str) -> _Target:
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise answers.no_such_path()
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    if len(rest) > 3:
        raise answers.no_such_path()
    if group and group not in {resource.group for resource in kinds.served(registry.store)}:
        raise answers.no_such_group()
    resource = kinds.find(registry.store, group, version, rest[0])
    name, subresource = (*rest[1:], "", "")[:2]
    if resource.namespaced != bool(namespace) and (name or not resource.namespaced):
        raise answers.no_such_path()
    return _Target(resource, namespace, name, subresource)


def _body(request: Request) -> Any:
    if not request.body:
        return None
    try:
        if "yaml" in request.content_type:
            return yaml.safe_load(request.body)
        return json.loads(request.body)
    except (ValueError, yaml.YAMLError) as error:
        raise answers.bad_request(f"the object provided is unrecognized: {error}") from None


def _manager(request: Request) -> str:
    return request.query.get("fieldManager") or "unknown"


def _strict(request: Request) -> bool:
    return request.query.get("fieldValidation") == "Strict"


def _selected(request: Request, resource: Resource) -> Matches:
    query = request.query
    return matcher(resource, query.get("labelSelector", ""), query.get("fieldSelector", ""))


def _get(registry: Registry, request: Request, target: _Target) -> Answer:
    return Answer(200, registry.store.get(target.resource, target.namespace, target.name))


def _list(registry: Registry, request: Request, target: _Target) -> Answer | Watch:
    resource, query = target.resource, request.query
    matches = _selected(request, resource)
    if query.get("watch") in ("true", "1"):
        text = query.get("resourceVersion", "")
        if text and not text.isdigit():
            said = f'"{text}": strconv.ParseUint: parsing "{text}": invalid syntax'
            raise ApiError(500, "", f"resourceVersion: Invalid value: {said}")
        seconds = query.get("timeoutSeconds")
        return Watch(
            resource,
            target.namespace,
            matches,
            int(text) if text not in ("", "0") else None,
            float(seconds) if seconds else None,
            query.get("allowWatchBookmarks") in ("true", "1"),
        )
    with registry.store.lock:
        there = registry.store.view(resource)
        version = registry.store.version
    within = [thing for thing in there if target.namespace in ("", _place(thing)[0])]
    things = sorted(within, key=_place)
    listed: Object = {"resourceVersion": str(version)}
    if resource.custom:
        listed["continue"] = ""
    if query.get("continue"):
        begun, after = json.loads(base64.urlsafe_b64decode(query["continue"]))
        registry.store.since(begun)
        things = [thing for thing in things if _place(thing) > after]
        listed["resourceVersion"] = str(begun)
    chosen = [thing for thing in things if matches(thing)]
    limit = int(query.get("limit") or 0)
    if limit and len(chosen) >= limit and chosen[limit - 1] != things[-1]:
        chosen = chosen[:limit]
        if not (query.get("labelSelector") or query.get("fieldSelector")):
            listed["remainingItemCount"] = len(things) - limit
        token = json.dumps([int(listed["resourceVersion"]), _place(chosen[-1])])
        listed["continue"] = base64.urlsafe_b64encode(token.encode()).decode()
    if not resource.custom:  # the kind of the list says it
        said = ("kind", "apiVersion")
        chosen = [{k: v for k, v in thing.items() if k not in said} for thing in chosen]
    body = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
    return Answer(200, body | {"metadata": listed, "items": chosen})


def _place(thing: Mapping[str, Any]) -> list[str]:
    return [thing["metadata"].get("namespace", ""), thing["metadata"]["name"]]


def _create(registry: Registry, request: Request, target: _Target) -> Answer:
    if target.resource.namespaced and not target.namespace:
        raise answers.no_such_path()
    created = registry.create(
        target.resource,
        target.namespace,
        _body(request),
        manager=_manager(request),
        strict=_strict(request),
        dry_run=request.query.get("dryRun") == "All",
    )
    return Answer(201, created)


def _replace(registry: Registry, request: Request, target: _Target) -> Answer:
    replaced = registry.replace(
        target.resource,
        target.namespace,
        target.name,
        _body(request),
        status=target.subresource == "status",
        manager=_manager(request),
        strict=_strict(request),
    )
    return Answer(200, replaced)


def _patch(registry: Registry, request: Request, target: _Target) -> Answer:
    kind = request.content_type.split(";")[0]
    if kind not in _PATCHES:
        raise ApiError(415, "UnsupportedMediaType", "415: Unsupported Media Type", {})
    if kind == patches.APPLY and not request.query.get("fieldManager"):
        cause = answers.Cause(
            "fieldManager", "FieldValueRequired", "Required value: is required for apply patch"
        )
        raise _invalid_options("PatchOptions", cause)
    code, patched = registry.patch(
        target.resource,
        target.namespace,
        target.name,
        _body(request),
        kind,
        status=target.subresource == "status",
        manager=_manager(request),
        force=request.query.get("force") == "true",
        strict=_strict(request),
        dry_run=request.query.get("dryRun") == "All",
    )
    return Answer(code, patched)


def _invalid_options(kind: str, cause: answers.Cause) -> ApiError:
    resource = Resource("meta.k8s.io", "v1", "options", kind)
    return answers.invalid(resource, "", [cause])


def _delete_options(request: Request) -> Object:
    options = dict(_body(request) or {})
    if "gracePeriodSeconds" in request.query:
        options["gracePeriodSeconds"] = int(request.query["gracePeriodSeconds"])
    if "propagationPolicy" in request.query:
        options["propagationPolicy"] = request.query["propagationPolicy"]
    return options


def _delete(registry: Registry, request: Request, target: _Target) -> Answer:
    options = _delete_options(request)
    deleted = deletion.delete(
        registry.store, target.resource, target.namespace, target.name, options
    )
    return Answer(200, deleted)


def _delete_all(registry: Registry, request: Request, target: _Target) -> Answer:
    matches, options = _selected(request, target.resource), _delete_options(request)
    things = deletion.delete_all(
        registry.store, target.resource, target.namespace, matches, options
    )
    body = {"kind": f"{target.resource.kind}List", "apiVersion": target.resource.api_version}
    metadata = {"resourceVersion": str(registry.store.version)}
    if target.resource.custom:
        metadata["continue"] = ""
    return Answer(200, body | {"metadata": metadata, "items": things})


def _subresource(
    registry: Registry, request: Request, target: _Target
) -> Answer | Watch | LogStream:
    where = (target.resource, target.subresource, request.method)
    if where == (PODS, "log", "GET"):
        registry.store.get(PODS, target.namespace, target.name)
        container = request.query.get("container")
        return LogStream(target.namespace, target.name, container, request.query)
    if where == (PODS, "eviction", "POST"):
        return Answer(201, registry.evict(target.namespace, target.name, _body(request) or {}))
    if where == (PODS, "binding", "POST"):
        node = (_body(request) or {}).get("target", {}).get("name", "")
        return Answer(201, registry.bind(target.namespace, target.name, node))
    if where == (NAMESPACES, "finalize", "PUT"):
        body = _body(request)
        return Answer(200, registry.replace(NAMESPACES, "", target.name, body))
    raise answers.no_such_path()
