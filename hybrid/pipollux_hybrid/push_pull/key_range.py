"""The layers of a server: parameters, outer optimizer, and which samples they were trained on.

A key is the index of a layer; each server has a contiguous range of keys, as in ps-lite. All state
of a layer changes in one operation, so that a copy of it taken at any moment is consistent: the
parameters include exactly the samples that are credited.

Operations are deterministic: the next server applies the same ones in the same order, and holds an
equal copy. Pushes may reach it only with the step that they are part of (:class:`Step`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pipollux_hybrid.errors import PipolluxError

from .intervals import IntervalSet
from .options import OuterSGD
from .outer_step import Change, OuterState, Share, share_of

GENERATION = 1 << 40
"""Distance between the revisions of two generations; one begins when a server is restored."""

Place = tuple[int, int]
"""Epoch, and number of the loop over data in it."""


class RejectedError(PipolluxError):
    """An operation that does not change anything; the text is one of the three below."""


FENCED = "fenced"
"""The replica was lost, or the servers were restored: it has to join again."""
PAST = "past"
"""The change is based on parameters that the restored server does not have."""
ROUND_OVER = "round over"
"""The round after which a member was to begin was not the last one any more."""


class Push(NamedTuple):
    """A replica's change of some layers."""

    member: int
    number: int
    """Counts the replica's pushes of these layers from 1, so that a repeated one is known."""
    weights: Mapping[int, float]
    """Of each layer, the samples it was trained on since the last push."""
    place: Place
    intervals: Mapping[int, Sequence[tuple[int, int]]]
    """Of each layer, the positions of these samples."""
    revisions: Mapping[int, int]
    """Of each layer, the revision that it had pulled."""


class Step(NamedTuple):
    """An outer step of a layer."""

    share: Share | None
    """What the pushes add; None: a copy computes it from the pushes that it has."""
    state: Mapping[str, Any]
    """What else of the layer a push changes, after the step."""


@dataclass
class LayerState:
    """State of a layer."""

    names: tuple[str, ...]
    outer: OuterState
    revision: int = 0
    """Outer steps; larger by a generation after each restoration."""
    pending: dict[int, Change] = field(default_factory=dict)
    """Changes of replicas, by member, that wait for a step."""
    clocks: dict[int, int] = field(default_factory=dict)
    """Rounds of each member: its pushes."""
    begins: dict[int, int] = field(default_factory=dict)
    """Members that begin later, and the round that has to end before."""
    weights: dict[int, float] = field(default_factory=dict)
    """Samples of each member's last push."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Number of each member's last accepted push."""
    place: Place = (0, 0)
    credits: IntervalSet = field(default_factory=IntervalSet)
    """Samples of the loop at ``place`` that the parameters or pending changes include."""

    def __post_init__(self) -> None:
        self.names = tuple(self.names)


class KeyRange:
    """The layers of one server, and the replicas that may push to them."""

    def __init__(self, outer: OuterSGD, least_pushes: int | None, max_staleness: float) -> None:
        self.layers: dict[int, LayerState] = {}
        self.counted: dict[int, bool] = {}
        """Members, and whether a round waits for their pushes."""
        self.outer, self.least_pushes, self.max_staleness = outer, least_pushes, max_staleness

    def init(self, layer: int, names: Sequence[str], values: Sequence[Tensor]) -> int:
        """Create a layer, unless there is one; return its revision."""
        if layer not in self.layers:
            copies = [value.clone() for value in values]
            self.layers[layer] = LayerState(tuple(names), OuterState(copies))
        return self.layers[layer].revision

    def admit(self, member: int) -> None:
        """Accept pushes of a member."""
        self.counted.setdefault(member, False)

    def count(self, members: Mapping[int, bool], after: Mapping[int, int] | None = None) -> None:
        """Set whether rounds wait for members; those that begin do so in the round under way, or
        after the rounds that are given for layers.

        Raises:
            RejectedError: Such a round is not the last that has ended, but an earlier one.
        """
        known = {member: on for member, on in members.items() if member in self.counted}
        begin = [member for member, on in known.items() if on and not self.counted[member]]
        ended = self.rounds(self.layers)
        rounds = ended | dict(after or {})
        if begin and any(rounds[layer] < number for layer, number in ended.items()):
            raise RejectedError(ROUND_OVER)
        self.counted |= known
        for layer, state in self.layers.items():
            state.begins |= dict.fromkeys(begin, rounds[layer])
            self._begin_due(state)

    def rounds(self, layers: Iterable[int]) -> dict[int, int]:
        """Return the number of the last round of each layer that has ended."""
        return {layer: self._round(self.layers[layer]) for layer in layers}

    def _round(self, state: LayerState) -> int:
        # A push that waits belongs to the round that is under way.
        members = self._active(state) or list(self.counted)
        return max((state.clocks.get(x, 0) - (x in state.pending) for x in members), default=0)

    def _active(self, state: LayerState) -> list[int]:
        """Return the members for which rounds of a layer wait."""
        return [x for x, counts in self.counted.items() if counts and x not in state.begins]

    def _begin_due(self, state: LayerState) -> None:
        """Let members begin whose round has come; where there are no others, that is now."""
        state.begins = {x: after for x, after in state.begins.items() if self.counted.get(x)}
        if not state.begins:
            return
        now = self._round(state) if self._active(state) else max(state.begins.values())
        for member in [x for x, after in state.begins.items() if after <= now]:
            del state.begins[member]
            state.clocks[member] = now + (member in state.pending)

    def fence(self, member: int, place: Place) -> dict[int, IntervalSet]:
        """Refuse pushes of a member from now on; return each layer's credits in a loop."""
        self.counted.pop(member, None)
        for state in self.layers.values():
            self._begin_due(state)
        return self.credits(place)

    def credits(self, place: Place) -> dict[int, IntervalSet]:
        """Return each layer's credited samples in a loop; layers beyond the loop are missing."""
        found = {}
        for layer, state in self.layers.items():
            if state.place <= place:
                found[layer] = state.credits if state.place == place else IntervalSet()
        return found

    def push(self, push: Push, changes: Mapping[int, Sequence[Tensor]]) -> None:
        """Accept changes of layers, for the next step of each.

        A push that was accepted before is accepted again, without an effect. Tensors must not
        change any more.

        Raises:
            RejectedError: The member is fenced, or a layer is not at or beyond the push's revision.
        """
        if push.member not in self.counted:
            raise RejectedError(FENCED)
        fresh = []
        for layer in changes:
            state = self.layers[layer]
            if push.number <= state.numbers.get(push.member, 0):
                continue
            based = push.revisions[layer]
            if based > state.revision or based // GENERATION != state.revision // GENERATION:
                raise RejectedError(PAST)
            if push.place < state.place and push.intervals[layer]:
                raise RejectedError(PAST)
            if push.member in state.pending:
                raise ValueError(f"member {push.member} pushed layer {layer} twice without a pull")
            fresh.append(layer)
        for layer in fresh:
            self._accept(layer, push, changes[layer])

    def _accept(self, layer: int, push: Push, change: Sequence[Tensor]) -> None:
        state, member, weight = self.layers[layer], push.member, push.weights[layer]
        # A layer that is beyond the loop, as its server had saved it later, keeps what it has.
        if state.place < push.place:
            state.place, state.credits = push.place, IntervalSet()
        for start, stop in push.intervals[layer]:
            state.credits.add(start, stop)
        state.pending[member] = Change(weight, list(change))
        state.numbers[member] = push.number
        state.weights[member] = weight
        state.clocks[member] = state.clocks.get(member, 0) + 1

    def due(self) -> list[int]:
        """Return the layers to which enough members have pushed for a step."""
        found = []
        for layer, state in self.layers.items():
            if self.least_pushes is None:
                ready = not self._missing(state)
            else:
                counted = sum(self.counted.values())
                ready = len(state.pending) >= min(self.least_pushes, counted)
            if state.pending and ready:
                found.append(layer)
        return found

    def _missing(self, state: LayerState) -> list[int]:
        """Return the members of which a round of a layer lacks a push."""
        return [x for x in self._active(state) if x not in state.pending]

    def next_step(self, layer: int, *, complete: bool) -> Step:
        """Return the step of a layer that is due; ``complete``: with what the pushes add."""
        state = self.layers[layer]
        after = {name: getattr(state, name) for name in ("clocks", "weights", "numbers")}
        after |= {"place": state.place, "credits": list(state.credits)}
        share = self._share(state) if complete else None
        return Step(share, {**after, "revision": state.revision + 1})

    def _share(self, state: LayerState) -> Share:
        total = sum(change.weight for change in state.pending.values())
        usual = total / len(state.pending)  # for members that have not pushed yet
        total += sum(state.weights.get(member, usual) for member in self._missing(state))
        return share_of(state.pending, total)

    def step(self, layer: int, step: Step) -> None:
        """Take a step of a layer; a repeated one has no effect."""
        state, after = self.layers[layer], step.state
        if int(after["revision"]) <= state.revision:
            return
        state.outer.step(step.share or self._share(state), self.outer)
        state.pending = {}
        _adopt(state, after)
        self._begin_due(state)

    def settled(self, member: int, layers: Mapping[int, int]) -> bool | None:
        """Return whether pushes of layers, by their numbers, are known; None while they wait for a
        step.

        Raises:
            RejectedError: The member is fenced.
        """
        if member not in self.counted:
            raise RejectedError(FENCED)
        states = [(self.layers[layer], number) for layer, number in layers.items()]
        if any(state.numbers.get(member, 0) < number for state, number in states):
            return False
        return None if any(member in state.pending for state, _ in states) else True

    def may_pull(self, layer: int, member: int, after: int) -> bool:
        """Return whether a member's pull of a layer has not to wait: its own push number ``after``
        is included, it takes part in rounds if it is counted, and the slowest member is at most
        the staleness behind.
        """
        state = self.layers[layer]
        if member in state.pending or state.numbers.get(member, 0) < after:
            return False
        if member in state.begins:
            return False
        clock = state.clocks.get(member, 0)
        clocks = [state.clocks.get(x, 0) for x in self._active(state)]
        return clock - min(clocks, default=clock) <= self.max_staleness

    def slowest(self, layers: Iterable[int]) -> set[int]:
        """Return the members with the fewest rounds of layers, for which others wait."""
        found: set[int] = set()
        for state in map(self.layers.__getitem__, layers):
            clocks = {member: state.clocks.get(member, 0) for member in self._active(state)}
            least = min(clocks.values(), default=0)
            found |= {member for member, clock in clocks.items() if clock == least}
        return found

    def content(self) -> dict[str, Any]:
        """Return the state in dicts, lists, tensors and numbers."""
        layers = {layer: layer_content(state) for layer, state in self.layers.items()}
        return {"layers": layers, "counted": dict(self.counted)}

    def adopt(self, content: Mapping[str, Any]) -> None:
        """Continue from another server's :meth:`content`."""
        self.layers = {int(k): layer_of(x) for k, x in content["layers"].items()}
        self.counted = {int(k): bool(x) for k, x in content["counted"].items()}


def layer_content(state: LayerState) -> dict[str, Any]:
    """Return a layer's state in dicts, lists, tensors and numbers."""
    outer = state.outer
    return {
        "names": list(state.names),
        "values": outer.values,
        "momentum": outer.momentum,
        "collected": outer.collected,
        "fraction": outer.fraction,
        "revision": state.revision,
        "pending": {m: [change.weight, *change.tensors] for m, change in state.pending.items()},
        "clocks": state.clocks,
        "begins": state.begins,
        "weights": state.weights,
        "numbers": state.numbers,
        "place": list(state.place),
        "credits": [list(interval) for interval in state.credits],
    }


def layer_of(content: Mapping[str, Any]) -> LayerState:
    """Return the state of a :func:`layer_content`."""
    outer = OuterState(
        list(content["values"]),
        list(content["momentum"]),
        list(content["collected"]),
        float(content["fraction"]),
    )
    pending = {m: Change(float(w), tensors) for m, (w, *tensors) in content["pending"].items()}
    begins = {int(member): int(after) for member, after in content["begins"].items()}
    state = LayerState(tuple(content["names"]), outer, pending=pending, begins=begins)
    _adopt(state, content)
    return state


def _adopt(state: LayerState, content: Mapping[str, Any]) -> None:
    """Take what is no tensor from a :func:`layer_content`, or from its form in JSON."""
    epoch, loop = content["place"]
    state.revision, state.place = int(content["revision"]), (int(epoch), int(loop))
    state.clocks = {int(member): int(x) for member, x in content["clocks"].items()}
    state.weights = {int(member): float(x) for member, x in content["weights"].items()}
    state.numbers = {int(member): int(x) for member, x in content["numbers"].items()}
    spans = content["credits"]
    state.credits = IntervalSet((int(start), int(stop)) for start, stop in spans)


def restored(content: Mapping[str, Any]) -> LayerState:
    """Return a layer from a file: of the next generation, without members. Their pending changes
    are credited, so they stay for the next step.
    """
    state = layer_of(content)
    state.clocks, state.begins, state.weights, state.numbers = {}, {}, {}, {}
    state.revision = (state.revision // GENERATION + 1) * GENERATION
    return state
