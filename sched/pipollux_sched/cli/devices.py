"""The devices of slots, as terminals show them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pipollux_sched.views.models import DeviceUseView, DeviceView, JobDeviceView
from pipollux_utils.text import DASH, clean

_GIB = 2**30


def device_table(devices: Sequence[DeviceView]) -> Table | None:
    """Return devices as a table, with their nodes if these are known; None: there are none."""
    if not devices:
        return None
    table = Table(box=None, header_style="dim", pad_edge=False)
    of_job = isinstance(devices[0], JobDeviceView)
    for header in (*(["Node"] if of_job else []), "Slot", "GPU", "Type"):
        table.add_column(header, justify="right" if header == "Slot" else "left", no_wrap=True)
    for header in ("Use", "Memory"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in (*([] if of_job else ["Job"]), "Problem"):
        table.add_column(header, overflow="fold")
    for one in devices:
        table.add_row(
            *([Text(clean(one.node))] if isinstance(one, JobDeviceView) else []),
            str(one.slot),
            Text(clean(one.title)),
            Text(clean(one.name)),
            *spell_use(one),
            *([] if of_job else [Text(clean(one.job or DASH))]),
            Text(clean(one.problem) or DASH, style="yellow" if one.problem else ""),
        )
    return table


def spell_use(use: DeviceUseView | DeviceView | None) -> tuple[str, str]:
    """Return utilization and memory: `87 %`, `61 of 141 GiB`."""
    if use is None:
        return DASH, DASH
    rate = DASH if use.utilization is None else f"{100 * use.utilization:.0f} %"
    if use.memory_used is None or use.memory_total is None:
        return rate, DASH
    return rate, f"{use.memory_used / _GIB:.3g} of {use.memory_total / _GIB:.4g} GiB"
