"""Refusals of the API server in memory: `Status` bodies as Kubernetes words them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .resources import Resource

Object = dict[str, Any]


class Cause(NamedTuple):
    """One thing that is wrong with an object."""

    field: str
    reason: str
    """``FieldValueRequired``, ``FieldValueInvalid``, ``FieldValueForbidden``…"""
    message: str


class ApiError(Exception):
    """A request that is refused.

    Args:
        code: the HTTP status.
        reason: its word of one CamelCase word, such as "NotFound".
        message: the sentence for people.
        details: what the request was about.
        headers: further headers of the answer, such as ``Retry-After``.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.details = None if details is None else dict(details)
        self.headers = dict(headers or {})
        self.text: str | None = None
        """What is answered instead of a `Status`."""

    @property
    def status(self) -> Object:
        """The body of the answer."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        }
        if self.reason:
            body["reason"] = self.reason
        if self.details is not None:
            body["details"] = self.details
        return body


def success(details: Mapping[str, Any] | None = None, code: int | None = None) -> Object:
    """Return the body that says that all is well, where there is no object to return."""
    body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        body["details"] = dict(details)
    if code:
        body["code"] = code
    return body


def _about(resource: Resource, name: str, kind: str) -> Object:
    about = {"name": name} if name else {}
    return about | ({"group": resource.group} if resource.group else {}) | {"kind": kind}


def not_found(resource: Resource, name: str) -> ApiError:
    """Return the answer for an object that is not there."""
    message = f'{resource.qualified} "{name}" not found'
    return ApiError(404, "NotFound", message, _about(resource, name, resource.plural))


def no_such_path() -> ApiError:
    """Return the answer for a path that leads nowhere."""
    return ApiError(404, "NotFound", "the server could not find the requested resource", {})


def no_such_group() -> ApiError:
    """Return the answer for a path of a group that is not there, which is no `Status`."""
    error = no_such_path()
    error.text = "404 page not found\n"
    return error


def already_exists(resource: Resource, name: str) -> ApiError:
    """Return the answer for a name that is taken."""
    message = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _about(resource, name, resource.plural))


def conflict(resource: Resource, name: str, why: str | None = None) -> ApiError:
    """Return the answer for a change to something that has changed meanwhile."""
    why = why or (
        "the object has been modified; please apply your changes to the latest version "
        "and try again"
    )
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message, _about(resource, name, resource.plural))


def invalid(resource: Resource, name: str, causes: Sequence[Cause]) -> ApiError:
    """Return the answer for an object that breaks rules."""
    said = [f"{cause.field}: {cause.message}" for cause in causes]
    what = resource.kind + (f".{resource.group}" if resource.group else "")
    text = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
    details = _about(resource, name, resource.kind)
    details["causes"] = [
        {"reason": cause.reason, "message": cause.message, "field": cause.field} for cause in causes
    ]
    return ApiError(422, "Invalid", f'{what} "{name}" is invalid: {text}', details)


def bad_request(message: str) -> ApiError:
    """Return the answer for what cannot be understood."""
    return ApiError(400, "BadRequest", message)


def forbidden(resource: Resource, name: str, why: str) -> ApiError:
    """Return the answer for what admission does not let through."""
    message = f'{resource.qualified} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, _about(resource, name, resource.plural))


def expired(version: int, oldest: int) -> ApiError:
    """Return the answer for a watch from a version that is no longer known."""
    return ApiError(410, "Expired", f"too old resource version: {version} ({oldest})")


def too_many_requests(seconds: int = 1) -> ApiError:
    """Return the answer of an API server that has too much to do."""
    return ApiError(
        429,
        "TooManyRequests",
        "Too many requests, please try again later.",
        {"retryAfterSeconds": seconds},
        {"Retry-After": str(seconds)},
    )
