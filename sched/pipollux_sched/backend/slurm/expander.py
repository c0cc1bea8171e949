"""Nodes for the autoscaler: submitted with sbatch, or cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from .rented_pools import RentedPools


class SlurmExpander:
    """Requests nodes from Slurm; an `allocator.expander.Expander`.

    Args:
        pools: the allocations.
    """

    def __init__(self, pools: RentedPools) -> None:
        self._pools = pools

    def num_nodes(self) -> int:
        """Return the present number of nodes."""
        return self._pools.num_nodes

    def request(self, desired_nodes: int, release: Sequence[str] = ()) -> None:
        """Request a number of nodes, and release idle ones.

        Args:
            desired_nodes: the desired number.
            release: names of the nodes to release.

        Raises:
            BackendError: Slurm rejects the request, or does not answer.
        """
        self._pools.request(desired_nodes, release)
