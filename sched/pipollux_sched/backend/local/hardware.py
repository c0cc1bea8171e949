"""Detect the devices of this machine without importing torch."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from pipollux_sched.backend.base import BackendError, Node
from pipollux_sched.spec.job import ClusterSpec, NodeSpec

__all__ = ["check_gpus", "count_cpus", "count_gpus", "node_name", "this_machine", "visible_gpus"]

TIMEOUT = 10.0
"""Timeout in seconds of NVIDIA's tools."""
TORCH_TIMEOUT = 120.0
"""Timeout in seconds of torch: its import alone is slow from a cold disk."""
CGROUP = Path("/sys/fs/cgroup")
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""At least one of these exists on machines with a GPU of NVIDIA or AMD."""


def this_machine() -> ClusterSpec:
    """Describe this machine as a cluster: one node with a slot for each GPU, else for each CPU.

    Example:
        >>> this_machine().nodes[0].slots >= 1
        True
    """
    gpus, cpus = count_gpus(), count_cpus()
    node = NodeSpec(
        name=node_name(socket.gethostname()),
        slots=gpus or cpus,
        kind="gpu" if gpus else "cpu",
        cpus=cpus,
        memory=_memory(),
    )
    return ClusterSpec(nodes=(node,))


def node_name(host: str) -> str:
    """Return a node name for a host name: ``gpu-box`` for ``GPU_Box.example.com``."""
    name = re.sub(r"[^a-z0-9]+", "-", host.partition(".")[0].lower())[:50].strip("-")
    return name if name[:1].isalpha() else f"node-{name}".strip("-")


def count_cpus() -> int:
    """Return the number of CPUs that child processes may use, by affinity and by cgroup."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _limit("cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        allowed = min(allowed, int(quota) // int(period))
    return max(allowed, 1)


def _memory() -> int:
    there, most = psutil.virtual_memory().total, _limit("memory.max")
    return min(there, int(most)) if most.isdecimal() else there


def _limit(name: str) -> str:
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return ""


def count_gpus() -> int:
    """Return the number of GPUs that child processes may use; 0 if it is unknown.

    ``CUDA_VISIBLE_DEVICES`` is respected. NVIDIA's tools count them; if these are not installed
    although there is a GPU, torch does, in a separate process.
    """
    there = _installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else len(visible_gpus(visible, there))


def visible_gpus(value: str, installed: int | None = None) -> list[str]:
    """Return the GPUs that a value of ``CUDA_VISIBLE_DEVICES`` selects, by CUDA's rules.

    The list ends at the first invalid entry, and a repeated entry makes it empty. Entries are
    indices (below `installed`), or identifiers that begin with ``GPU-`` or ``MIG-``.

    Example:
        >>> visible_gpus("2,0,-1,1"), visible_gpus("0,0"), visible_gpus("none")
        (['2', '0'], [], [])
    """
    found: list[str] = []
    kind = next((kind for kind in ("GPU-", "MIG-") if value.strip().startswith(kind)), "")
    for entry in map(str.strip, value.split(",")):
        if kind and not entry.startswith(kind):
            break
        name = entry if kind else (re.match(r"\d*", entry) or [""])[0]
        if not name or (not kind and installed is not None and int(name) >= installed):
            break
        name = name if kind else str(int(name))
        if name in found:
            return []
        found.append(name)
    return found if installed is None or installed > 0 else []


def _installed_gpus() -> int:
    program = shutil.which("nvidia-smi")
    if program is not None:
        listed = _run([program, "--list-gpus"], TIMEOUT)
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    return _ask_torch() if any(path.exists() for path in _DEVICE_FILES) else 0


def _ask_torch() -> int:
    # In this process torch would keep hundreds of megabytes and a context on each GPU for months.
    code = "import torch; print(torch.cuda.device_count())"
    everything = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    counted = _run([sys.executable, "-c", code], TORCH_TIMEOUT, everything).strip()
    return int(counted) if counted.isdecimal() else 0


def _run(
    command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None
) -> str:
    """Return the output of a command, empty if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def check_gpus(nodes: Mapping[str, Node]) -> None:
    """Reject GPU nodes with more GPUs than this machine has: every job on them would fail."""
    wanted = sum(node.slots for node in nodes.values() if node.spec.kind == "gpu")
    there = count_gpus() if wanted else 0
    if wanted > there:
        names = ", ".join(name for name, node in nodes.items() if node.spec.kind == "gpu")
        raise BackendError(
            f"the nodes {names} have {wanted} slots of kind gpu together, and this machine has "
            f"{there} GPUs that may be used; give them fewer slots, or kind: cpu"
        )
