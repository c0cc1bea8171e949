"""Which replica holds which slot of which node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class SlotLedger:
    """The slots of all nodes, and who holds them.

    Example:
        >>> ledger = SlotLedger({"node-a": 2, "node-b": 2})
        >>> ledger.take("job", ["node-a", "node-b"], num_stages=2)
        [(0, 1), (0, 1)]

    Args:
        nodes: number of slots by node.
    """

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._size = dict(nodes)
        self._free = {name: set(range(slots)) for name, slots in nodes.items()}
        self._held: dict[str, list[tuple[str, tuple[int, ...]]]] = {}

    def fits(self, nodes: Sequence[str], num_stages: int) -> bool:
        """Return whether the replicas would fit if all slots were free."""
        return all(
            name in self._size and nodes.count(name) * num_stages <= self._size[name]
            for name in nodes
        )

    def take(
        self, holder: str, nodes: Sequence[str], num_stages: int
    ) -> list[tuple[int, ...]] | None:
        """Reserve `num_stages` slots of its node for each replica, the lowest free ones.

        Returns:
            The slots of each replica; None, and nothing reserved, if they are not all free.
        """
        if holder in self._held:
            raise ValueError(f"{holder} holds slots already; they must be given back first")
        if any(nodes.count(name) * num_stages > len(self._free.get(name, ())) for name in nodes):
            return None
        taken = []
        for name in nodes:
            slots = tuple(sorted(self._free[name])[:num_stages])
            self._free[name].difference_update(slots)
            taken.append(slots)
        self._held[holder] = list(zip(nodes, taken, strict=True))
        return taken

    def restore(self, holder: str, nodes: Sequence[str], slots: Sequence[tuple[int, ...]]) -> bool:
        """Reserve the same slots for a holder again; False, and nothing reserved, if impossible."""
        held = list(zip(nodes, slots, strict=True))
        wanted = [(name, slot) for name, taken in held for slot in taken]
        free = all(slot in self._free.get(name, ()) for name, slot in wanted)
        if holder in self._held or not free or len(set(wanted)) < len(wanted):
            return False
        for name, slot in wanted:
            self._free[name].discard(slot)
        self._held[holder] = held
        return True

    def resize(self, nodes: Mapping[str, int]) -> None:
        """Set the nodes anew; slots that are held stay held, also those that are no more.

        Args:
            nodes: number of slots by node.
        """
        self._size = dict(nodes)
        held = [
            (name, slot) for entry in self._held.values() for name, taken in entry for slot in taken
        ]
        self._free = {name: set(range(slots)) for name, slots in nodes.items()}
        for name, slot in held:
            self._free.get(name, set()).discard(slot)

    def release(self, holder: str) -> None:
        """Free all slots of `holder`."""
        for name, slots in self._held.pop(holder, []):
            there = range(self._size.get(name, 0))
            self._free.get(name, set()).update(slot for slot in slots if slot in there)

    def free(self) -> dict[str, int]:
        """Return the number of free slots by node."""
        return {name: len(slots) for name, slots in self._free.items()}
