"""Pushes that a server holds and that do not count yet on itself or on the next server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from .transport import Message


class KeptBack:
    """Pushes to this server that the next server gets with the step that they make."""

    def __init__(self) -> None:
        self._by_member: dict[int, list[Message]] = {}

    def add(self, push: Message) -> None:
        """Keep a push of a member."""
        self._by_member.setdefault(int(push.header["member"]), []).append(push)

    def pop(self, member: int) -> list[Message]:
        """Remove and return all pushes of a member."""
        return self._by_member.pop(member, [])

    def has(self, member: int) -> bool:
        """Return whether the next server lacks a push of the member."""
        return member in self._by_member

    def layers(self) -> set[tuple[int, int]]:
        """Return each pushed layer with its member: ``(member, layer)``."""
        return {
            (member, layer)
            for member, pushes in self._by_member.items()
            for push in pushes
            for layer in _layers(push)
        }

    def keep_pending(self, is_pending: Callable[[int, int], bool]) -> None:
        """Drop pushes of which no layer is pending: the next server got them with their step, or
        they were sent twice.
        """
        left = {
            member: [p for p in pushes if any(is_pending(member, x) for x in _layers(p))]
            for member, pushes in self._by_member.items()
        }
        self._by_member = {member: pushes for member, pushes in left.items() if pushes}


class LaidDown:
    """Pushes to the previous server that this one holds until they count there."""

    def __init__(self) -> None:
        self._pushes: dict[tuple[int, tuple[int, ...]], Message] = {}

    def add(self, push: Message, members: Collection[int]) -> None:
        """Keep a push in place of an earlier one of its layers; drop those of lost members."""
        self._pushes = {key: kept for key, kept in self._pushes.items() if key[0] in members}
        self._pushes[_key(push)] = push

    def take(self, counted: Message) -> Sequence[Tensor] | None:
        """Return the tensors of a push that counts now; None: it is not here."""
        found = self._pushes.pop(_key(counted), None)
        if found is None or found.header["number"] != counted.header["number"]:
            return None
        return found.tensors


def _layers(push: Message) -> tuple[int, ...]:
    return tuple(map(int, push.header["counts"]))


def _key(push: Message) -> tuple[int, tuple[int, ...]]:
    return int(push.header["member"]), _layers(push)
