"""Nodes for the autoscaler: what it asks for is submitted with sbatch, or cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from .rented_pools import RentedPools

__all__ = ["SlurmExpander"]


class SlurmExpander:
    """Asks Slurm for nodes, as `allocator.expander.Expander` says.

    Args:
        pools: the allocations.
    """

    def __init__(self, pools: RentedPools) -> None:
        self._pools = pools

    def num_nodes(self) -> int:
        """Return how many nodes there are now."""
        return self._pools.num_nodes

    def request(self, desired_nodes: int, release: Sequence[str] = ()) -> None:
        """Request a number of nodes, and give back those that nothing runs on.

        Args:
            desired_nodes: how many there should be.
            release: names of the nodes to give back.

        Raises:
            BackendError: Slurm refuses, in its words, or does not answer.
        """
        self._pools.request(desired_nodes, release)
