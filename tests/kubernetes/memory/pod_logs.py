"""What the containers of a pod in memory have printed, as the API server hands it out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from .answers import Object, bad_request
from .containers import Container, records, time_before
from .kubelet import Kubelet
from .requests import LogStream


def read_log(
    kubelet: Kubelet, pod: Object, wanted: LogStream, listens: Callable[[], bool]
) -> Iterator[bytes]:
    """Return what a container has printed and, if it is followed, prints.

    Raises:
        ApiError: 400, where there is no such container or it has not started.
    """
    names = [spec["name"] for spec in pod["spec"]["containers"]]
    name, where = wanted.container, pod["metadata"]["name"]
    if name is None and len(names) > 1:
        chosen = " ".join(names)
        raise bad_request(
            f"a container name must be specified for pod {where}, choose one of: [{chosen}]"
        )
    name = name or names[0]
    if name not in names:
        raise bad_request(f"container {name} is not valid for pod {where}")
    worker = kubelet.workers.get(pod["metadata"]["uid"])
    if worker is None or name not in worker.containers:
        statuses = pod["status"].get("containerStatuses", [])
        state = next((s["state"] for s in statuses if s["name"] == name), {})
        reason = state.get("waiting", {}).get("reason", "ContainerCreating")
        raise bad_request(f'container "{name}" in pod "{where}" is waiting to start: {reason}')
    return _log_lines(worker.containers[name], wanted.query, listens)


def _log_lines(
    container: Container, query: Mapping[str, str], listens: Callable[[], bool]
) -> Iterator[bytes]:
    follow, stamped = query.get("follow") == "true", query.get("timestamps") == "true"
    since = query.get("sinceTime", "").removesuffix("Z").encode()
    if "sinceSeconds" in query:
        since = time_before(int(query["sinceSeconds"])).encode()
    shown = 0
    first = True
    while True:
        over = container.exit_code is not None
        lines = list(records(container.log))
        if first and "tailLines" in query:
            shown = max(len(lines) - int(query["tailLines"]), 0)
        first = False
        for stamp, text in lines[shown:]:
            if stamp >= since:
                yield stamp + b" " + text if stamped else text
        shown = len(lines)
        if over or not follow or not listens():
            return
        time.sleep(0.05)
