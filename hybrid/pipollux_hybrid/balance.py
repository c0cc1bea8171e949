"""Where to cut the layers into stages, and which devices the stages get."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipollux_perfmodel import partition

from .context import JobContext
from .env import JobEnvironment
from .errors import ConfigurationError

__all__ = ["choose_balance", "choose_devices", "layer_times"]

Tensors = Tensor | tuple[Tensor, ...]
REPETITIONS = 7


def choose_balance(
    ctx: JobContext,
    module: nn.Sequential,
    num_stages: int | None,
    balance: Sequence[int] | None,
    sample: Tensors | None,
) -> list[int]:
    """Number of layers of each stage, the same on all replicas.

    Given by the user, or cut so that the slowest stage is as fast as a contiguous cut allows
    (:func:`pipollux_perfmodel.partition`), by the times of the layers on ``sample`` or else by
    their parameters.

    Raises:
        ConfigurationError: The wishes contradict each other or the number of layers.
    """
    default = len(balance) if balance is not None else 1
    wanted = ctx.env.num_stages or (default if num_stages is None else num_stages)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise ConfigurationError(f"num_stages={wanted!r}: a whole number of at least 1 is needed")
    if balance is not None:
        return _checked(list(balance), wanted, len(module))
    if wanted > len(module):
        raise ConfigurationError(
            f"num_stages={wanted}: the module has only {len(module)} layers, and each stage needs "
            "one; ask for fewer stages or cut the module into more layers"
        )
    costs = layer_times(module, sample) if sample is not None else _sizes(module)
    # Times differ from replica to replica; rank 0's count.
    agreed = ctx.control.gather(torch.tensor(partition(costs, wanted)))[0]
    return [int(count) for count in agreed]


def choose_devices(
    env: JobEnvironment, num_stages: int, devices: Sequence[torch.device | str] | None
) -> list[torch.device]:
    """One device per stage.

    Raises:
        ConfigurationError: There are fewer devices than stages.
    """
    if devices is not None:
        chosen = [torch.device(device) for device in devices]
        source = "devices"
    elif env.devices:
        chosen = [torch.device(device) for device in env.devices]
        source = "PIPOLLUX_DEVICES"
    elif torch.cuda.is_available():
        first = env.local_rank * num_stages
        count = torch.cuda.device_count()
        chosen = [torch.device("cuda", k) for k in range(first, min(first + num_stages, count))]
        source = f"the {count} CUDA devices of this node (LOCAL_RANK={env.local_rank})"
    else:
        return [torch.device("cpu")] * num_stages
    if len(chosen) < num_stages:
        raise ConfigurationError(
            f"{num_stages} stages need {num_stages} devices, {source} give {len(chosen)}: ask for "
            "fewer stages, or for fewer replicas on this node"
        )
    return chosen[:num_stages]


def layer_times(module: nn.Sequential, sample: Tensors) -> list[float]:
    """Seconds of each layer's forward and backward on a batch: the least of a few runs.

    The least, as whatever else runs on the machine can only add to the time of a layer.
    Works on copies, so that neither gradients nor running statistics change.
    """
    times = []
    batch = sample
    for layer in module:
        worker = copy.deepcopy(layer)
        runs = []
        for _ in range(REPETITIONS):
            seconds, output = _time_once(worker, batch)
            runs.append(seconds)
        times.append(min(runs))
        batch = output
    return times


def _time_once(layer: nn.Module, batch: Tensors) -> tuple[float, Tensors]:
    inputs = _map(batch, lambda x: x.detach().requires_grad_(x.is_floating_point()))
    started = time.perf_counter()
    output = layer(inputs)
    tensors = [x for x in (output if isinstance(output, tuple) else (output,)) if x.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(x) for x in tensors])
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - started, _map(output, Tensor.detach)


def _map(batch: Tensors, function: object) -> Tensors:
    assert callable(function)  # noqa: S101  # both callers pass one
    if isinstance(batch, tuple):
        return tuple(function(x) for x in batch)
    result: Tensor = function(batch)
    return result


def _sizes(module: nn.Sequential) -> list[float]:
    """Parameters of each layer; one more, so that layers without any still spread."""
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in module]


def _checked(balance: list[int], num_stages: int, num_layers: int) -> list[int]:
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in balance):
        raise ConfigurationError(f"balance={balance}: each stage needs at least one layer")
    if sum(balance) != num_layers:
        raise ConfigurationError(
            f"balance={balance} covers {sum(balance)} layers, the module has {num_layers}"
        )
    if len(balance) != num_stages:
        raise ConfigurationError(
            f"balance={balance} makes {len(balance)} stages, but {num_stages} were asked for "
            "(num_stages, or PIPOLLUX_NUM_STAGES from the scheduler): leave balance out to have it "
            "chosen"
        )
    return balance
