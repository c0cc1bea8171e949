"""Torch's backends that are NCCL.

Groups of torch's ``ProcessGroupNCCL`` have a communicator for each device of a process, which a
process with stages on several GPUs needs. From torch 2.15 on, the name ``nccl`` stands for another
class, whose groups send tensors of one device: by default that of the process's local rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

import torch
import torch.distributed as dist

from pipollux_hybrid.errors import ConfigurationError

_CUDA = torch.device("cuda")


def name_for_several_devices() -> str:
    """Return torch's name of ``ProcessGroupNCCL``."""
    others = {found.name for found in entry_points(group="torch.distributed.backends")}
    return "nccl-legacy" if "nccl-legacy" in others else "nccl"


def sends_cuda(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether a group, by default torch's, sends tensors on CUDA devices by NCCL."""
    return "cuda:nccl" in dist.get_backend_config(group)  # the first letters of all its names


def check_devices(devices: Sequence[torch.device]) -> None:
    """Raise a ConfigurationError if this process has stages on devices of which torch's default
    group, which the script made, cannot send tensors.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not sends_cuda():
        return
    bound = _only_device(dist.distributed_c10d._get_default_group())
    if bound is not None and any(x.type == "cuda" and _numbered(x) != bound for x in devices):
        raise ConfigurationError(
            f"torch.distributed was initialized with {dist.get_backend()!r}, which in torch "
            f"{torch.__version__} sends tensors of one device of each process, {bound} here, and "
            f"this process has stages on {', '.join(map(str, devices))}: call "
            "pipollux.init_process_group() instead of torch's"
        )


def _only_device(group: dist.ProcessGroup) -> torch.device | None:
    """Return the device of which a group sends tensors; None: it is not limited to one."""
    names = ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
    classes = tuple(getattr(dist, name) for name in names if hasattr(dist, name))
    return group.bound_device_id if isinstance(group._get_backend(_CUDA), classes) else None


def _numbered(device: torch.device) -> torch.device:
    return device if device.index is not None else torch.device(torch.cuda.current_device())
