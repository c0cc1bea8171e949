"""What devices this machine has, found out without importing torch."""

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

from pipollux_sched.backend import BackendError, Node
from pipollux_sched.spec.job import ClusterSpec, NodeSpec

__all__ = ["check_gpus", "count_cpus", "count_gpus", "node_name", "this_machine"]

TIMEOUT = 10.0
"""Seconds that NVIDIA's tools have to answer."""
TORCH_TIMEOUT = 120.0
"""Seconds that torch has: from a cold disk its import alone takes many."""
CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds what it may use of its machine."""
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""At least one of these is there where there is a GPU, of NVIDIA or of AMD."""


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
    """Make the name of a node of the name of a host: ``gpu-box`` of ``GPU_Box.example.com``."""
    name = re.sub(r"[^a-z0-9]+", "-", host.partition(".")[0].lower())[:50].strip("-")
    return name if name[:1].isalpha() else f"node-{name}".strip("-")


def count_cpus() -> int:
    """Number of CPUs that processes started from here may use: by affinity and by cgroup."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _limit("cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        allowed = min(allowed, int(quota) // int(period))
    return max(allowed, 1)


def _memory() -> int:
    """Bytes of main memory that processes started from here may use."""
    there, most = psutil.virtual_memory().total, _limit("memory.max")
    return min(there, int(most)) if most.isdecimal() else there


def _limit(name: str) -> str:
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return ""


def count_gpus() -> int:
    """Number of GPUs that processes started from here may use.

    ``CUDA_VISIBLE_DEVICES`` is respected. NVIDIA's tools are asked; where they are not installed
    although there is a GPU, torch is, in a process of its own. Without an answer there are none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    program = shutil.which("nvidia-smi")
    if program is not None:
        listed = _run([program, "--list-gpus"], TIMEOUT)
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    return _ask_torch() if any(path.exists() for path in _DEVICE_FILES) else 0


def _ask_torch() -> int:
    # Here it would take hundreds of megabytes, and hold a context on each GPU, for months.
    code = "import torch; print(torch.cuda.device_count())"
    counted = _run([sys.executable, "-c", code], TORCH_TIMEOUT).strip()
    return int(counted) if counted.isdecimal() else 0


def _run(command: Sequence[str], timeout: float) -> str:
    """Return what a command prints; nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def check_gpus(nodes: Mapping[str, Node]) -> None:
    """Refuse GPU nodes that this machine has too few GPUs for: every job on them would fail.

    Raises:
        BackendError: says how many are wanted, and how many there are.
    """
    wanted = sum(node.slots for node in nodes.values() if node.kind == "gpu")
    there = count_gpus() if wanted else 0
    if wanted > there:
        names = ", ".join(name for name, node in nodes.items() if node.kind == "gpu")
        raise BackendError(
            f"the nodes {names} have {wanted} slots of kind gpu together, and this machine has "
            f"{there} GPUs that may be used; give them fewer slots, or kind: cpu"
        )
