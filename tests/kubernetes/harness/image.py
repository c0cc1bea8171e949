"""The image of containers in tests: all of it is this machine's own, mounted from outside.

The image has only what an empty root folder needs. Every container also gets the machine's `/usr`,
the Python that runs the tests with its packages, and this checkout, read-only at the same paths as
outside. So what tests can do, containers can do, torch included, and nothing is copied.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster import IMAGE

PAUSE = "docker.io/pipollux/pause:1"
REPOSITORY = Path(__file__).resolve().parents[3]
_FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var", "var/tmp")
_USR = ("bin", "sbin", "lib", "lib32", "lib64")
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
# What of /etc programs of /usr look for.
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ssl", "alternatives", "localtime")


def write_images(folder: Path, busybox: Path) -> list[Path]:
    """Write the images as archives that containerd imports, and return their paths.

    Args:
        folder: for them.
        busybox: a program that needs no libraries, for the container that holds a pod's network.
    """
    folder.mkdir(parents=True, exist_ok=True)
    search = os.pathsep.join(
        [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    )
    packages = [REPOSITORY, *(REPOSITORY / name for name in ("hybrid", "perfmodel", "sched"))]
    environment = {
        "PATH": search,
        "PYTHONPATH": os.pathsep.join(map(str, packages)),
        "OMP_NUM_THREADS": "1",
    }
    pause = folder / "pause.tar"
    _write(pause, PAUSE, _layer(busybox), ["/busybox", "sleep", str(10**6)], {})
    test = folder / "test.tar"
    _write(test, IMAGE, _layer(), ["python"], environment)
    return [pause, test]


def runtime_spec(ctr: Path, path: Path) -> None:
    """Write what every container gets: the usual, and the mounts from outside."""
    usual = subprocess.run([ctr, "oci", "spec"], capture_output=True, check=True).stdout
    spec: dict[str, Any] = json.loads(usual)
    places = [Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), REPOSITORY]
    places += [Path("/etc") / name for name in _SETTINGS]
    shown: list[Path] = []
    for place in places:
        inside = any(place.is_relative_to(other) for other in shown)
        if place.exists() and not inside:
            shown.append(place)
    for place in shown:
        options = ["rbind", "ro"]
        mount = {"destination": str(place), "type": "bind", "source": str(place)}
        spec["mounts"].append({**mount, "options": options})
    path.write_text(json.dumps(spec))


def _layer(*programs: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            archive.addfile(entry)
        for name in _USR:
            outside = Path("/") / name
            if outside.is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(outside)
                archive.addfile(entry)
        files = {name: (text.encode(), 0o644) for name, text in _FILES.items()}
        files |= {program.name: (program.read_bytes(), 0o755) for program in programs}
        for name, (data, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _write(
    path: Path, name: str, layer: bytes, command: list[str], environment: dict[str, str]
) -> None:
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": command, "Env": [f"{k}={v}" for k, v in environment.items()]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_digest(layer)}"]},
            "history": [{"created_by": "tests"}],
        }
    ).encode()
    manifest = [{"Config": f"{_digest(config)}.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {
        "manifest.json": json.dumps(manifest).encode(),
        f"{_digest(config)}.json": config,
        "layer.tar": layer,
    }
    with tarfile.open(path, "w") as archive:
        for inner, data in files.items():
            entry = tarfile.TarInfo(inner)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
