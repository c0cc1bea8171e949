"""What one server holds, and the operations on it.

Operations are plain data, so that a server can send them to the next one, which applies them to its
copy. They are deterministic, and a repeated one has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .compression import Quantized
from .key_range import KeyRange, Place, Push, Step
from .ledger import Credits, Ledger
from .options import AUTO, OuterSGD
from .outer_step import Share
from .transport import Message, flattened, unflattened


class Shard:
    """A range of keys, and on the first server the ledger.

    Args:
        options: A job's options (:meth:`~pipollux_hybrid.push_pull.options.PushPull
            .to_json_object`).
        has_ledger: Whether this server has it.
    """

    def __init__(self, options: Mapping[str, Any], *, has_ledger: bool) -> None:
        self.options = dict(options)
        stale = options["max_staleness"]
        bound = math.inf if stale is None else float(stale)
        least = 1 if options["quorum"] is None and bound > 0 else options["quorum"]
        self.keys = KeyRange(OuterSGD(**options["outer_optimizer"]), least, bound)
        self.ledger: Ledger | None = None
        if has_ledger:
            every = None if options["sync_every"] == AUTO else int(options["sync_every"])
            adapts = bool(options["adapt_to_speed"])
            self.ledger = Ledger(every, lockstep=bound == 0, adapts=adapts)

    def apply(self, message: Message) -> Message:
        """Apply an operation; a RejectedError or a ValueError has no effect."""
        operation: Callable[[Message], Message] = getattr(self, f"_op_{message.header['op']}")
        return operation(message)

    def _op_init(self, message: Message) -> Message:
        groups = unflattened(message.header["counts"], message.tensors)
        names = message.header["names"]
        revisions = {key: self.keys.init(key, names[str(key)], x) for key, x in groups.items()}
        return Message({"revisions": revisions})

    def _op_admit(self, message: Message) -> Message:
        self.keys.admit(int(message.header["member"]))
        return Message({})

    def _op_count(self, message: Message) -> Message:
        header = message.header
        after = {int(key): int(number) for key, number in header.get("after", {}).items()}
        self.keys.count({int(m): bool(on) for m, on in header["members"].items()}, after)
        return Message({})

    def _op_fence(self, message: Message) -> Message:
        place = _place(message.header["place"])
        found = self.keys.fence(int(message.header["member"]), place)
        return Message({"credits": {key: list(spans) for key, spans in found.items()}})

    def _op_push(self, message: Message) -> Message:
        header = message.header
        push = Push(
            int(header["member"]),
            int(header["number"]),
            {int(key): float(weight) for key, weight in header["weights"].items()},
            _place(header["place"]),
            {int(key): [(int(a), int(b)) for a, b in x] for key, x in header["intervals"].items()},
            {int(key): int(revision) for key, revision in header["revisions"].items()},
        )
        groups = unflattened(header["counts"], message.tensors)
        if "scales" in header:
            groups = {
                key: [
                    Quantized(x, scale).decoded(like.dtype)
                    for x, scale, like in zip(
                        several,
                        header["scales"][str(key)],
                        self.keys.layers[key].outer.values,
                        strict=True,
                    )
                ]
                for key, several in groups.items()
            }
        self.keys.push(push, groups)
        return Message({})

    def next_steps(self, shipped: Callable[[int], bool]) -> Message | None:
        """Return the steps that are due as an operation; None if there are none. Those of layers
        for which ``shipped`` is true contain what their pushes add.
        """
        due = self.keys.due()
        steps = {key: self.keys.next_step(key, complete=shipped(key)) for key in due}
        if not steps:
            return None
        sent = {key: step.share for key, step in steps.items() if step.share is not None}
        counts, tensors = flattened({key: share.tensors for key, share in sent.items()})
        fractions = {str(key): share.fraction for key, share in sent.items()}
        states = {str(key): step.state for key, step in steps.items()}
        header = {"op": "step", "states": states, "fractions": fractions, "counts": counts}
        return Message(header, tensors)

    def _op_step(self, message: Message) -> Message:
        header = message.header
        sums = unflattened(header["counts"], message.tensors)
        for key, state in header["states"].items():
            share = None
            if key in header["fractions"]:
                share = Share(float(header["fractions"][key]), sums[int(key)])
            self.keys.step(int(key), Step(share, state))
        return Message({})

    def _op_join(self, message: Message) -> Message:
        header = message.header
        given = header["replica"], header["processes"], header["num_layers"]
        if not self.book.members:
            self.book.settings = header["settings"]
        number = self.book.join(*given, header["node"], header["fragments"])
        return Message({"member": number, "place": self.book.place, **self.book.present()})

    def _op_open(self, message: Message) -> Message:
        header = message.header
        given = header["num_samples"], header["batch"], header["data"]
        place = _place(header["place"])
        reached = self.book.open(header["member"], header["stage"], place, *given)
        return Message({"place": reached})

    def _op_begin(self, message: Message) -> Message:
        return Message({"count": self.book.begin(_credits(message))})

    def _op_answer(self, message: Message) -> Message:
        header, book = message.header, self.book
        member, idle = header["member"], header["idle"]
        book.measure(member, header["batch"], header["step_time"], header["sync_time"])
        found = book.answer(member, header["turn"], header["stage"], idle=idle)
        return Message({"answer": found, "count": book.recount()})

    def _op_complete(self, message: Message) -> Message:
        header = message.header
        if self.book.place == _place(header["place"]):
            for key, intervals in header["intervals"].items():
                self.book.complete([int(key)], intervals)
        return Message({})

    def _op_lose(self, message: Message) -> Message:
        self.book.lose(message.header["member"], _credits(message))
        return Message({"count": self.book.recount()})

    def _op_go_back(self, message: Message) -> Message:
        self.book.go_back(_place(message.header["place"]))
        return Message({})

    def _op_rebuild(self, message: Message) -> Message:
        self.book.rebuild(_credits(message))
        return Message({})

    @property
    def book(self) -> Ledger:
        """The ledger; a ValueError on other servers."""
        if self.ledger is None:
            raise ValueError("only the first server has the ledger: PIPOLLUX_SERVERS differs")
        return self.ledger

    def content(self) -> dict[str, Any]:
        """Return all state in dicts, lists, tensors and numbers."""
        ledger = None if self.ledger is None else self.ledger.content()
        return {"options": self.options, "keys": self.keys.content(), "ledger": ledger}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Shard:
        """Return the state of a :meth:`content`."""
        shard = cls(content["options"], has_ledger=content["ledger"] is not None)
        shard.keys.adopt(content["keys"])
        if content["ledger"] is not None:
            shard.ledger = Ledger.of(content["ledger"])
        return shard


def layers_to_pull(shard: Shard, layers: Iterable[int]) -> Message:
    """Return the current parameters of layers, with their revisions and rounds."""
    states = {key: shard.keys.layers[key] for key in layers}
    tensors = [x for state in states.values() for x in state.outer.values]
    counts = {str(key): len(state.outer.values) for key, state in states.items()}
    revisions = {str(key): state.revision for key, state in states.items()}
    # The reply is sent later, and steps change parameters in place.
    copies = [torch.clone(x) for x in tensors]
    rounds = {str(key): number for key, number in shard.keys.rounds(states).items()}
    return Message({"counts": counts, "revisions": revisions, "rounds": rounds}, copies)


def _credits(message: Message) -> Credits:
    return {int(key): spans for key, spans in message.header["credits"].items()}


def _place(given: Any) -> Place:
    epoch, loop = given
    return int(epoch), int(loop)
