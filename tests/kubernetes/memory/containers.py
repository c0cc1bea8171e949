"""Containers of the cluster in memory: processes of this machine, and what they print."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from .answers import Object
from .store import now

MARK = "PIPOLLUX_TEST_POD"
"""Environment variable by which the processes of a pod are known, whoever their parent is."""
_MESSAGE_LIMIT = 4096
"""Bytes of a termination message."""
_SHARED = ("/dev/shm", "/tmp")  # there already, and the same for all


class ConfigError(Exception):
    """A container cannot be made as its pod says; the reason is the one of the kubelet."""


class Container:
    """A process that runs as a container would, as far as its pod can see.

    It is no container: it sees the files and the network of this machine. Volumes are folders, and
    their paths in the command and in the environment are rewritten to those. Like a container's
    first process it gets SIGTERM only if it handles it, and takes all others along when it ends.

    Args:
        spec: of the container.
        argv: what to run.
        environment: of the process, complete.
        log: the file for what it prints.
        mark: of its pod.
        ended: called when it has ended.
        last_words: the file of its termination message.
    """

    def __init__(
        self,
        spec: Object,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        mark: str,
        ended: Callable[[], None],
        last_words: Path,
    ) -> None:
        self.spec, self.log, self._mark, self._ended = spec, log, mark, ended
        self._last_words = last_words
        self.started_at, self.finished_at = now(), ""
        self.exit_code: int | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self._process = subprocess.Popen(
            argv,
            env={**environment, MARK: mark},
            cwd=spec.get("workingDir") or "/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._keep_output)
        self._pump.start()
        self._waiter = threading.Thread(target=self._wait)
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Of its first process."""
        return self._process.pid

    def _keep_output(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self.log.open("ab", buffering=0) as file, self._process.stdout as stream:
            while chunk := os.read(stream.fileno(), 65536):
                *lines, rest = (rest + chunk).split(b"\n")
                stamp = _stamp()
                file.write(b"".join(stamp + b" F " + line + b"\n" for line in lines))
            if rest:
                file.write(_stamp() + b" P " + rest + b"\n")

    def _wait(self) -> None:
        code = self._process.wait()
        kill_marked(self._mark, self.spec["name"])
        self._pump.join()
        self.finished_at = now()
        self.exit_code = code if code >= 0 else 128 - code
        self._ended()

    def terminate(self) -> None:
        """Send SIGTERM, if the process handles it: else nothing reaches a first process."""
        if _handles(self.pid, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def join(self) -> None:
        """Wait until it has ended and all that it has printed is kept."""
        self._waiter.join()

    def state(self) -> Object:
        """Return what the status of the pod says of it."""
        if self.exit_code is None:
            return {"running": {"startedAt": self.started_at}}
        ended: Object = {
            "containerID": f"memory://{self._mark}-{self.pid}",
            "exitCode": self.exit_code,
            "finishedAt": self.finished_at,
            "reason": "Error" if self.exit_code else "Completed",
            "startedAt": self.started_at,
        }
        if message := self._last_words.read_bytes()[:_MESSAGE_LIMIT]:
            ended["message"] = message.decode(errors="replace")
        elif self.exit_code and self.spec["terminationMessagePolicy"] == "FallbackToLogsOnError":
            lines = [text for _, text in records(self.log)][-80:]
            ended["message"] = b"".join(lines)[-2048:].decode(errors="replace")
        return {"terminated": ended}


def _stamp() -> bytes:
    nanoseconds = time.time_ns()
    day = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(nanoseconds // 10**9))
    return f"{day}.{nanoseconds % 10**9:09d}Z".encode()


def time_before(seconds: int) -> str:
    """Return the time so many seconds ago, as it stands before the lines of a log."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - seconds))


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; so does what has not yet become itself."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


def kill_marked(mark: str, container: str | None = None) -> None:
    """Kill every process of a pod, or of one of its containers."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(MARK) == mark and container in (
                None,
                environment.get("PIPOLLUX_TEST_CONTAINER"),
            ):
                process.kill()
        except psutil.Error:
            continue


def records(log: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the time and the text of each line of a log."""
    with contextlib.suppress(FileNotFoundError):
        for line in log.read_bytes().splitlines(keepends=True):
            stamp, kind, text = line.split(b" ", 2)
            yield stamp, text if kind == b"F" else text.removesuffix(b"\n")


def substituted(text: str, paths: Mapping[str, str]) -> str:
    """Return a text with the paths of mounted volumes rewritten to the folders that they are."""
    for path in sorted(paths, key=len, reverse=True):
        folder = paths[path].replace("\\", r"\\")
        text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])", folder, text)
    return text


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with each ``$(NAME)`` replaced by a variable; ``$$`` is a dollar sign."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)", value, text)


def volume_folders(
    pod: Object, container: Object, folder: Path, contents: Callable[[str, str], Object | None]
) -> dict[str, str]:
    """Return the folder of each volume that a container mounts elsewhere than where it lies.

    Args:
        pod: the pod.
        container: one of its containers.
        folder: where folders may be made.
        contents: returns a ConfigMap or Secret by kind and name.

    Raises:
        ConfigError: a volume is of a kind that cannot be had here, or is not there.
    """
    metadata, found = pod["metadata"], {}
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    for mount in container.get("volumeMounts", []):
        volume, path = volumes[mount["name"]], mount["mountPath"].rstrip("/")
        if "hostPath" in volume:
            source = Path(volume["hostPath"]["path"])
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            source = folder / "claims" / metadata["namespace"] / claim
        elif "emptyDir" in volume:
            if path in _SHARED:
                continue
            source = folder / "pods" / metadata["uid"] / volume["name"]
        elif "configMap" in volume or "secret" in volume:
            source = folder / "pods" / metadata["uid"] / volume["name"]
            _write_files(volume, source, contents)
        else:
            raise ConfigError(f"no such volumes here: {sorted(set(volume) - {'name'})}")
        if "hostPath" not in volume:
            source.mkdir(parents=True, exist_ok=True)
        source = source / mount["subPath"] if "subPath" in mount else source
        if str(source) != path:
            found[path] = str(source)
    return found


def _write_files(
    volume: Object, source: Path, contents: Callable[[str, str], Object | None]
) -> None:
    secret = "secret" in volume
    name = volume["secret"]["secretName"] if secret else volume["configMap"]["name"]
    thing = contents("secrets" if secret else "configmaps", name)
    if thing is None:
        raise ConfigError(f'{"secret" if secret else "configmap"} "{name}" not found')
    source.mkdir(parents=True, exist_ok=True)
    for key, value in thing.get("data", {}).items():
        (source / key).write_bytes(base64.b64decode(value) if secret else value.encode())


def variables_of(
    pod: Object, container: Object, node: Object, contents: Callable[[str, str], Object | None]
) -> dict[str, str]:
    """Return the environment that a container's spec asks for.

    Raises:
        ConfigError: it names something that is not there.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        kind, key = (
            ("secrets", "secretRef") if "secretRef" in source else ("configmaps", "configMapRef")
        )
        thing = contents(kind, source[key]["name"])
        if thing is None:
            raise ConfigError(
                f'{key.removesuffix("Ref").lower()} "{source[key]["name"]}" not found'
            )
        found |= {k: _value(kind, v) for k, v in thing.get("data", {}).items()}
    for variable in container.get("env", []):
        if "valueFrom" not in variable:
            found[variable["name"]] = expanded(variable.get("value", ""), found)
            continue
        source = variable["valueFrom"]
        if "fieldRef" in source:
            found[variable["name"]] = _field(pod, source["fieldRef"]["fieldPath"])
        elif "resourceFieldRef" in source:
            raise ConfigError("resourceFieldRef is not to be had here")
        else:
            secret = "secretKeyRef" in source
            kind = "secrets" if secret else "configmaps"
            wanted = source["secretKeyRef" if secret else "configMapKeyRef"]
            thing = contents(kind, wanted["name"])
            if thing is not None and wanted["key"] in thing.get("data", {}):
                found[variable["name"]] = _value(kind, thing["data"][wanted["key"]])
            elif not wanted.get("optional"):
                word = "secret" if secret else "configmap"
                raise ConfigError(f'{word} "{wanted["name"]}" not found')
    return found


def _value(kind: str, value: str) -> str:
    return base64.b64decode(value).decode() if kind == "secrets" else value


def _field(pod: Object, path: str) -> str:
    if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path):
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    value: Any = pod
    for step in path.split("."):
        value = (value or {}).get(step, "")
    return str(value)
