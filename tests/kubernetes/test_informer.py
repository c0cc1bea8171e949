"""Copies of the API server's objects: what counts as a change, and who is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipollux_sched.backend.base import ClusterUnavailableError
from pipollux_sched.backend.kubernetes.api import Object, Pod
from pipollux_sched.backend.kubernetes.informer import Derived, Informer, Selection

Told = list[tuple[list[str], list[str]]]


def thing(name: str, version: int, color: str = "red", uid: str = "1") -> Object:
    return {
        "metadata": {
            "name": name,
            "namespace": "here",
            "resourceVersion": str(version),
            "uid": uid,
        },
        "color": color,
    }


def view(found: Object) -> str | None:
    return None if found["color"] == "none" else f"{found['metadata']['name']} {found['color']}"


def mirror_of(told: Told, *, keeps: bool = False) -> Informer[str]:
    def tell(changed: Sequence[str], gone: Sequence[str]) -> None:
        told.append((sorted(changed), sorted(gone)))

    last = (lambda seen: f"{seen} last") if keeps else None
    return Informer(Selection(Pod), view, tell, last, group=lambda seen: seen.split()[1])


def list_again(informer: Informer[str], version: int, *things: Object) -> None:
    informer.replace(dict(filter(None, map(informer.read, things))), str(version))


def test_only_what_is_seen_counts_as_a_change() -> None:
    """A heartbeat of a node makes a new version, in which nothing is new to us."""
    told: Told = []
    informer = mirror_of(told)
    list_again(informer, 5, thing("a", 1), thing("b", 2))
    changes, (first, _) = informer.changes, informer.values()
    informer.apply("MODIFIED", thing("a", 6))
    assert informer.changes == changes
    assert informer.values()[0] is first
    informer.apply("MODIFIED", thing("a", 4, "blue"))  # older than what is known
    informer.apply("MODIFIED", thing("a", 7, "blue"))
    assert informer.changes == changes + 1
    informer.note(thing("b", 8, "blue"))  # whoever has made it knows
    assert informer.changes == changes + 2
    informer.apply("MODIFIED", thing("b", 8, "blue"))
    assert informer.changes == changes + 2
    informer.apply("DELETED", thing("a", 9, "blue", uid="2"))  # of an earlier one
    informer.apply("DELETED", thing("a", 9, "blue"))
    informer.apply("MODIFIED", thing("b", 10, "none"))
    informer.apply("MODIFIED", thing("b", 11, "none"))
    assert informer.values() == []
    assert told == [(["a red", "b red"], []), (["a blue"], []), ([], ["a blue"]), ([], ["b blue"])]


def test_what_a_call_returned_late_does_not_come_back() -> None:
    """Its answer may be read after the watch has shown that another one deleted the object."""
    told: Told = []
    informer = mirror_of(told)
    list_again(informer, 5, thing("a", 1), thing("b", 2))
    informer.apply("DELETED", thing("a", 7))
    informer.note(thing("a", 6, "blue"))
    list_again(informer, 9)
    informer.note(thing("b", 8, "blue"))
    assert informer.values() == []
    informer.note(thing("a", 10, uid="2"))
    assert informer.values() == ["a red"]


def test_listed_again_only_differences_are_told() -> None:
    """What is newer than the list stays."""
    told: Told = []
    informer = mirror_of(told)
    list_again(informer, 5, thing("a", 1), thing("b", 2), thing("c", 3), thing("d", 4))
    (a, *_), changes = informer.values(), informer.changes
    informer.note(thing("d", 9, "blue"))
    told.clear()
    list_again(informer, 8, thing("a", 7), thing("b", 6, "green"))
    assert sorted(informer.values()) == ["a red", "b green", "d blue"]
    assert informer.values()[0] is a
    assert told == [(["b green"], ["c red"])]
    assert informer.changes == changes + 2
    list_again(informer, 8, thing("a", 7), thing("b", 6, "green"))
    assert informer.changes == changes + 2


def test_groups() -> None:
    informer = mirror_of([], keeps=True)
    list_again(informer, 5, thing("a", 1), thing("b", 2), thing("c", 3, "blue"))
    assert informer.group("red") == ["a red", "b red"]
    informer.apply("MODIFIED", thing("a", 6, "blue"))
    assert informer.group("blue") == ["c blue", "a blue"]
    informer.apply("DELETED", thing("b", 7))
    assert informer.group("red") == ["b red last"]
    changes = informer.changes
    informer.drop(("here", "b"))
    informer.drop(("here", "b"))
    assert informer.changes == changes + 1
    assert informer.group("red") == informer.group("green") == []
    list_again(informer, 9, thing("a", 8))
    assert informer.group("blue") == []


def test_what_is_made_of_mirrors() -> None:
    """It is made once for each change, and by nobody while the server is away."""
    informer, other = mirror_of([]), mirror_of([])
    made: list[int] = []

    def make() -> int:
        made.append(len(informer.values()) + len(other.values()))
        return made[-1]

    derived = Derived([informer, other], make)
    list_again(informer, 5, thing("a", 1))
    other.fail("it is away")
    with pytest.raises(ClusterUnavailableError, match="it is away"):
        derived.get()
    list_again(other, 5)
    assert [derived.get(), derived.get()] == [1, 1]
    other.apply("ADDED", thing("b", 6))
    assert [derived.get(), derived.get()] == [2, 2]
    assert made == [1, 2]
