"""The state of GPUs as the driver reports it, and why one must not be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

MOST_RETIRED = 60
"""Number of retired pages from which a GPU has to be replaced."""
_RESETS = {
    1: "needs a reset",
    2: "needs a reboot of the machine",
    4: "needs a reset",
    6: "needs a reset",
    7: "needs a reboot of the machine",
}
"""NVML's recovery actions that forbid further use; others concern links to other machines."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """The use of a GPU or of a MIG slice; None: the driver does not know."""

    memory_used: int | None = None
    memory_total: int | None = None
    utilization: float | None = None
    """Share of the last second, or less, in which it computed, from 0 to 1."""
    processes: tuple[int, ...] | None = None
    """Process ids, as the driver tells them to this PID namespace."""

    @classmethod
    def from_json_object(cls, data: Mapping[str, Any]) -> Self:
        """Return the use from a message of the probe."""
        percent, processes = data.get("utilization"), data.get("processes")
        return cls(
            memory_used=data.get("memory_used"),
            memory_total=data.get("memory_total"),
            utilization=None if percent is None else min(max(percent / 100, 0.0), 1.0),
            processes=None if processes is None else tuple(map(int, processes)),
        )


@dataclass(frozen=True, kw_only=True)
class MigSlice:
    """A slice of a GPU in MIG mode."""

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    use: Use = field(default_factory=Use)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU; an empty `uuid`: unknown."""

    index: int
    """In the order of PCI bus ids."""
    uuid: str = ""
    name: str = ""
    mig: bool = False
    slices: tuple[MigSlice, ...] = ()
    use: Use = field(default_factory=Use)
    problem: str = ""
    """Why nothing must be started on it; empty: it is healthy."""

    @classmethod
    def from_json_object(cls, data: Mapping[str, Any]) -> Self:
        """Return the state from a message of the probe."""
        return cls(
            index=int(data["index"]),
            uuid=str(data["uuid"]),
            name=str(data["name"]),
            mig=bool(data.get("mig")),
            slices=tuple(
                MigSlice(
                    uuid=str(one["uuid"]),
                    gpu_instance=one["gpu_instance"],
                    compute_instance=one["compute_instance"],
                    use=Use.from_json_object(one),
                )
                for one in data["slices"]
            ),
            use=Use.from_json_object(data),
            problem="; ".join(_problems(data)),
        )

    def devices(self) -> Iterator[tuple[str, Use]]:
        """Yield what can be a slot: the GPU, or its slices if it is in MIG mode."""
        if self.mig:
            yield from ((one.uuid, one.use) for one in self.slices)
        else:
            yield self.uuid, self.use


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """All GPUs at one moment."""

    gpus: tuple[GpuState, ...] = ()
    silent: tuple[int, ...] = ()
    """The indices of GPUs that do not answer."""
    error: str = ""
    """Why nothing could be read; empty: it could."""
    code: int | None = None
    """NVML's error code; `probe.NO_PACKAGE`: NVML was not even asked; None: it does not answer."""


def _problems(data: Mapping[str, Any]) -> Iterator[str]:
    if data.get("error"):
        yield f"it does not work ({data['error']})"
    errors = data.get("ecc_errors")
    if errors:
        yield f"{errors} uncorrectable ECC error{'s' if errors > 1 else ''} since its last reset"
    if data.get("remap_pending"):
        yield "a row of its memory waits to be remapped: it needs a reset"
    if data.get("remap_failed"):
        yield "a row of its memory could not be remapped: it has to be replaced"
    if data.get("retirement_pending"):
        yield "a page of its memory waits to be retired: it needs a reset"
    retired = data.get("retired_pages")
    if retired and retired >= MOST_RETIRED:
        yield f"{retired} retired pages: it has to be replaced"
    action = _RESETS.get(data.get("recovery_action") or 0)
    if action:
        yield f"the driver says that it {action}"
