"""The client of a Ray cluster: `python -P driver.py FD ADDRESS NAMESPACE`, for `connection`.

It is a separate process because Ray ends the process that uses it when the raylet or the control
plane is lost, and because some calls of Ray have no timeout: then this process is killed. It is run
as a file, so that Ray pickles the classes here by value, and nodes need not have this package.

Each message on the socket FD is a method of `Driver` with its arguments. `look` is answered.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
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
_DEATH = re.compile(r"The actor is dead because [^.\n]*\.|The actor's \w+ [^.\n]*\.")


class Holder:
    """An actor that holds the resources of a replica on its node, and starts its launcher."""

    def __init__(self, node: str, words: Sequence[str]) -> None:
        context = ray.get_runtime_context()
        if context.get_node_id() != node:  # as versions did that ignored the labels of bundles
            raise RuntimeError(f"Ray has placed it on node {context.get_node_id()}, not {node}")
        gpus = context.get_accelerator_ids().get("GPU", [])
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the actor
        self._process = subprocess.Popen(
            [*words, str(os.getpid()), ",".join(gpus)],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            cwd="/",
            start_new_session=True,
        )

    def poll(self) -> tuple[int | None, str]:
        """Return the launcher's exit status, and its last line if it has ended."""
        code = self._process.poll()
        lines = b"" if code is None else os.pread(self._said.fileno(), 2**16, 0)
        return code, (lines.decode(errors="replace").splitlines() or [""])[-1]

    def wake(self) -> None:
        """Make the supervisor read its signal at once."""
        self._process.send_signal(signal.SIGCONT)


def fence(supervisor: str, base: str, patience: float) -> int:
    """Wait for the processes of a replica without an actor, then kill them; return how many remain.

    Run on its node: they have `patience` seconds to save, less if their signal is to kill.
    """
    node = runpy.run_path(supervisor)
    deadline = time.monotonic() + patience
    while node["step_processes"](Path(base)) and time.monotonic() < deadline:
        if node["read_signal"](Path(base)) in ("kill", "gone"):
            break
        time.sleep(0.2)
    node["kill_step"](Path(base))
    return len(node["step_processes"](Path(base)))


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
        self._polls: dict[str, Any] = {}
        self._states: dict[str, tuple[str, int | None, str]] = {}
        self._fences: dict[str, Any] = {}
        self._checks: dict[str, Any] = {}

    def start(self, name: str, node: str, bundle: Mapping[str, float], words: list[str]) -> None:
        """Start the actor of a replica in a bundle on a node, unless it exists."""
        group = self._group(name)
        if group is None:
            group = placement_group(
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
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            ),
        ).remote(node, words)

    def wake(self, name: str) -> None:
        """Make a replica read its signal at once."""
        if name in self._actors:
            self._actors[name].wake.remote()

    def end(self, name: str) -> None:
        """Remove the actor and the bundle of a replica, and all about it here."""
        with suppress(ValueError):  # no such actor
            ray.kill(self._actors.get(name) or ray.get_actor(name), no_restart=True)
        group = self._group(name)
        if group is not None:
            remove_placement_group(group)
        for known in (self._actors, self._polls, self._states, self._fences):
            known.pop(name, None)

    def fence(self, name: str, node: str, *arguments: Any) -> None:
        """Run `fence` on the node of a replica."""
        self._fences[name] = _on(node, fence).remote(*arguments)

    def check(self, node: str, *arguments: Any) -> None:
        """Run `missing` on a node."""
        self._checks[node] = _on(node, missing).remote(*arguments)

    def look(self) -> dict[str, Any]:
        """Return nodes, groups, actors, and results of `fence` and `check` since the last call."""
        self._look_at_actors()
        groups = self._groups()  # before the resources: see `nodes`
        free = TABLES.available_resources_per_node()
        draining = TABLES.get_draining_nodes()
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
        return {
            "nodes": nodes,
            "groups": groups,
            "actors": dict(self._states),
            "fenced": _results(self._fences),
            "checked": _results(self._checks),
        }

    def _look_at_actors(self) -> None:
        for name in set(list_named_actors()) - self._actors.keys():
            with suppress(ValueError):  # it has died meanwhile
                self._actors[name] = ray.get_actor(name)
        for name, actor in self._actors.items():
            if self._states.setdefault(name, ("pending", None, ""))[0] in ("pending", "running"):
                self._polls.setdefault(name, actor.poll.remote())
        for name, (result, error) in _results(self._polls).items():
            if error is None:
                code, said = result
                self._states[name] = ("running" if code is None else "ended", code, said)
            elif isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                self._states[name] = ("dead", None, _why(error))

    def _groups(self) -> dict[str, tuple[str, str, dict[str, float]]]:
        prefix, found = f"{self._namespace}/", {}
        for entry in placement_group_table().values():
            if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
                node = entry["bundles_to_node_id"].get(0) or ""
                name = entry["name"].removeprefix(prefix)
                placed = node if entry["state"] == "CREATED" else ""
                why = entry["stats"].get("scheduling_state", "")
                found[name] = (placed, why, entry["bundles"].get(0, {}))
        return found

    def _group(self, name: str) -> Any:
        if name not in self._groups():
            return None
        with suppress(ValueError):
            return get_placement_group(f"{self._namespace}/{name}")
        return None


def _on(node: str, function: Any) -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(function).options(label_selector={NODE_ID: node})


def _results(running: dict[str, Any]) -> dict[str, tuple[Any, Exception | None]]:
    """Remove tasks that have ended, and return their results or errors."""
    found: dict[str, tuple[Any, Exception | None]] = {}
    for name, task in list(running.items()):
        try:
            found[name] = ray.get(task, timeout=0), None
        except GetTimeoutError:
            continue
        except RayError as error:
            found[name] = None, error
        del running[name]
    return found


def _why(error: Exception) -> str:
    text = str(error)
    found = _DEATH.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return found[0] if found else (lines or [type(error).__name__])[-1]


def main(descriptor: str, address: str, namespace: str) -> None:
    """Answer the engine until it ends."""

    def end_with_engine() -> None:
        sys.stdin.buffer.read()
        os._exit(0)  # perhaps in a call that does not return

    threading.Thread(target=end_with_engine, daemon=True).start()
    connection = Connection(int(descriptor))
    try:
        ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except Exception as error:  # whatever is wrong, in Ray's own words
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        return
    driver, done = Driver(namespace), 0
    while True:
        method, *arguments = connection.recv()
        if method == "quit":
            return
        try:
            answer = getattr(driver, method)(*arguments)
        except (RayError, ValueError) as error:  # the engine asks again, as nothing has changed
            sys.stderr.write(f"{method}{arguments[:2]}: {error}\n")
            answer = None
        done += 1
        if method == "look":
            connection.send(("look", done, answer))


if __name__ == "__main__":
    with suppress(EOFError, KeyboardInterrupt):
        main(*sys.argv[1:])
