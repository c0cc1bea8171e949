"""Measures the latency and bandwidth between stages of a multi-process pipeline."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from pipollux_perfmodel import Link

from .groups import carrier_of
from .mesh import ProcessMesh
from .peers import lost_peers

__all__ = ["measure_link"]

TRIALS = 8
"""Round trips per size; the fastest counts, as other work of the host delays the rest."""
SMALL = 8
"""Bytes of the message that measures the latency."""


def measure_link(mesh: ProcessMesh, device: torch.device, num_bytes: int) -> Link | None:
    """Return latency and bandwidth between the first two stages of this replica for messages of a
    size; None on further stages. All processes of the two call it. Raises a PeerLostError if one is
    gone.
    """
    if mesh.stage > 1:
        return None
    small = _seconds(mesh, device, SMALL)
    large = _seconds(mesh, device, max(num_bytes, 2 * SMALL))
    more = max(large - small, 1e-9)
    return Link(small, (max(num_bytes, 2 * SMALL) - SMALL) / more)


def _seconds(mesh: ProcessMesh, device: torch.device, num_bytes: int) -> float:
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    carrier = carrier_of(mesh.stages, device)
    arrived = message if carrier == device else torch.empty_like(message, device=carrier)
    other = dist.get_global_rank(mesh.stages, 1 - mesh.stage)
    fastest = float("inf")
    try:
        for _ in range(TRIALS):
            start = time.perf_counter()
            if mesh.stage == 0:
                dist.send(message.to(carrier), other, mesh.stages)
            dist.recv(arrived, other, mesh.stages)
            if arrived is not message:
                message.copy_(arrived)
            if mesh.stage == 1:
                dist.send(message.to(carrier), other, mesh.stages)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            fastest = min(fastest, (time.perf_counter() - start) / 2)
    except RuntimeError as error:
        raise lost_peers("while measuring messages between stages", error) from error
    return fastest
