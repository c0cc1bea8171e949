"""Allocation of slots to replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from .base import SlotAssignment


class SlotLedger:
    """The slots of all nodes, and their holders.

    Example:
        >>> ledger = SlotLedger({"node-a": 2, "node-b": 2})
        >>> ledger.take("job", {0: "node-a"}, num_stages=2)
        {0: SlotAssignment(node='node-a', slots=(0, 1))}
    """

    def __init__(
        self, nodes: Mapping[str, int], left_out: Mapping[str, Collection[int]] | None = None
    ) -> None:
        self._held: dict[str, dict[int, SlotAssignment]] = {}
        self.resize(nodes, left_out)

    def fits(self, nodes: Sequence[str], num_stages: int) -> bool:
        """Return whether the replicas would fit if all slots that are not left out were free."""
        return all(
            name in self._size
            and nodes.count(name) * num_stages <= self._size[name] - self._num_out(name)
            for name in nodes
        )

    def take(
        self, holder: str, replicas: Mapping[int, str], num_stages: int
    ) -> dict[int, SlotAssignment] | None:
        """Reserve `num_stages` slots of its node for each replica, the lowest free ones.

        None, with nothing reserved: they are not all free. ValueError: a replica has slots already.
        """
        held = self._held.get(holder, {})
        if twice := sorted(held.keys() & replicas.keys()):
            raise ValueError(f"replica {twice[0]} of {holder} holds slots already")
        for name, number in Counter(replicas.values()).items():
            if number * num_stages > len(self._usable(name)):
                return None
        taken = {}
        for replica, name in replicas.items():
            slots = tuple(sorted(self._usable(name))[:num_stages])
            self._free[name].difference_update(slots)
            taken[replica] = SlotAssignment(name, slots)
        self._held[holder] = {**held, **taken}
        return taken

    def restore(self, holder: str, assignments: Mapping[int, SlotAssignment]) -> bool:
        """Reserve the same slots for a holder again, also if they are left out.

        False, and nothing reserved: impossible.
        """
        wanted = list(_slots_of(assignments.values()))
        free = all(slot in self._free.get(name, ()) for name, slot in wanted)
        if holder in self._held or not free or len(set(wanted)) < len(wanted):
            return False
        for name, slot in wanted:
            self._free[name].discard(slot)
        self._held[holder] = dict(assignments)
        return True

    def resize(
        self, nodes: Mapping[str, int], left_out: Mapping[str, Collection[int]] | None = None
    ) -> None:
        """Replace the nodes; held slots stay held, even on nodes that are gone.

        Nothing new gets the slots that are `left_out`.
        """
        self._size = dict(nodes)
        self._out = {name: frozenset(slots) for name, slots in (left_out or {}).items()}
        self._free = {name: set(range(slots)) for name, slots in nodes.items()}
        for name, slot in self.held():
            self._free.get(name, set()).discard(slot)

    def release(self, holder: str, replicas: Collection[int] | None = None) -> None:
        """Free the slots of some replicas of `holder`; None: of all."""
        held = self._held.pop(holder, {})
        ended = held.keys() if replicas is None else held.keys() & set(replicas)
        for name, slot in _slots_of(held[replica] for replica in ended):
            if slot < self._size.get(name, 0):
                self._free[name].add(slot)
        left = {replica: assignment for replica, assignment in held.items() if replica not in ended}
        if left:
            self._held[holder] = left

    def free(self) -> dict[str, int]:
        """Return the number of free slots by node."""
        return {name: len(self._usable(name)) for name in self._free}

    def held(self) -> dict[tuple[str, int], str]:
        """Return the holder of each slot that is held, by node and slot."""
        return {
            place: holder
            for holder, assignments in self._held.items()
            for place in _slots_of(assignments.values())
        }

    def _usable(self, node: str) -> set[int]:
        return self._free.get(node, set()) - self._out.get(node, frozenset())

    def _num_out(self, node: str) -> int:
        """Return the number of slots that are left out and that nothing holds."""
        return len(self._free[node] & self._out.get(node, frozenset()))


def _slots_of(assignments: Iterable[SlotAssignment]) -> Iterable[tuple[str, int]]:
    for assignment in assignments:
        for slot in assignment.slots:
            yield assignment.node, slot
