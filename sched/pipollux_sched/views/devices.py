"""Views of the devices of slots: GPUs and MIG slices, their use and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipollux_sched.store import Store

from .models import DeviceUseView, DeviceView, JobDeviceView

Devices = Mapping[str, Sequence[Mapping[str, Any]]]
"""The stored devices, by node."""


def devices_of_node(devices: Devices, node: str) -> list[DeviceView]:
    """Return the devices of a node; none if their state is unknown."""
    return [DeviceView(**one) for one in devices.get(node, ())]


def devices_of_job(store: Store, job: str) -> list[JobDeviceView]:
    """Return the devices that a job holds, as far as their state is known."""
    return [
        JobDeviceView(node=node, **one)
        for node, row in store.devices.latest().items()
        for one in row
        if one["job"] == job
    ]


def use_by_job(devices: Devices) -> dict[str, DeviceUseView]:
    """Return the use of the devices of each job that holds some."""
    held: dict[str, list[DeviceView]] = {}
    for node in devices:
        for device in devices_of_node(devices, node):
            if device.job is not None:
                held.setdefault(device.job, []).append(device)
    return {job: total_use(found) for job, found in held.items()}


def total_use(devices: Sequence[DeviceView]) -> DeviceUseView:
    """Return the use of devices together; what is unknown of one is left out."""
    rates = [one.utilization for one in devices if one.utilization is not None]
    known = [one for one in devices if one.memory_used is not None]
    return DeviceUseView(
        num_devices=len(devices),
        utilization=sum(rates) / len(rates) if rates else None,
        memory_used=sum(one.memory_used or 0 for one in known) if known else None,
        memory_total=sum(one.memory_total or 0 for one in known) if known else None,
    )


def problems(store: Store) -> list[tuple[str, DeviceView]]:
    """Return the devices on which nothing new starts, each with its node."""
    latest = store.devices.latest()
    found = [(node, device) for node in latest for device in devices_of_node(latest, node)]
    return [(node, device) for node, device in found if device.problem]
