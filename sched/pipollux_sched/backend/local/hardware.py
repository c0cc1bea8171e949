"""Detect the devices of this machine without importing torch."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import psutil

from pipollux_sched.backend.base import BackendError
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec

from .gpus.probe import NO_PACKAGE
from .gpus.probe_process import GpuProbe
from .gpus.state import GpuReading, GpuState, MigSlice
from .gpus.visible import entry_kind, index_of, select

_LOG = logging.getLogger(__name__)
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_NOT_ASKED = (9, 12, NO_PACKAGE)
"""NVML's errors DRIVER_NOT_LOADED and LIBRARY_NOT_FOUND, and where there is no NVML."""
TIMEOUT = 10.0
"""Timeout in seconds of NVIDIA's tools."""
TORCH_TIMEOUT = 120.0
"""Timeout in seconds of torch: its import alone is slow from a cold disk."""
CGROUP = Path("/sys/fs/cgroup")
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""The first one exists on machines with a GPU of NVIDIA, the second one with one of AMD."""


def this_machine(cpu_slots: int = 0) -> ClusterSpec:
    """Describe this machine as a cluster: one node with a slot for each GPU, else for each CPU.

    MIG slices are slots, too, of a node of their own if there are also GPUs that are not in MIG
    mode. `cpu_slots`: see `NodeSpec`.

    `BackendError`: there are GPUs, but the driver does not list them; or there are `cpu_slots` and
    no GPUs, or too few CPUs.

    Example:
        >>> this_machine().nodes[0].slots >= 1
        True
    """
    cpus, memory = count_cpus(), _memory()
    name = node_name(socket.gethostname())
    inventory = Inventory() if _nothing_visible() else find_gpus()
    if inventory.error:
        raise BackendError(
            "this machine has NVIDIA GPUs, but their driver does not list them: "
            f"{inventory.error}; repair it, or set {VISIBLE} to an empty text to use the CPUs"
        )
    usable = usable_gpus(inventory)
    if not usable and cpu_slots:
        raise BackendError(
            f"{cpu_slots} CPU slots cannot lie beside GPUs: this machine has none that may be "
            "used, and each of its CPUs is a slot already"
        )
    if cpu_slots >= cpus:
        raise BackendError(
            f"{cpu_slots} CPU slots leave none of {cpus} CPUs to jobs on the GPUs; ask for fewer"
        )
    if not usable:
        return ClusterSpec(
            nodes=(NodeSpec(name=name, slots=cpus, kind="cpu", cpus=cpus, memory=memory),)
        )
    slices = sum(map(is_slice, usable))
    parts = {name: len(usable) - slices, f"{name}-mig" if slices < len(usable) else name: slices}
    parts = {part: slots for part, slots in parts.items() if slots}
    rest = cpus - cpu_slots, memory * (cpus - cpu_slots) // cpus
    beside = cpu_slots, memory - rest[1]  # of the first node
    nodes = []
    for part, slots in parts.items():
        cpus_of, memory_of = (max(amount * slots // len(usable), 1) for amount in rest)
        nodes.append(
            NodeSpec(
                name=part,
                slots=slots,
                cpus=cpus_of + beside[0],
                memory=memory_of + beside[1],
                cpu_slots=beside[0],
            )
        )
        beside = 0, 0
    return ClusterSpec(nodes=tuple(nodes))


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


@dataclass(frozen=True)
class Inventory:
    """The GPUs of this machine, in the order of their indices."""

    gpus: tuple[GpuState, ...] = ()
    in_pci_order: bool = True
    """Whether indices follow PCI bus ids; else they are CUDA's own."""
    reading: GpuReading | None = None
    """The reading of the driver that it is from; None: other tools found the GPUs."""

    @property
    def error(self) -> str:
        """Why the driver, which is there, does not list its GPUs; empty: it does."""
        return "" if self.reading is None else self.reading.error


def find_gpus(probe: GpuProbe | None = None) -> Inventory:
    """Return the GPUs of this machine, whoever may use them.

    NVIDIA's driver lists them, through the package nvidia-ml-py. Without either, NVIDIA's tools do;
    if these are not installed although there is a GPU, torch counts them, in a separate process.

    Args:
        probe: asks the driver; None: one that is closed afterwards.
    """
    why = "the package nvidia-ml-py is missing; install it with: pip install 'pipollux[gpu]'"
    if find_spec("pynvml") is not None:
        asked = probe or GpuProbe()
        try:
            reading = asked.read()
        finally:
            if probe is None:
                asked.close()
        if reading.code not in _NOT_ASKED:
            return Inventory(reading.gpus, reading=reading)
        why = f"their driver cannot be asked ({reading.error})"
    if _DEVICE_FILES[0].exists():
        _LOG.warning("this machine has NVIDIA GPUs, and %s; their health and use are unknown", why)
    program = shutil.which("nvidia-smi")
    if program is not None:
        return Inventory(_listed(_run([program, "--list-gpus"], TIMEOUT)))
    count = _ask_torch() if any(path.exists() for path in _DEVICE_FILES) else 0
    gpus = tuple(GpuState(index=index, uuid=str(index)) for index in range(count))
    return Inventory(gpus, in_pci_order=False)


def _listed(output: str) -> tuple[GpuState, ...]:
    """Return the GPUs in the output of `nvidia-smi --list-gpus`; without a UUID, by index."""
    found: list[GpuState] = []
    for line in output.splitlines():
        uuid = (re.findall(r"\(UUID: ([^)]+)\)", line) or [""])[0]
        if line.startswith("GPU "):
            name = line.partition(": ")[2].partition(" (UUID")[0]
            found.append(GpuState(index=len(found), uuid=uuid or str(len(found)), name=name))
        elif line.strip().startswith("MIG ") and found and uuid:
            slices = (*found[-1].slices, MigSlice(uuid=uuid))
            found[-1] = replace(found[-1], mig=True, slices=slices)
    return tuple(found)


def count_gpus() -> int:
    """Return the number of GPUs and MIG slices that child processes may use; 0 if it is unknown.

    `CUDA_VISIBLE_DEVICES` is respected.
    """
    return 0 if _nothing_visible() else len(usable_gpus(find_gpus()))


def usable_gpus(inventory: Inventory) -> list[str]:
    """Return the UUIDs of GPUs and MIG slices that child processes may use, GPUs first.

    These are what `CUDA_VISIBLE_DEVICES` selects: see `gpus.visible`. GPUs without a known UUID are
    named by their indices, or by the unchecked entries of that variable. `BackendError`: its
    indices have no certain meaning.
    """
    value = os.environ.get(VISIBLE)
    gpus = inventory.gpus
    if value is not None and entry_kind(value) and gpus and all(g.uuid.isdecimal() for g in gpus):
        kind, entries = entry_kind(value), [entry.strip() for entry in value.split(",")]
        valid = list(takewhile(lambda entry: entry.startswith(kind), entries))
        return valid if len(set(valid)) == len(valid) else []
    found = select(value, gpus)
    _check_order(value, found, inventory)
    return sorted(found, key=is_slice)


def is_slice(uuid: str) -> bool:
    """Return whether a UUID is that of a MIG slice."""
    return uuid.startswith("MIG-")


def _check_order(value: str | None, found: Sequence[str], inventory: Inventory) -> None:
    """Refuse indices that CUDA, by default, counts from the fastest GPU on.

    Which of several types it takes to be faster is CUDA's secret, and indices of all are harmless.
    """
    if value is None or entry_kind(value) or os.environ.get(ORDER) == "PCI_BUS_ID":
        return
    types = sorted({gpu.name for gpu in inventory.gpus})
    if (
        inventory.in_pci_order
        and len(types) > 1
        and 0 < len(found) < len(select(None, inventory.gpus))
    ):
        raise BackendError(
            f"{VISIBLE}={value}: it is unclear which GPUs are meant, as there are several types "
            f"({', '.join(types)}), which CUDA sorts by speed; set {ORDER}=PCI_BUS_ID, or name "
            "the GPUs by their UUIDs, which `nvidia-smi --list-gpus` prints"
        )


def _nothing_visible() -> bool:
    """Return whether `CUDA_VISIBLE_DEVICES` hides every GPU, whatever there is."""
    value = os.environ.get(VISIBLE)
    if value is None or entry_kind(value):
        return False
    return index_of(value.split(",")[0].strip()) is None


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
