"""What tests of clusters do and see again and again."""

from __future__ import annotations

from typing import Any

import pytest
from lightkube import Client
from lightkube.core.exceptions import ApiError
from lightkube.resources.core_v1 import Pod

from .cluster import until
from .objects import pod

DEAF = ["python", "-c", "import time; print('ready', flush=True); time.sleep(600)"]
"""The command of a container that ends only when it is killed."""
LISTENS = [
    "python",
    "-c",
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (print('told', flush=True), sys.exit(7)))\n"
    "print('ready', flush=True)\n"
    "time.sleep(600)",
]
"""The command of a container that ends with 7 when it is asked to end."""


def create_pod(client: Client, name: str, *args: Any, **more: Any) -> Pod:
    return client.create(Pod.from_dict(pod(name, *args, **more)))


def phase(client: Client, name: str) -> str:
    return client.get(Pod, name).status.phase


def ended(client: Client, name: str) -> Any:
    """Return how a pod's container has ended, once it has."""

    def look() -> Any:
        statuses = client.get(Pod, name).status.containerStatuses
        return statuses and statuses[0].state.terminated

    return until(look, f"pod {name} has ended")


def printed(client: Client, name: str, line: str) -> None:
    until(lambda: line in "".join(client.log(name)), f"pod {name} prints {line!r}")


def gone(client: Client, name: str, resource: Any = Pod) -> bool:
    return all(thing.metadata.name != name for thing in client.list(resource))


def refused(code: int, reason: str) -> Any:
    """Expect that a request is refused."""

    def right(error: BaseException) -> bool:
        assert isinstance(error, ApiError)
        return (error.status.code, error.status.reason) == (code, reason)

    return pytest.raises(ApiError, check=right)
