"""One GPU that stages and replicas of a test share."""

from __future__ import annotations

__all__ = ["ON_THE_GPU"]

ON_THE_GPU = {
    "PIPOLLUX_DEVICES": ",".join(["cuda:0"] * 4),
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
"""The environment of replicas whose stages, up to four, are all on the first GPU."""
