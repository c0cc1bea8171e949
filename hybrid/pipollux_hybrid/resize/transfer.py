"""Transfer of a job's states from replicas that have them to replicas that do not.

The leader sends all replicas a list of tensors (:mod:`~pipollux_hybrid.resize.skeleton`). Receivers
allocate memory, or use their own parameters of the same kinds, and reply whether they accept the
states. Then all senders of a tensor send pieces of it (:mod:`~pipollux_hybrid.resize.pieces`), and
no replica makes another copy. A state without tensors is sent as the bytes that it saves.

Joining replicas receive all of this before the vote on the new membership, over its groups: if
anything fails, the surviving replicas continue unchanged.
"""

from __future__ import annotations

import io
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipollux_hybrid.checkpoint.state import State
from pipollux_hybrid.errors import CheckpointError, SynchronizationError
from pipollux_hybrid.job.groups import ReplicaGroup
from pipollux_perfmodel.errors import PipolluxError

from .pieces import Memory, Piece, Route, make_plan
from .skeleton import Kind, Spare, fill, find_room, take_apart

__all__ = ["RefusedError", "Route", "Sent", "Taken", "outline", "pack", "prepare", "send", "take"]

_LOG = logging.getLogger(__name__)
PATIENCE = 10.0
"""Timeout of a piece or a reply in seconds."""
IN_FLIGHT = 4
"""Concurrent sends, or receives, of a replica."""
BYTES = "bytes"
SKELETON = "skeleton"


class RefusedError(PipolluxError):
    """Why a replica does not accept the states of others, one sentence."""


@dataclass(frozen=True)
class Sent:
    """The states that a replica sends; only those that are equal on all, unless it leads."""

    states: dict[str, tuple[str, Any]]
    """For each state the index of its bytes among the tensors, or its skeleton."""
    tensors: list[Tensor]
    equal: list[bool]
    """For each tensor, whether all senders have it."""

    def header(self, route: Route) -> dict[str, Any]:
        """Return the message that precedes the tensors."""
        kinds = [(*Kind.of(x), same) for x, same in zip(self.tensors, self.equal, strict=True)]
        return {"route": tuple(route), "states": self.states, "tensors": kinds}


@dataclass(frozen=True)
class Taken:
    """States that a replica has received."""

    states: Mapping[str, tuple[str, Any]]
    tensors: Sequence[Tensor]

    def adopt(self, states: Mapping[str, State]) -> None:
        """Replace the states; a SynchronizationError if one refuses its content."""
        for name, (form, value) in self.states.items():
            try:
                if form == SKELETON:
                    states[name].adopt(fill(value, self.tensors))
                else:
                    content = b"" if value is None else self.tensors[value].numpy().tobytes()
                    states[name].load(io.BytesIO(content))
            except CheckpointError as error:
                raise SynchronizationError(f"this replica cannot join: {name}: {error}") from error


def pack(states: Mapping[str, State], *, leads: bool) -> Sent:
    """Return the states that a replica sends, which a `sync` has made equal on all. The leader of
    the route also sends states that one sender suffices for. Raises a CheckpointError if one cannot
    be saved.
    """
    sent = Sent({}, [], [])
    for name, state in states.items():
        if leads or state.equal:
            try:
                sent.states[name] = _pack(state, sent.tensors, leads=leads)
            except Exception as error:  # a state's save is the script's own code
                raise CheckpointError(f"the state {name} cannot be saved: {error}") from error
        shared = state.equal and name in sent.states and sent.states[name][0] == SKELETON
        sent.equal.extend([shared] * (len(sent.tensors) - len(sent.equal)))
    return sent


def _pack(state: State, tensors: list[Tensor], *, leads: bool) -> tuple[str, Any]:
    content = state.content()
    if content is not None:
        return SKELETON, take_apart(content, tensors)
    if not leads:
        return BYTES, None
    saved = io.BytesIO()
    state.save(saved)
    buffer = saved.getbuffer()  # which is not copied
    if not len(buffer):
        return BYTES, None
    tensors.append(torch.frombuffer(buffer, dtype=torch.uint8))
    return BYTES, len(tensors) - 1


def send(control: ReplicaGroup, rank: int, sent: Sent, route: Route) -> None:
    """Send states to the replicas that call :func:`take`; all senders of a route call it.

    Raises:
        RefusedError: A replica does not accept them, or has other states.
        RuntimeError: A replica is gone, or too slow.
    """
    kinds, equal = _kinds(_tell(control, rank, route.senders[0], sent.header(route)))
    theirs = [kind for kind, same in zip(kinds, equal, strict=True) if same]
    ours = [x for x, same in zip(sent.tensors, sent.equal, strict=True) if same]
    alike = theirs == [Kind.of(tensor) for tensor in ours]
    _answer(control, "" if alike else f"replica {rank} has other tensors than {route.senders[0]}")
    shared = iter(ours)
    others = iter(x for x, same in zip(sent.tensors, sent.equal, strict=True) if not same)
    nothing = torch.empty(0)
    memory = Memory([next(shared) if same else next(others, nothing) for same in equal])
    flow = _Flow(control)
    for piece in make_plan([kind.size for kind in kinds], equal, route):
        if piece.source == rank:
            flow.send(memory.read(piece), piece.owner)
    flow.finish()


def outline(states: Mapping[str, State]) -> bytes:
    """Return the input of :func:`prepare`, by states equal on all; in any thread."""
    buffer = io.BytesIO()
    try:
        sent = pack(states, leads=False)
        kinds = [tuple(Kind.of(tensor)) for tensor in sent.tensors]
        torch.save({"states": sent.states, "kinds": kinds}, buffer)
    except Exception as error:  # the optimizer's state may be created at this moment
        _LOG.debug("nobody can make room for the states: %s", error)
        return b""
    return buffer.getvalue()


def prepare(told: bytes, states: Mapping[str, State], seconds: float) -> Spare:
    """Return memory for the tensors of :func:`outline`, which takes longer to allocate than to
    fill, within ``seconds``; none for tensors that are overwritten in ``states``.
    """
    began_at = time.monotonic()
    header = torch.load(io.BytesIO(told), weights_only=True)
    kinds = [Kind(*kind) for kind in header["kinds"]]
    spare: Spare = {}
    room = _own_room(states, header["states"], kinds)
    for number, kind in enumerate(kinds):
        if number not in room and time.monotonic() - began_at < seconds:
            spare.setdefault(kind, []).append(kind.make().zero_())
    return spare


def take(
    control: ReplicaGroup,
    rank: int,
    states: Mapping[str, State],
    leader: int = 0,
    spare: Spare | None = None,
) -> Taken:
    """Receive states; all receivers of a route call it. This replica's tensors in ``states`` are
    overwritten; ``spare`` is memory allocated by :func:`prepare`.

    Raises:
        RefusedError: A replica does not accept the states.
        RuntimeError: A replica is gone, or too slow.
    """
    header = _tell(control, rank, leader, None)
    kinds, equal = _kinds(header)
    _answer(control, _fault(states, header["states"], kinds))
    room = _own_room(states, header["states"], kinds)
    ready = {kind: list(tensors) for kind, tensors in (spare or {}).items()}
    tensors = [
        room[number] if number in room else ready[kind].pop() if ready.get(kind) else kind.make()
        for number, kind in enumerate(kinds)
    ]
    route = Route(*header["route"])
    plan = make_plan([kind.size for kind in kinds], equal, route)
    _receive(control, rank, plan, Memory(tensors), [x for x in route.receivers if x != rank])
    for tensor in room.values():
        torch.autograd.graph.increment_version(tensor)
    return Taken(header["states"], tensors)


def _own_room(
    states: Mapping[str, State], sent: Mapping[str, tuple[str, Any]], kinds: Sequence[Kind]
) -> dict[int, Tensor]:
    room: dict[int, Tensor] = {}
    for name, (form, skeleton) in sent.items():
        if form == SKELETON and name in states:
            room |= find_room(skeleton, states[name].content(), kinds)
    return room


class _Flow:
    def __init__(self, control: ReplicaGroup) -> None:
        self._control = control
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, content: Tensor, rank: int) -> None:
        """Begin to send bytes, which are kept alive until they are sent."""
        while len(self._under_way) >= IN_FLIGHT:
            self._wait()
        self._under_way.append((self._control.start_send(content, rank), content))

    def finish(self) -> None:
        """Wait until all is sent."""
        while self._under_way:
            self._wait()

    def _wait(self) -> None:
        work, _ = self._under_way.popleft()
        self._control.wait(work, PATIENCE)


def _receive(
    control: ReplicaGroup, rank: int, plan: Sequence[Piece], memory: Memory, others: Sequence[int]
) -> None:
    under_way: deque[tuple[Piece, Tensor, Any]] = deque()
    handed_on = _Flow(control)

    def finish_one() -> None:
        piece, content, work = under_way.popleft()
        control.wait(work, PATIENCE)
        for other in others if piece.owner == rank else ():
            handed_on.send(content, other)
        memory.write(piece, content)

    for piece in plan:
        if len(under_way) == IN_FLIGHT:
            finish_one()
        content = memory.room(piece)
        source = piece.source if piece.owner == rank else piece.owner
        under_way.append((piece, content, control.start_receive(content, source)))
    while under_way:
        finish_one()
    handed_on.finish()


def _tell(
    control: ReplicaGroup, rank: int, leader: int, header: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the leader's header in all replicas."""
    content = torch.empty(0, dtype=torch.uint8)
    if rank == leader:
        saved = io.BytesIO()
        torch.save(header, saved)
        content = torch.frombuffer(saved.getbuffer(), dtype=torch.uint8)
    length = int(control.all_gather(torch.tensor([len(content)]), PATIENCE)[leader])
    if rank == leader:
        flow = _Flow(control)
        for other in range(control.size):
            if other != leader:
                flow.send(content, other)
        flow.finish()
        assert header is not None  # noqa: S101  # the leader has one
        return header
    content = torch.empty(length, dtype=torch.uint8)
    control.wait(control.start_receive(content, leader), PATIENCE)
    found = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
    assert isinstance(found, dict)  # noqa: S101  # as it was sent
    return found


def _kinds(header: Mapping[str, Any]) -> tuple[list[Kind], list[bool]]:
    kinds = [Kind(*kind) for *kind, _ in header["tensors"]]
    return kinds, [same for *_, same in header["tensors"]]


def _answer(control: ReplicaGroup, refusal: str) -> None:
    """Reply whether this replica accepts the states; raise a RefusedError if any refuses."""
    answers = [x.decode() for x in control.all_gather_bytes(refusal.encode(), PATIENCE)]
    found = next(filter(None, answers), None)
    if found is not None:
        raise RefusedError(found)


def _fault(
    states: Mapping[str, State], sent: Mapping[str, tuple[str, Any]], kinds: Sequence[Kind]
) -> str:
    """Return why this replica cannot accept the states; empty: it can."""
    outlines = [kind.make("meta") for kind in kinds]
    for name, (form, skeleton) in sent.items():
        try:
            if form == SKELETON:
                states[name].check(fill(skeleton, outlines))
        except CheckpointError as error:
            return f"{name}: {error}"
    return ""
