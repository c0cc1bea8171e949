"""The owner of a job's objects, as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import names


@dataclass(frozen=True)
class Owner:
    """The custom resource that owns a job's objects."""

    name: str
    uid: str
    template: Mapping[str, Any] = field(default_factory=dict)
    """Its user's PodTemplateSpec."""

    @property
    def references(self) -> list[dict[str, Any]]:
        """The owner references of its objects: deleting it deletes them."""
        if not self.uid:
            return []
        return [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": self.name,
                "uid": self.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]


NO_OWNER = Owner("", "")
"""The owner of a job without a custom resource."""


Owners: TypeAlias = Callable[[str], Owner]
"""Returns the owner of a job's objects; raises `ClusterUnavailableError` until it is known."""


def no_owners(_job: str) -> Owner:
    """Return the owner of jobs that have no custom resource."""
    return NO_OWNER
