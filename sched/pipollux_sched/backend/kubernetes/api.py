"""Calls to the API server, through lightkube. Objects are JSON, so that all fields are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpx2  # lightkube's HTTP client, whose errors it does not wrap
from lightkube import ApiError, Client, KubeConfig
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.core.resource import ApiInfo, ResourceDef
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    GenericNamespacedStatus,
)
from lightkube.types import PatchType

from pipollux_sched.backend.base import BackendError, ClusterUnavailableError

from . import names

Object: TypeAlias = dict[str, Any]
TIMEOUT = 10.0
FIELD_MANAGER = "pipollux"
_VERBS = [
    *("create", "delete", "get", "patch", "post"),
    *("list", "watch", "global_list", "global_watch"),
]


def _kind(group: str, version: str, kind: str, plural: str) -> ApiInfo:
    return ApiInfo(ResourceDef(group, version, kind), plural, _VERBS)


class Pod(GenericNamespacedResource):
    """A pod."""

    _api_info = _kind("", "v1", "Pod", "pods")


class Service(GenericNamespacedResource):
    """A service."""

    _api_info = _kind("", "v1", "Service", "services")


class Secret(GenericNamespacedResource):
    """A secret."""

    _api_info = _kind("", "v1", "Secret", "secrets")


class Event(GenericNamespacedResource):
    """An event, as `kubectl describe` shows it."""

    _api_info = _kind("", "v1", "Event", "events")


class NodeObject(GenericGlobalResource):
    """A node."""

    _api_info = _kind("", "v1", "Node", "nodes")


class Job(GenericNamespacedResource):
    """Our custom resource."""

    _api_info = _kind(names.GROUP, names.VERSION, names.KIND, names.PLURAL)


class TrainJob(GenericNamespacedResource):
    """A TrainJob of Kubeflow Trainer."""

    _api_info = _kind("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs")


class JobStatus(GenericNamespacedStatus):
    """The status of our custom resource."""

    _api_info = ApiInfo(
        Job._api_info.resource, names.PLURAL, ["get", "patch"], Job._api_info.resource, "status"
    )


def load_config() -> SingleConfig:
    """Return the configuration of the pod, KUBECONFIG or ~/.kube/config; or `BackendError`."""
    try:
        config, why = KubeConfig.from_env().get(), "no current context"
    except (ConfigError, OSError, ValueError, KeyError) as error:
        config, why = None, str(error)
    if config is None:
        raise BackendError(
            f"no cluster is configured ({why}); run the scheduler in a pod, or set KUBECONFIG to "
            "the file that kubectl uses"
        )
    return config


def describe_error(error: httpx2.HTTPError) -> str:
    """Return a failed call in one sentence, in the words of the API server."""
    if isinstance(error, ApiError):
        return f"the Kubernetes API refuses: {error.status.message or error.status.reason}"
    text = str(error) or type(error).__name__
    return f"the Kubernetes API does not answer: {text}"


def error_code(error: httpx2.HTTPError) -> int:
    """Return the status code of a response; 0 without a response."""
    if isinstance(error, ApiError) and error.status.code:
        return int(error.status.code)
    if isinstance(error, httpx2.HTTPStatusError) and error.response is not None:
        return int(error.response.status_code)
    return 0


def _may_succeed_later(error: httpx2.HTTPError) -> bool:
    """Return whether the same call may succeed later; an exceeded quota may be free again, too."""
    code = error_code(error)
    if code in (0, 401, 408, 409, 429) or code >= 500:
        return True
    return code == 403 and "exceeded quota" in str(error)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPError as error:
        kind = ClusterUnavailableError if _may_succeed_later(error) else BackendError
        raise kind(describe_error(error)) from error
    except (httpx2.InvalidURL, ConfigError, ValueError) as error:
        raise BackendError(f"the Kubernetes API cannot be asked: {error}") from error


def _unless_missing(call: Callable[[], Mapping[str, Any] | None]) -> Object | None:
    """Return the object that a call returns; None if it does not exist."""
    with _translated():
        try:
            found = call()
        except ApiError as error:
            if error_code(error) == 404:
                return None
            raise
        return None if found is None else dict(found)


class Api:
    """Calls in one namespace. All raise `ClusterUnavailableError` if they may succeed later."""

    def __init__(self, config: SingleConfig, namespace: str | None) -> None:
        self._client = Client(
            config,
            namespace=namespace,
            timeout=httpx2.Timeout(TIMEOUT),
            field_manager=FIELD_MANAGER,
        )
        self.namespace: str = self._client.namespace or "default"

    def create(self, kind: type[GenericNamespacedResource], made: Object) -> Object | None:
        """Create an object and return it; None if one of this name exists already."""
        with _translated():
            try:
                return dict(self._client.create(kind(**made), namespace=self.namespace))
            except ApiError as error:
                if error.status.reason == "AlreadyExists":
                    return None
                raise

    def get(self, kind: type[GenericNamespacedResource], name: str) -> Object | None:
        """Return an object; None if there is none of this name."""
        return _unless_missing(lambda: self._client.get(kind, name, namespace=self.namespace))

    def delete(
        self, kind: type[GenericNamespacedResource], name: str, grace: int | None = None
    ) -> None:
        """Delete an object, if it exists; a pod has `grace` seconds to end (None: its own)."""
        _unless_missing(
            lambda: self._client.delete(kind, name, namespace=self.namespace, grace_period=grace)
        )

    def patch(self, kind: type[Any], name: str, patch: Mapping[str, Any]) -> Object | None:
        """Merge fields into an object and return it; None if it does not exist."""
        return _unless_missing(
            lambda: self._client.patch(
                kind, name, dict(patch), namespace=self.namespace, patch_type=PatchType.MERGE
            )
        )

    def log(self, pod: str, container: str, since: int | None) -> list[str]:
        """Return the lines of a container's log of the last `since` seconds, with times."""
        with _translated():
            lines = self._client.log(
                pod,
                namespace=self.namespace,
                container=container,
                since=since,
                timestamps=True,
                newlines=False,
            )
            return list(lines)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
