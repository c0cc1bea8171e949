"""Checks of a job's interpreter and module, in a process of that interpreter.

Nothing of the job is imported: packages are found as `import` finds them, without running them.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from typing import Any, NamedTuple

from pipollux_sched.backend.run_as import why_not_as
from pipollux_sched.spec.job import JobSpec, SpecError

_PATIENCE = 60.0
"""Timeout in seconds: an interpreter may be on a network."""
_KEPT = 60.0
"""Seconds for which a result counts: thousands of trials have the same program."""
_PROBE = """
import importlib.metadata, importlib.util, json, sys
folder, module = sys.argv[1:]
sys.path[0] = folder
needed = ("torch", "pydantic", "httpx", "pipollux_agent", "pipollux_protocol")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
try:
    version = importlib.metadata.version("pipollux")
except importlib.metadata.PackageNotFoundError:
    version = None

def find(name, path):
    for finder in sys.meta_path:
        spec = getattr(finder, "find_spec", lambda *_: None)(name, path)
        if spec is not None:
            return spec

name, path, where = "", None, None
for part in module.split(".") if module else ():
    name = f"{name}.{part}" if name else part
    spec = find(name, path) if path is not None or "." not in name else None
    if spec is None:
        where = f"there is no module '{name}'"
        break
    path = spec.submodule_search_locations
else:
    if module and path is not None and find(f"{module}.__main__", path) is None:
        where = f"'{module}' is a package without a module '__main__'"
print(json.dumps({"version": version, "missing": missing, "module": where}))
"""


class _Asked(NamedTuple):
    """What the answer depends on."""

    python: str
    folder: str
    module: str
    path: str
    user: str | None


_lock = threading.Lock()
_known: dict[_Asked, tuple[float, dict[str, Any] | str]] = {}


def check_program(spec: JobSpec) -> None:
    """Refuse a resolved job whose interpreter lacks Pipollux, or whose module cannot be found.

    Raises:
        SpecError: that is so, or the interpreter cannot be run.
    """
    if spec.image is not None or (spec.python is None and spec.module is None):
        return
    if spec.run_as is not None and why_not_as(spec.run_as) is not None:
        return  # the backend refuses that user
    asked = _Asked(
        spec.python or sys.executable,
        spec.working_dir or "/",
        spec.module or "",
        spec.environment.get("PYTHONPATH", ""),
        spec.run_as,
    )
    found = _ask(asked)
    if isinstance(found, str):
        raise SpecError(f"job '{spec.name}': python: {asked.python} cannot be used: {found}")
    if spec.python is not None:
        _check_packages(spec, found)
    if found["module"] is not None:
        raise SpecError(
            f"job '{spec.name}': module: {found['module']} in {asked.folder} or among the packages "
            f"of {asked.python}; check the name, or set working_dir or PYTHONPATH in environment"
        )


def _check_packages(spec: JobSpec, found: dict[str, Any]) -> None:
    here, there = version("pipollux"), found["version"]
    where = f"job '{spec.name}': python: {spec.python}"
    if found["missing"] or there is None:
        lacks = ", ".join(found["missing"]) or "pipollux"
        raise SpecError(
            f"{where} lacks {lacks}; install Pipollux there, with: {spec.python} -m pip install "
            f"pipollux=={here}"
        )
    if there != here:
        raise SpecError(
            f"{where} has Pipollux {there}, and the scheduler has {here}; install the same version "
            f"there, with: {spec.python} -m pip install pipollux=={here}"
        )


def _ask(asked: _Asked) -> dict[str, Any] | str:
    """Return the answer of the interpreter, or why there is none."""
    with _lock:
        now = time.monotonic()
        for key in [key for key, (at, _) in _known.items() if now - at > _KEPT]:
            del _known[key]
        if asked not in _known:
            _known[asked] = now, _run(asked)
        found = _known[asked][1]
        # What is refused may be right a moment later.
        if isinstance(found, str) or found["missing"] or found["module"] is not None:
            del _known[asked]
        return found


def _run(asked: _Asked) -> dict[str, Any] | str:
    options: dict[str, Any] = {}
    if asked.user is not None:
        account = pwd.getpwnam(asked.user)
        groups = os.getgrouplist(asked.user, account.pw_gid)
        options = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups}
    environment = {"PATH": os.environ.get("PATH", "")}
    if asked.path:
        environment["PYTHONPATH"] = asked.path
    try:
        done = subprocess.run(
            [asked.python, "-B", "-c", _PROBE, asked.folder, asked.module],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            **options,
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"it ended with exit status {done.returncode}"
    return found
