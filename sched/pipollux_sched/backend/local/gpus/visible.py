"""The GPUs that a value of `CUDA_VISIBLE_DEVICES` selects, by CUDA's rules.

Entries are indices of GPUs; UUIDs of GPUs (`GPU-…`), or beginnings of them that fit one GPU only;
or MIG slices: their UUIDs (`MIG-…`), or `MIG-GPU-…/G/C` with the instances' numbers. All entries
are of the kind of the first one. An entry that is invalid hides itself and all after it, and a GPU
that is named twice hides everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .state import GpuState

_KINDS = ("GPU-", "MIG-")
_INDEX = re.compile(r"[+-]?\d+")
_INSTANCE = re.compile(r"MIG-(GPU-[^/]+)/(\d+)/(\d+)")


def select(value: str | None, gpus: Sequence[GpuState]) -> list[str]:
    """Return the UUIDs of the selected GPUs and slices, in order; None: all.

    A GPU in MIG mode stands for its slices. `gpus` are in the order of their indices.

    Example:
        >>> gpus = [GpuState(index=0, uuid="GPU-1a"), GpuState(index=1, uuid="GPU-1b")]
        >>> select("1,0,-1", gpus), select("GPU-1b", gpus), select("GPU-1", gpus)
        (['GPU-1b', 'GPU-1a'], ['GPU-1b'], [])
    """
    if value is None:
        return [uuid for gpu in gpus for uuid in _devices_of(gpu)]
    kind = entry_kind(value)
    found: list[str] = []
    for entry in map(str.strip, value.split(",")):
        named = _named(kind, entry, gpus)
        if named is None:
            break
        if not set(named).isdisjoint(found):
            return []
        found += named
    return found


def _devices_of(gpu: GpuState) -> list[str]:
    # A broken GPU may not even tell its UUID.
    return [uuid for uuid, _ in gpu.devices() if uuid]


def entry_kind(value: str) -> str:
    """Return the kind of all entries, `GPU-` or `MIG-`; empty: indices."""
    return next((kind for kind in _KINDS if value.strip().startswith(kind)), "")


def index_of(entry: str) -> int | None:
    """Return the index in an entry, as C's `strtoul` reads it: `1gpu` is 1; None: it has none."""
    number = _INDEX.match(entry)
    return int(number[0]) if number and int(number[0]) >= 0 else None


def _named(kind: str, entry: str, gpus: Sequence[GpuState]) -> list[str] | None:
    """Return the devices that an entry names; None: it is invalid."""
    if not kind:
        index = index_of(entry)
        fits = [gpu for gpu in gpus if gpu.index == index]
    elif not entry.startswith(kind):
        return None
    elif kind == "MIG-":
        return _slice(entry, gpus)
    else:
        fits = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    return _devices_of(fits[0]) if len(fits) == 1 else None


def _slice(entry: str, gpus: Sequence[GpuState]) -> list[str] | None:
    instance = _INSTANCE.fullmatch(entry)
    if instance:
        parent, numbers = instance[1], (int(instance[2]), int(instance[3]))
        parents = [gpu for gpu in gpus if gpu.uuid.startswith(parent)]
        if len(parents) != 1:
            return None
        fits = [
            one.uuid
            for one in parents[0].slices
            if numbers == (one.gpu_instance, one.compute_instance)
        ]
    else:
        fits = [one.uuid for gpu in gpus for one in gpu.slices if one.uuid.startswith(entry)]
    return fits if len(fits) == 1 else None
