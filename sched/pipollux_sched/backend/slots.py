"""Allocation of slots to replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from .base import Node, SlotAssignment


class SlotLedger:
    """The slots of all nodes, and their holders.

    Others hold `Node.taken` of the slots that have no holder here, whichever these are. So a node
    that others use offers fewer slots, and a holder keeps its own.

    Example:
        >>> from pipollux_sched.spec.cluster import NodeSpec
        >>> ledger = SlotLedger({"a": Node(NodeSpec(name="a", slots=4), taken=1)})
        >>> ledger.take("job", {0: "a"}, num_stages=2)
        {0: SlotAssignment(node='a', slots=(0, 1))}
        >>> ledger.free()
        {'a': 1}
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._held: dict[str, dict[int, SlotAssignment]] = {}
        self._holders: dict[tuple[str, int], str] = {}
        self._num_held: Counter[str] = Counter()
        self._nodes = dict(nodes)

    def fits(self, nodes: Sequence[str], num_stages: int) -> bool:
        """Return whether the replicas would fit if nothing were held here."""
        return all(
            name in self._nodes and nodes.count(name) * num_stages <= self._num_offered(name)
            for name in nodes
        )

    def take(
        self, holder: str, replicas: Mapping[int, str], num_stages: int
    ) -> dict[int, SlotAssignment] | None:
        """Reserve `num_stages` slots of its node for each replica, the lowest free ones.

        None, with nothing reserved: they are not all free. ValueError: a replica has slots already.
        """
        if twice := sorted(self._held.get(holder, {}).keys() & replicas.keys()):
            raise ValueError(f"replica {twice[0]} of {holder} holds slots already")
        for name, number in Counter(replicas.values()).items():
            if number * num_stages > self._num_free(name):
                return None
        taken = {}
        for replica, name in replicas.items():
            slots = tuple(islice(self._without_holder(name), num_stages))
            taken[replica] = SlotAssignment(name, slots)
            self._hold(holder, {replica: taken[replica]})
        return taken

    def restore(self, holder: str, assignments: Mapping[int, SlotAssignment]) -> bool:
        """Reserve the same slots for a holder again, even if they are left out.

        It does not matter how many of the other slots are taken. False, and nothing reserved: the
        holder has slots already, another one has these, or the node is gone or too small.
        """
        wanted = list(_slots_of(assignments.values()))
        is_shared = len(set(wanted)) < len(wanted) or not self._holders.keys().isdisjoint(wanted)
        fits = all(
            name in self._nodes and self._num_held[name] + number <= self._nodes[name].spec.slots
            for name, number in Counter(name for name, _ in wanted).items()
        )
        if holder in self._held or is_shared or not fits:
            return False
        self._hold(holder, assignments)
        return True

    def resize(self, nodes: Mapping[str, Node]) -> None:
        """Replace the nodes; held slots stay held, even on nodes that are gone or too small."""
        self._nodes = dict(nodes)

    def release(self, holder: str, replicas: Collection[int] | None = None) -> None:
        """Free the slots of some replicas of `holder`; None: of all."""
        held = self._held.pop(holder, {})
        ended = held.keys() if replicas is None else held.keys() & set(replicas)
        for name, slot in _slots_of(held[replica] for replica in ended):
            del self._holders[name, slot]
            self._num_held[name] -= 1
        left = {replica: assignment for replica, assignment in held.items() if replica not in ended}
        if left:
            self._held[holder] = left

    def free(self) -> dict[str, int]:
        """Return the number of free slots by node."""
        return {name: self._num_free(name) for name in self._nodes}

    def held(self) -> Mapping[tuple[str, int], str]:
        """Return the holder of each slot that is held, by node and slot."""
        return dict(self._holders)

    def _hold(self, holder: str, assignments: Mapping[int, SlotAssignment]) -> None:
        self._held[holder] = {**self._held.get(holder, {}), **assignments}
        for name, slot in _slots_of(assignments.values()):
            self._holders[name, slot] = holder
            self._num_held[name] += 1

    def _without_holder(self, name: str) -> Iterator[int]:
        """Yield the slots of a node that a replica may get, unless others have them."""
        node = self._nodes[name]
        for slot in range(node.spec.slots):
            if slot not in node.left_out and (name, slot) not in self._holders:
                yield slot

    def _num_offered(self, name: str) -> int:
        """Return how many slots of a node replicas may hold."""
        node = self._nodes[name]
        unused = sum((name, slot) not in self._holders for slot in node.left_out)
        return max(node.spec.slots - node.taken - unused, 0)

    def _num_free(self, name: str) -> int:
        if name not in self._nodes:
            return 0
        return max(self._num_offered(name) - self._num_held[name], 0)


def _slots_of(assignments: Iterable[SlotAssignment]) -> Iterable[tuple[str, int]]:
    for assignment in assignments:
        for slot in assignment.slots:
            yield assignment.node, slot
