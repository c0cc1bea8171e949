"""Applications by name: those of the public traces, and pipelines computed from formulas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipollux_perfmodel import fit_perf_params
from pipollux_policies import NodeInfo
from pipollux_simulator.workload.generate import CATEGORIES, Mix, Request

from .base import Application
from .devices import A100_40G, DEVICES, Device
from .gpt import GPT_MODELS
from .pipeline import PipelineApplication
from .trace_model import Fit
from .traces import CONSTANTS, SLOTS_PER_NODE, TraceApplication, TraceError

KNOWN = (*CONSTANTS, *GPT_MODELS)


def load_applications(
    names: Iterable[str],
    *,
    traces: Path | None = None,
    devices: Sequence[Device] = (A100_40G,),
    fit: Fit = fit_perf_params,
) -> dict[str, Application]:
    """Return applications by name, reading only the requested ones of a folder of public traces.

    `devices` are types of GPU for pipelines; `fit` is for jobs of the traces. Raises ValueError if
    a name is unknown, traces are missing or invalid, or a pipeline fits on none of the devices.

    >>> load_applications(["gpt-1.3b"])["gpt-1.3b"].max_batch_size
    512
    """
    found: dict[str, Application] = {}
    for name in sorted(set(names)):
        if name in GPT_MODELS:
            found[name] = PipelineApplication(name, devices)
        elif name in CONSTANTS:
            found[name] = TraceApplication(_folder(name, traces), fit=fit)
        else:
            raise ValueError(f"application {name!r} is not known; choose from {', '.join(KNOWN)}")
    return found


def devices_of(gpu_types: Iterable[str]) -> tuple[Device, ...]:
    """Return the devices of known types of GPU; an empty type is an A100."""
    known = {device.name: device for device in DEVICES}
    wanted = sorted(set(gpu_types) - {""})
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(
            f"GPU type {unknown[0]!r} is not known, so pipelines cannot be timed on it; "
            f"choose from {', '.join(known)}"
        )
    return tuple(known[name] for name in wanted) or (A100_40G,)


def fits(application: Application, nodes: Mapping[str, NodeInfo]) -> bool:
    """Return whether some node has room for a replica of some shape of an application."""
    shapes = application.new_model().shapes()
    return any(node.num_fitting(shape) for shape in shapes for node in nodes.values())


def check_room(application: Application, nodes: Mapping[str, NodeInfo]) -> None:
    """Raise ValueError if a replica fits on no node, or a node has more GPUs than traces cover."""
    sizes = [node.resources.get("slots", 0) for node in nodes.values()]
    most = max(sizes, default=0)
    if isinstance(application, TraceApplication) and most > SLOTS_PER_NODE:
        raise ValueError(
            f"application {application.name!r}: its traces were measured on nodes of "
            f"{SLOTS_PER_NODE} GPUs, and nodes have up to {most}; give nodes of {SLOTS_PER_NODE}"
        )
    if not fits(application, nodes):
        least = min(shape.resources["slots"] for shape in application.new_model().shapes())
        raise ValueError(
            f"application {application.name!r} fits on no node: a replica takes {least} GPUs of one"
            f" node, and the largest has {most}; give nodes of {least} GPUs"
        )


def requests_for(
    mix: Mix, nodes: Mapping[str, NodeInfo], traces: Path | None = None
) -> dict[str, Request]:
    """Return users' requests by application of a mix, omitting applications that fit on no node.

    No request exceeds the replicas that fit. `traces` are not needed for pipelines. Raises
    ValueError if they are missing or invalid, or a type of GPU is unknown.
    """
    parts: tuple[Mix, ...] = ("pollux", "pipelines") if mix == "mixed" else (mix,)
    names = [n for kind in CATEGORIES for part in parts for n in kind.applications.get(part, ())]
    devices = devices_of({node.gpu_type for node in nodes.values()})
    found: dict[str, Request] = {}
    for name in names:
        if name in GPT_MODELS:
            try:
                application = PipelineApplication(name, devices)
            except ValueError:  # fits on none of the devices
                continue
            if fits(application, nodes):
                found[name] = _capped(application, nodes)
        else:
            found[name] = _capped(TraceApplication(_folder(name, traces)), nodes)
    return found


def _capped(
    application: PipelineApplication | TraceApplication, nodes: Mapping[str, NodeInfo]
) -> Request:
    shape = application.new_model().shapes()[0]
    most = sum(node.num_fitting(shape) for node in nodes.values())

    def request(rng: np.random.Generator) -> tuple[int, int]:
        replicas, batch_size = application.requests(rng)
        return max(min(replicas, most), 1), batch_size

    return request


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
