"""Applications by name: those of the public traces, and pipelines computed from formulas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .application import Application
from .devices import A100_40G, DEVICES, Device
from .gpt import GPT_MODELS
from .pipeline_application import PipelineApplication
from .traces import CONSTANTS, TraceApplication, TraceError

KNOWN = (*CONSTANTS, *GPT_MODELS)
"""Names of all applications."""


def load_applications(
    names: Iterable[str],
    *,
    traces: Path | None = None,
    devices: Sequence[Device] = (A100_40G,),
) -> dict[str, Application]:
    """Return applications by name.

    Args:
        names: which.
        traces: holds a folder for each application of the public traces; only those that are asked
            for are read.
        devices: types of GPU that pipelines may run on.

    Raises:
        ValueError: a name is not known, traces are missing or wrong, or a pipeline fits on none of
            the devices.

    Example:
        >>> load_applications(["gpt-1.3b"])["gpt-1.3b"].max_batch_size
        512
    """
    found: dict[str, Application] = {}
    for name in sorted(set(names)):
        if name in GPT_MODELS:
            found[name] = PipelineApplication(name, devices)
        elif name in CONSTANTS:
            found[name] = TraceApplication(_folder(name, traces))
        else:
            raise ValueError(f"application {name!r} is not known; known are {', '.join(KNOWN)}")
    return found


def devices_of(gpu_types: Iterable[str]) -> tuple[Device, ...]:
    """Return the devices of types of GPU that nodes tell; those that do not tell are A100s.

    Raises:
        ValueError: nothing is known of a type.
    """
    known = {device.name: device for device in DEVICES}
    wanted = sorted(set(gpu_types) - {""})
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(
            f"GPU type {unknown[0]!r} is not known, so pipelines cannot be timed on it; "
            f"known are {', '.join(known)}"
        )
    return tuple(known[name] for name in wanted) or (A100_40G,)


def _folder(name: str, traces: Path | None) -> Path:
    if traces is None:
        raise TraceError(
            f"application {name!r} needs its traces; give the folder in which the folder {name} "
            "lies with --traces"
        )
    if not (traces / name).is_dir():
        raise TraceError(
            f"{traces}: holds no folder {name}, of which the workload has jobs; "
            "give the folder of the public traces"
        )
    return traces / name
