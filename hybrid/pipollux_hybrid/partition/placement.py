"""The number of stages, and their devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_protocol.environment import DEVICES

__all__ = ["BALANCE_RULES", "choose_devices", "choose_num_stages", "make_current"]

BALANCE_RULES = ("time", "memory", "parameters")


def find_devices(names: Sequence[torch.device | str], source: str) -> list[torch.device]:
    """Return devices by name in PyTorch's format; ``source`` is where the names are from. Raises a
    ConfigurationError if a device does not exist, or does not support stages.
    """
    return [_find(name, source) for name in names]


def _find(name: torch.device | str, source: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is not None and device.type == "cpu":
        return device
    if device is not None and device.type == "cuda" and (device.index or 0) < count:
        return device
    others = "".join(f", 'cuda:{index}'" for index in range(count))
    hint = (
        "fewer stages or replicas on this node, or other devices"
        if count
        else f"torch {torch.__version__} sees no CUDA device; "
        + (
            "give the job a torch built for CUDA, or its scheduler slots that are CPUs"
            if source == DEVICES.name
            else "leave devices out to train on the CPU"
        )
    )
    raise ConfigurationError(
        f"{source} ask for {str(name)!r}, and stages can run on 'cpu'{others} here: {hint}"
    )


def choose_num_stages(
    env: JobEnvironment,
    num_stages: int | None,
    balance: Sequence[int] | str | None,
    chunks_per_stage: int = 1,
) -> int:
    """Return the scheduler's number of stages, else the script's. Raises a ConfigurationError if
    the number is not a whole number of at least 1, or ``balance`` is invalid.
    """
    default = 1
    if isinstance(balance, str):
        if balance not in BALANCE_RULES:
            allowed = ", ".join(map(repr, BALANCE_RULES))
            raise ConfigurationError(
                f"balance={balance!r}: the number of layers of each stage is allowed, or {allowed}"
            )
    elif balance is not None:
        default = max(len(balance) // chunks_per_stage, 1)
    wanted = env.num_stages or (default if num_stages is None else num_stages)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ConfigurationError(f"num_stages={wanted!r}: a whole number of at least 1 is needed")
    return wanted


def _place(env: JobEnvironment) -> str:
    """Return the position of this replica on its node, in the launcher's terms."""
    if env.processes_per_replica == 1:
        return f"LOCAL_RANK={env.local_rank}"
    first = env.local_rank * env.processes_per_replica
    ranks = f"LOCAL_RANK {first} to {first + env.processes_per_replica - 1}"
    return f"replica {env.local_rank} there, {ranks}"


def choose_devices(
    env: JobEnvironment, num_stages: int, devices: Sequence[torch.device | str] | None
) -> list[torch.device]:
    """Return one device per stage; a ConfigurationError if there are too few, or one is missing."""
    chosen: Sequence[torch.device | str]
    if devices is not None:
        chosen, source = devices, "devices"
    elif env.devices:
        chosen, source = env.devices, DEVICES.name
    elif torch.cuda.is_available():
        first = env.local_rank * num_stages
        count = torch.cuda.device_count()
        chosen = [torch.device("cuda", k) for k in range(first, min(first + num_stages, count))]
        source = f"the {count} CUDA devices of this node ({_place(env)})"
    else:
        return [torch.device("cpu")] * num_stages
    if len(chosen) < num_stages:
        raise ConfigurationError(
            f"{num_stages} stages need {num_stages} devices, {source} give {len(chosen)}: ask for "
            "fewer stages, or for fewer replicas on this node"
        )
    return find_devices(chosen[:num_stages], source)


def make_current(device: torch.device) -> None:
    """Make the device the default of CUDA calls without a device, such as NCCL's, which rejects
    several processes on the node's first GPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
