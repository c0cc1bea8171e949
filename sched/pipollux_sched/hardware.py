"""What devices this machine has, found out without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from pipollux_sched.backend import BackendError, Node

__all__ = ["check_gpus", "count_gpus"]

TIMEOUT = 10.0


def count_gpus() -> int:
    """Number of NVIDIA GPUs that processes started from here may use.

    ``CUDA_VISIBLE_DEVICES`` is respected. Without NVIDIA's tools, or when they do not answer within
    ten seconds, there are none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listed = subprocess.run(
            [program, "--list-gpus"], capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


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
