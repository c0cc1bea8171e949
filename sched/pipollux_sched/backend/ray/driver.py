"""The client of a Ray cluster: `python -P driver.py ADDRESS NAMESPACE`, for `connection`.

It is a separate process because Ray ends the process that uses it when the raylet or the control
plane is lost, and because some calls of Ray have no timeout: then this process is killed. It is run
as a file, so that Ray pickles the classes here by value, and nodes need not have this package.

Each request is a list of calls of `Driver`; the answer is what it then sees.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import ray
from ray._private import state  # without a dashboard, the only tables of each node
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util import get_placement_group, list_named_actors, placement_group_table
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TABLES: Any = state.state
NODE_ID = "ray.io/node-id"
"""The label with the id of a node."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which Ray shows an actor its GPUs, depending on their maker."""
NOT_STARTED = 74
"""Exit status if nothing was started."""
LAST_CALLS = 5.0
"""Seconds for calls after the end of the engine."""
_DEATH = re.compile(r"The actor is dead because [^.\n]*\.|The actor's \w+ [^.\n]*\.")


class Holder:
    """An actor that holds the resources of a replica on its node, and starts its supervisor."""

    def __init__(self, node: str, num_gpus: float, supervisor: str, base: str, log: str) -> None:
        context = ray.get_runtime_context()
        if context.get_node_id() != node:  # as versions did that ignored the labels of bundles
            raise RuntimeError(f"Ray has placed it on node {context.get_node_id()}, not {node}")
        gpus = context.get_accelerator_ids().get("GPU", [])
        if len(gpus) != num_gpus:
            raise RuntimeError(f"Ray has assigned it the GPUs {gpus}, not {num_gpus:g} of them")
        shown = {name: os.environ[name] for name in VISIBLE if os.environ.get(name)}
        shown = (shown or {VISIBLE[0]: ",".join(gpus)}) if gpus else {}
        start = runpy.run_path(supervisor)["start_recorded"]
        self._process: subprocess.Popen[bytes] | None = start(Path(base), Path(log), shown)

    def poll(self) -> int | None:
        """Return the supervisor's exit status as that of a shell; None: it runs."""
        return NOT_STARTED if self._process is None else self._process.poll()

    def wake(self) -> None:
        """Make the supervisor read its signal at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)


def fence(supervisor: str, base: str, patience: float) -> int:
    """Call `supervisor.end_step` on the node of a replica."""
    remaining: int = runpy.run_path(supervisor)["end_step"](Path(base), patience)
    return remaining


def missing(folder: str, paths: Sequence[str]) -> str:
    """Return what a node does not see, or cannot write; empty: all is there."""
    lost = next((path for path in paths if not os.path.exists(path)), "")
    return lost or ("" if os.access(folder, os.W_OK) else folder)


class Driver:
    """Actors and placement groups of one namespace, by the names of replicas."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._holder = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(Holder)
        self._actors: dict[str, Any] = {}
        self._states: dict[str, tuple[str, int | None, str]] = {}
        self._tasks: dict[tuple[str, str], Any] = {}
        """What runs on nodes: by its name here, and that of its replica or node."""

    def start(self, name: str, node: str, bundle: Mapping[str, float], *holder: Any) -> None:
        """Start the actor of a replica in a bundle on a node, unless it exists."""
        group = self._group(name) or placement_group(
            [dict(bundle)],
            strategy="STRICT_PACK",
            name=f"{self._namespace}/{name}",
            lifetime="detached",
            bundle_label_selector=[{NODE_ID: node}],
        )
        self._actors[name] = self._holder.options(
            name=name,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        ).remote(node, bundle.get("GPU", 0), *holder)

    def wake(self, name: str) -> None:
        """Make a replica read its signal at once."""
        if name in self._actors:
            self._actors[name].wake.remote()

    def end(self, name: str) -> None:
        """Remove the actor and the bundle of a replica, and all about it here."""
        with suppress(ValueError):  # no such actor
            ray.kill(self._actors.pop(name, None) or ray.get_actor(name), no_restart=True)
        if group := self._group(name):
            remove_placement_group(group)
        self._states.pop(name, None)
        for task in ("poll", "fence"):
            self._tasks.pop((task, name), None)

    def fence(self, name: str, node: str, *arguments: Any) -> None:
        """Run `fence` on the node of a replica."""
        self._tasks["fence", name] = _on(node, fence).remote(*arguments)

    def check(self, node: str, *arguments: Any) -> None:
        """Run `missing` on a node."""
        self._tasks["check", node] = _on(node, missing).remote(*arguments)

    def look(self) -> tuple[Any, Any, Any]:
        """Return nodes, actors with their groups, and results of `fence` and `check`."""
        ended = self._finished()
        self._look_at_actors({name: ended[what, name] for what, name in ended if what == "poll"})
        groups = self._groups()  # before the resources: see `nodes`
        free, draining = TABLES.available_resources_per_node(), TABLES.get_draining_nodes()
        nodes = {
            node["NodeID"]: (
                node.get("NodeName", ""),
                node["NodeManagerHostname"],
                node["Resources"],
                free.get(node["NodeID"], {}),
                node.get("Labels", {}),
                node["NodeID"] in draining,
            )
            for node in TABLES.node_table()
            if node["Alive"]
        }
        none = ("none", None, "")
        actors = {
            name: (*self._states.get(name, none), *groups.get(name, ()))
            for name in {*groups, *self._states}
        }
        results = [
            (*key, value, _why(error) if error else "")
            for key, (value, error) in ended.items()
            if key[0] != "poll"
        ]
        return nodes, actors, results

    def _look_at_actors(self, polled: Mapping[str, tuple[Any, Exception | None]]) -> None:
        for name, (code, error) in polled.items():
            if error is None:
                self._states[name] = ("running" if code is None else "ended", code, "")
            elif isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                self._states[name] = ("dead", None, _why(error))
        for name in set(list_named_actors()) - self._actors.keys():
            with suppress(ValueError):  # it has died meanwhile
                self._actors[name] = ray.get_actor(name)
        for name, actor in self._actors.items():
            phase, *_ = self._states.setdefault(name, ("pending", None, ""))
            if phase in ("pending", "running") and ("poll", name) not in self._tasks:
                self._tasks["poll", name] = actor.poll.remote()

    def _finished(self) -> dict[tuple[str, str], tuple[Any, Exception | None]]:
        """Forget tasks that have ended, and return their results or errors."""
        found: dict[tuple[str, str], tuple[Any, Exception | None]] = {}
        for key, task in list(self._tasks.items()):
            try:
                found[key] = ray.get(task, timeout=0), None
            except GetTimeoutError:
                continue
            except RayError as error:
                found[key] = None, error
            del self._tasks[key]
        return found

    def _groups(self) -> dict[str, tuple[str, str, dict[str, float]]]:
        prefix = f"{self._namespace}/"
        return {
            entry["name"].removeprefix(prefix): (
                (entry["bundles_to_node_id"].get(0) or "") * (entry["state"] == "CREATED"),
                entry["stats"].get("scheduling_state", ""),
                entry["bundles"].get(0, {}),
            )
            for entry in placement_group_table().values()
            if entry["name"].startswith(prefix) and entry["state"] != "REMOVED"
        }

    def _group(self, name: str) -> Any:
        with suppress(ValueError):  # there is none
            return get_placement_group(f"{self._namespace}/{name}")
        return None


def _on(node: str, function: Any) -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(function).options(label_selector={NODE_ID: node})


def _why(error: Exception) -> str:
    text = str(error)
    found = _DEATH.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return found[0] if found else (lines or [type(error).__name__])[-1]


def main(address: str, namespace: str) -> None:
    """Answer the engine until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    requests: Queue[Any] = Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    try:
        ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except Exception as error:  # whatever is wrong, in Ray's own words
        answers.write(json.dumps((None, f"{type(error).__name__}: {error}")) + "\n")
        return
    driver = Driver(namespace)
    while (messages := requests.get()) is not None:
        answer: tuple[Any, str] = None, ""
        for method, *arguments in [*messages, ("look",)]:
            try:
                answer = getattr(driver, method)(*arguments), ""
            except (RayError, ValueError) as error:  # the engine asks again, as nothing has changed
                answer = None, f"{type(error).__name__}: {error}"
                print(method, arguments[:2], answer[1], flush=True)
        answers.write(json.dumps(answer) + "\n")


def _read_requests(requests: Queue[Any]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put(None)
    time.sleep(LAST_CALLS)
    os._exit(0)  # in a call that does not return


if __name__ == "__main__":
    with suppress(OSError, KeyboardInterrupt):
        main(*sys.argv[1:])
