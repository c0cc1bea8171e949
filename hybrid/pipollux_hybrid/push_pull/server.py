"""A server: owns a range of layers with their outer optimizer, as ps-lite's servers own key ranges.

::

    replicas ──push, pull──▶ server i ──operation──▶ server i + 1, with a copy of i's range
    replicas ──leases──────▶ server 0 ──who takes part──▶ all servers

An operation is confirmed once the next server has applied it to its copy, too. Pushes are sent on
together, as the step that they make, so that a copy costs the network one push and not one of each
replica: until then the replica keeps its push, and sends it again if the server does not know it.
A replica beside the copy pulls from there, and lays its push down there first, for the server to
say when it counts. With two replicas, the other push is sent on as it comes: a round then takes the
network as long as one push, and not a push and a step::

    replica 0 ─push─▶ server 0 ─the push────────────▶ server 1, with the copy
    replica 1 ─push─▶ server 0 ─"that push counts"──▶ server 1 ◀─the push─ replica 1

A server that is started again takes its range from the copy, and continues as if it had only been
slow. Where no other server holds it, it is read from the folder, as of the last save: replicas then
have to join again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipollux_hybrid.errors import PipolluxError

from .agreement import check_options, check_parameters, check_settings
from .kept_state import KeptState
from .key_range import FENCED, ROUND_OVER, RejectedError
from .ledger import replica_of
from .liveness import Liveness
from .packing import packed, unpacked
from .shard import Shard, layers_to_pull
from .transport import (
    Connection,
    Listener,
    Message,
    ServerError,
    end,
    start_authenticator,
    unflattened,
)
from .waiting_pushes import KeptBack, LaidDown

LONG_POLL = 10.0
"""Seconds after which a request that waits for others is answered without a result."""
LOST_AFTER = 15.0
"""Seconds without a heartbeat after which a replica is lost."""
LATE = 60.0
"""Seconds that a job's first loop waits for replicas that have not joined."""
UNUSED = 3.0
"""Seconds without a replica until a server that should end then ends: the others may still have
something to say to it."""
PATIENCE = 1800.0
"""Seconds that a server waits for another one."""
BETWEEN_SERVERS = frozenset({"copy", "lend", "replace", "forward", "lay_down"})
"""Requests of the servers beside this one, answered also before it is ready."""
MAY_STEP = frozenset({"push", "count", "fence"})
"""Operations after which an outer step may be due."""
AMONG_ALL = frozenset({"admit", "count", "fence"})
"""Operations of the first server on all of them."""
NO_STATE = "no copy of this range"
WITHOUT_STATE = (
    "the servers were started again without their state: start them with --directory, and all "
    "replicas again, from their checkpoints"
)

WITHOUT_LAYERS = (
    "the servers' folder has the state of a training, but not of layer {layers}: put back all of "
    "its files, or start the servers with an empty one"
)


class Server:
    """One of a job's servers.

    Args:
        index: Which one of ``addresses`` it is.
        addresses: Host and port of each server.
        token: The job's token.
        folder: Where its state is kept; None: nowhere.
        lost_after: Seconds after which a silent replica is lost.
        save_every: Seconds between two saves.
    """

    def __init__(
        self,
        index: int,
        addresses: Sequence[str],
        token: str,
        folder: Path | None = None,
        *,
        lost_after: float = LOST_AFTER,
        save_every: float = 60.0,
    ) -> None:
        self.index, self.addresses, self._token = index, list(addresses), token
        self._kept, self._lost_after, self._save_every = KeptState(folder), lost_after, save_every
        self.shard: Shard | None = None
        """None before the job's first replica has joined."""
        self._held: Shard | None = None
        """Of the previous server."""
        self._kept_back, self._laid_down = KeptBack(), LaidDown()
        self._lock, self._ledger_lock = asyncio.Lock(), asyncio.Lock()
        self._changed = asyncio.Condition()
        self._version = 0
        """Counts changes that requests may wait for."""
        self._others: dict[int, Connection] = {}
        self._liveness = Liveness(lost_after)
        """Of the members, on the first server."""
        self._expected, self._first_join = 1, 0.0
        self.ready = asyncio.Event()
        self._last_use = False
        """Whether to end once no replica is left."""

    async def run(self, host: str, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then save."""
        import zmq.asyncio

        context = zmq.asyncio.Context()
        authenticator = start_authenticator(context, self._token)
        port = int(self.addresses[self.index].rpartition(":")[2])
        handlers = self._handle, self._liveness.broken
        listener = Listener(context, host, port, self._token, *handlers)
        for index, address in enumerate(self.addresses):
            if index != self.index:
                self._others[index] = Connection(context, f"server {index}", address, self._token)
                self._others[index].start()
        tasks = [asyncio.ensure_future(x) for x in (listener.run(), self._live(), stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await listener.close()
            for other in self._others.values():
                await other.close()
            authenticator.stop()
            self._save()
            end(context)

    def end_when_unused(self) -> None:
        """End once no replica is left."""
        self._last_use = True

    async def _live(self) -> None:
        """Recover this server's state, then watch the replicas and save, until it is unused."""
        await self._recover()
        async with self._ledger_lock:
            self.ready.set()
            await self._repeat_counts()
        saved = used = time.monotonic()
        while True:
            await self._pause(min(1.0, self._lost_after / 5.0))
            if not self._last_use or (self.shard is not None and self.shard.keys.counted):
                used = time.monotonic()
            elif time.monotonic() - used >= UNUSED:
                return
            if self.index == 0:
                with suppress(ServerError):  # a server without state: members join again
                    await self._lose_silent()
            if time.monotonic() - saved >= self._save_every:
                async with self._lock:
                    self._save()
                saved = time.monotonic()

    async def _pause(self, seconds: float) -> None:
        """Sleep; if this process was stopped or busy meanwhile, no replica was silent."""
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self._liveness.forgive(time.monotonic() - began - seconds)

    async def _recover(self) -> None:
        """Take this server's range from the next server, if that has a copy."""
        if len(self.addresses) == 1:
            return
        following, previous = self._others[self._next], self._others[self._previous]
        await previous.call(Message({"op": "lend"}), PATIENCE)
        reply = await following.call(Message({"op": "copy"}), PATIENCE)
        if reply.header["content"] is not None:
            self.shard = Shard.of(unpacked(reply))
            if self.shard.ledger is not None:
                for member in self.shard.ledger.members:
                    self._liveness.hear(member)
            async with self._lock:  # a step may have been due when the server ended
                await self._step(self.shard)

    async def _repeat_counts(self) -> None:
        """Tell all servers who takes part, which this one may have been about to do as it ended."""
        if self.index == 0 and self.shard is not None:
            members = self.shard.book.members
            counts = {number: member.counted for number, member in members.items()}
            with suppress(ServerError):  # a server without state: members join again
                await self._recount(Message({"count": counts}))

    @property
    def _next(self) -> int:
        return (self.index + 1) % len(self.addresses)

    @property
    def _previous(self) -> int:
        return (self.index - 1) % len(self.addresses)

    async def _handle(self, message: Message) -> Message:
        operation = str(message.header.get("op"))
        try:
            if operation in BETWEEN_SERVERS:
                reply: Message = await getattr(self, f"_on_{operation}")(message)
                return reply
            await asyncio.wait_for(self.ready.wait(), PATIENCE)
            return await self._serve(operation, message)
        except (PipolluxError, ValueError) as error:
            return Message({"error": str(error)})
        except (KeyError, TypeError, IndexError) as error:
            what = f"{operation!r} ({type(error).__name__}: {error})"
            return Message(
                {"error": f"a server does not understand {what}: use one version everywhere"}
            )

    # What the servers beside this one ask.

    async def _on_lend(self, message: Message) -> Message:  # noqa: ARG002  # as the other handlers
        """Send a copy of this server's range to the next server, which has begun anew."""
        async with self._lock:
            await self._send_copy()
        return Message({})

    async def _on_copy(self, message: Message) -> Message:  # noqa: ARG002  # as the other handlers
        """Return the held copy, to the server whose range it is."""
        return Message({"content": None}) if self._held is None else packed(self._held.content())

    async def _on_replace(self, message: Message) -> Message:
        self._held = Shard.of(unpacked(message))
        return Message({})

    async def _on_forward(self, message: Message) -> Message:
        if self._held is None:
            return Message({"error": NO_STATE})
        tensors = message.tensors
        if message.header.get("laid_down"):
            found = self._laid_down.take(message)
            if found is None:
                return Message({"lacks": True})
            tensors = found
        inner = Message({**message.header, "op": message.header["inner"]}, tensors)
        # Refused here is refused there, too: operations are deterministic.
        with suppress(RejectedError, ValueError):
            self._held.apply(inner)
        await self._notify()
        return Message({})

    async def _on_lay_down(self, message: Message) -> Message:
        """Keep a push to the previous server, until that says when it counts."""
        if self._held is not None:
            self._laid_down.add(message, self._held.keys.counted)
        return Message({})

    async def _apply(self, message: Message) -> Message:
        """Apply an operation to the copy and to the range, and wake requests that wait."""
        own, operation = self._own, message.header["op"]
        async with self._lock:
            if operation == "fence":
                await self._send_kept_back(int(message.header["member"]))
            await self._forward(message)
            reply = own.apply(message)
            if operation in MAY_STEP:
                await self._step(own)
        # Requests that wait would wake each other without end by answers that change nothing.
        if operation != "answer" or reply.header["count"] or reply.header["answer"] is not None:
            await self._notify()
        return reply

    async def _push(self, message: Message) -> Message:
        """Accept changes of layers; ``kept_back`` in the reply: the next server has not got them,
        and the replica has to ask until it has ("settle").
        """
        if not self._others:
            return await self._apply(message)
        if message.header["at_once"]:
            return await self._apply(await self._sent_ahead(message))
        own, member = self._own, int(message.header["member"])
        async with self._lock:
            own.apply(message)
            self._kept_back.add(message)
            await self._step(own)
        await self._notify()
        return Message({"kept_back": self._kept_back.has(member)})

    async def _sent_ahead(self, message: Message) -> Message:
        """Send a push to the next server, so that other operations do not wait for it."""
        header = {**message.header, "op": "lay_down"}
        if not message.header.get("laid_down"):
            await self._others[self._next].call(Message(header, message.tensors), PATIENCE)
        return Message({**message.header, "laid_down": True}, message.tensors)

    async def _settle(self, message: Message) -> Message:
        """Return whether pushes of layers are known, once the next server has got them."""
        header = message.header
        layers = {int(layer): int(number) for layer, number in header["layers"].items()}

        async def attempt() -> Any:
            return self._own.keys.settled(int(header["member"]), layers)

        found = await self._until(attempt)
        if found is None:
            return _waiting(self._own.keys.slowest(layers), int(header["member"]))
        return Message({"known": found})

    async def _step(self, own: Shard) -> None:
        """Take the outer steps that are due, on the copy first."""
        kept_back, layers = self._kept_back.layers(), own.keys.layers

        def shipped(key: int) -> bool:
            return any((member, key) in kept_back for member in layers[key].pending)

        steps = own.next_steps(shipped)
        if steps is not None:
            await self._forward(steps)
            own.apply(steps)
        self._kept_back.keep_pending(lambda member, layer: member in layers[layer].pending)

    async def _send_kept_back(self, member: int) -> None:
        """Send pushes of a member on whose replica cannot send them again."""
        for message in self._kept_back.pop(member):
            await self._forward(message)

    async def _notify(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    async def _forward(self, message: Message) -> None:
        if not self._others:
            return
        following = self._others[self._next]
        header = {**message.header, "op": "forward", "inner": message.header["op"]}
        try:
            tensors = () if message.header.get("laid_down") else message.tensors
            reply = await following.call(Message(header, tensors), PATIENCE)
            if "lacks" in reply.header:
                header["laid_down"] = False
                await following.call(Message(header, message.tensors), PATIENCE)
        except ServerError as error:
            if str(error) != NO_STATE:
                raise
            await self._send_copy()
            await self._forward(message)

    async def _send_copy(self) -> None:
        if self.shard is not None and self._others:
            header, tensors = packed(self.shard.content())
            following = self._others[self._next]
            await following.call(Message({**header, "op": "replace"}, tensors), PATIENCE)

    @property
    def _own(self) -> Shard:
        if self.shard is None:  # it was started again, and does not know the replicas
            raise RejectedError(FENCED)
        return self.shard

    # What replicas ask.

    async def _serve(self, operation: str, message: Message) -> Message:
        if operation in AMONG_ALL:
            return await self._apply(message)
        handlers = {
            "join": self._join,
            "init": self._init,
            "beat": self._beat,
            "leave": self._leave,
            "open": self._open,
            "answer": self._answer,
            "complete": self._complete,
            "push": self._push,
            "settle": self._settle,
            "pull": self._pull,
            "configure": self._configure,
            "credits": self._credits,
            "rounds": self._rounds,
            "reached": self._reached,
        }
        if operation not in handlers:
            raise ValueError(f"a server does not know {operation!r}: use one version everywhere")
        return await handlers[operation](message)

    async def _configure(self, message: Message) -> Message:
        """Begin with a job's options, or compare them."""
        options = message.header["options"]
        index, count = message.header["place_in_list"]
        if (index, count) != (self.index, len(self.addresses)):
            raise ValueError(
                f"this server is number {self.index} of {len(self.addresses)}, and the replica "
                f"takes it for number {index} of {count}: set PIPOLLUX_SERVERS to the same "
                "addresses, in the same order, on all servers and replicas"
            )
        async with self._lock:
            if self.shard is None:
                book = self._kept.ledger() if self.index == 0 else None
                if message.header["again"] and self._kept.is_empty:
                    raise ValueError(WITHOUT_STATE)
                self.shard = Shard(options, has_ledger=self.index == 0)
                if book is not None:
                    self.shard.ledger = book.with_options_of(self.shard.book)
                await self._send_copy()
        check_options(self._own.options, options)
        return Message({})

    async def _init(self, message: Message) -> Message:
        """Create layers from the first replica's parameters, or from what was kept of them."""
        keys = [int(key) for key in message.header["counts"]]
        async with self._lock:
            missing = [key for key in keys if key not in self._own.keys.layers]
            kept = {key: state for key in missing if (state := self._kept.layer(key)) is not None}
            values = unflattened(message.header["counts"], message.tensors)
            known = {**self._own.keys.layers, **kept}
            check_parameters(message.header["names"], values, known, kept)
            self._own.keys.layers |= kept
            if len(kept) < len(missing):
                # A server was killed during its first save. The replica has trained meanwhile.
                if message.header["again"]:
                    raise ValueError(WITHOUT_STATE)
                if self._kept.has_begun():
                    layers = ", ".join(str(key) for key in missing if key not in kept)
                    raise ValueError(WITHOUT_LAYERS.format(layers=layers))
            if kept:
                await self._send_copy()
        return await self._apply(message)

    async def _join(self, message: Message) -> Message:
        """Accept a replica; one that was started again takes the place of its former self."""
        replica, former = message.header["replica"], int(message.header["former"])
        async with self._ledger_lock:
            await self._go_back_if_behind()
            members = self._own.book.members
            if any(x.replica != replica for x in members.values()):
                check_settings(replica, self._own.book.settings, message.header["settings"])
            for member in [number for number, x in members.items() if x.replica == replica]:
                if former not in (0, member):
                    raise ValueError(
                        f"replica {replica} was started a second time, which goes on: give each "
                        "replica a PIPOLLUX_REPLICA of its own, and end this one"
                    )
                _say(f"replica {replica} joins again")
                await self._fence(member)
            reply = await self._apply(message)
            member = int(reply.header["member"])
            self._liveness.hear(member)
            if len(self._own.book.members) == 1:
                self._first_join = time.monotonic()
            self._expected = max(self._expected, int(message.header["expected"]))
            await self._tell({"op": "admit", "member": member})
        return reply

    async def _go_back_if_behind(self) -> None:
        """Go back to a loop that layers lack samples of, as their server was restored from files
        that are older than the ledger.
        """
        book = self._own.book
        found = await self._gather({"op": "reached"}, self._reached, "reached")
        reached = {int(key): ((int(e), int(n)), int(count)) for key, (e, n, count) in found.items()}
        place = book.earlier_place(reached)
        if place is None:
            return
        _say(f"some layers were saved in loop {place[1]} of epoch {place[0]}: replicas go on there")
        for member in list(book.members):
            await self._fence(member)
        await self._apply(Message({"op": "go_back", "place": place}))

    async def _beat(self, message: Message) -> Message:
        member = int(message.header["member"])
        if member not in self._own.book.members:
            raise RejectedError(FENCED)
        self._liveness.hear(member, message.header["via"])
        return Message({})

    async def _leave(self, message: Message) -> Message:
        await self._lose(int(message.header["member"]))
        return Message({})

    async def _open(self, message: Message) -> Message:
        async with self._ledger_lock:
            return await self._apply(message)

    async def _complete(self, message: Message) -> Message:
        async with self._ledger_lock:
            return await self._apply(message)

    async def _answer(self, message: Message) -> Message:
        """Answer a request for positions, once they are there."""
        self._liveness.hear(int(message.header["member"]))

        async def attempt() -> Any:
            async with self._ledger_lock:
                await self._begin_if_due()
                reply = await self._apply(message)
                await self._recount(reply)
                if reply.header["answer"] is None and self._ends():
                    reply = await self._verify_end(message)
            return reply.header["answer"]

        found = await self._until(attempt)
        if found is None:
            return _waiting(self._own.book.busy(), int(message.header["member"]))
        return Message({"answer": found})

    async def _pull(self, message: Message) -> Message:
        """Return layers' parameters, once the member's own push is included and the slowest member
        is close enough; with ``copy`` those of the previous server, if this one has them.
        """
        member, copied = int(message.header["member"]), bool(message.header["copy"])
        layers = {int(layer): int(after) for layer, after in message.header["layers"].items()}
        began = time.monotonic()

        async def attempt() -> Any:
            shard = self._held if copied else self._own
            if shard is None or (copied and member not in shard.keys.counted):
                return NO_STATE
            if member not in shard.keys.counted:
                raise RejectedError(FENCED)
            near = (shard.keys.may_pull(layer, member, after) for layer, after in layers.items())
            return shard if all(near) else None

        found = await self._until(attempt)
        if found is NO_STATE:
            return Message({"none": True})
        if found is None:
            return _waiting(self._own.keys.slowest(layers) if not copied else (), member)
        header, tensors = layers_to_pull(found, layers)
        return Message({**header, "waited": time.monotonic() - began}, tensors)

    async def _until(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """Return the first result of attempts at each change; None after a long poll."""
        deadline = time.monotonic() + LONG_POLL
        while True:
            version = self._version
            found = await attempt()
            left = deadline - time.monotonic()
            if found is not None or left <= 0.0:
                return found
            async with self._changed:
                with suppress(asyncio.TimeoutError):  # also for what depends on the time alone
                    if self._version == version:
                        await asyncio.wait_for(self._changed.wait(), min(left, 1.0))

    def _ends(self) -> bool:
        book = self._own.book
        idle = all(member.idle for member in book.members.values())
        return book.begun and idle and book.is_over()

    async def _verify_end(self, message: Message) -> Message:
        """Confirm the end of a loop with what the layers have; else the rest is leased again."""
        found = await self._gather_credits()
        book = self._own.book
        whole = [[0, book.num_samples]]
        complete = all(found.get(str(key), whole) == whole for key in range(book.num_layers))
        if not complete:
            await self._apply(Message({"op": "rebuild", "credits": found}))
        return await self._apply(message)

    async def _begin_if_due(self) -> None:
        """Begin a loop that all members have reached."""
        book = self._own.book
        late = time.monotonic() - self._first_join > LATE
        if book.may_begin(1 if late else self._expected):
            self._expected = 1
            found = await self._gather_credits()
            await self._recount(await self._apply(Message({"op": "begin", "credits": found})))

    async def _recount(self, reply: Message) -> None:
        """Tell all servers for which members rounds wait, after a change of it."""
        count = {int(member): bool(on) for member, on in reply.header["count"].items()}
        while count:
            after = await self._rounds_to_begin_after(count)
            told = {"op": "count", "members": {str(m): on for m, on in count.items()}}
            try:
                await self._tell({**told, "after": after})
                return
            except (RejectedError, ServerError) as error:
                if str(error) != ROUND_OVER:
                    raise
            await self._tell({**told, "members": {str(m): False for m in count}})

    async def _rounds_to_begin_after(self, count: Mapping[int, bool]) -> dict[str, int]:
        """Return the round of each layer after which members begin that are counted from now on.

        It is equal for the layers of a fragment. A round may have ended on one server and be under
        way on another, as when that was started again::

            server 0   round 7 ended     the new member begins in round 8
            server 1   round 6 ended     round 7 does not wait for it, round 8 does
        """
        book = self._own.book
        begin = [book.members[member] for member, on in count.items() if on]
        if not (begin and book.lockstep):
            return {}
        found = await self._gather({"op": "rounds"}, self._rounds, "rounds")
        for keys in (map(str, keys) for member in begin for keys in member.fragments):
            known = [key for key in keys if key in found]
            found |= dict.fromkeys(known, max((found[key] for key in known), default=0))
        return found

    async def _tell(self, header: Mapping[str, Any]) -> list[Message]:
        """Apply an operation on all servers."""
        message = Message(dict(header))
        others = [other.call(message, PATIENCE) for other in self._others.values()]
        replies = await asyncio.gather(self._apply(message), *others, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return [reply for reply in replies if isinstance(reply, Message)]

    async def _gather_credits(self) -> dict[str, Any]:
        """Return what each layer was trained on in the ledger's loop."""
        header = {"op": "credits", "place": self._own.book.place}
        return await self._gather(header, self._credits, "credits")

    async def _gather(
        self, header: Mapping[str, Any], own: Callable[[Message], Awaitable[Message]], name: str
    ) -> dict[str, Any]:
        """Return what all servers say of their layers."""
        message = Message(dict(header))
        others = [other.call(message, PATIENCE) for other in self._others.values()]
        replies = await asyncio.gather(own(message), *others)
        return {key: x for reply in replies for key, x in reply.header[name].items()}

    async def _rounds(self, message: Message) -> Message:  # noqa: ARG002  # as the other handlers
        keys = self._own.keys
        rounds = keys.rounds(keys.layers)
        return Message({"rounds": {str(key): number for key, number in rounds.items()}})

    async def _reached(self, message: Message) -> Message:  # noqa: ARG002  # as the other handlers
        layers = self._own.keys.layers.items()
        found = {str(key): [*state.place, len(state.credits)] for key, state in layers}
        return Message({"reached": found})

    async def _credits(self, message: Message) -> Message:
        epoch, loop = message.header["place"]
        found = self._own.keys.credits((int(epoch), int(loop)))
        return Message(
            {"credits": {str(k): [list(x) for x in spans] for k, spans in found.items()}}
        )

    async def _lose_silent(self) -> None:
        if self.shard is None:
            return
        for member, why in list(self._liveness.silent(self.shard.book.members)):
            _say(f"replica {self.shard.book.members[member].replica} is lost: {why}")
            await self._lose(member)

    async def _lose(self, member: int) -> None:
        """Fence a member on all servers, and free what it has not pushed."""
        async with self._ledger_lock:
            if member in self._own.book.members:
                await self._fence(member)

    async def _fence(self, member: int) -> None:
        """The same, for a member that there is, with the ledger's lock held."""
        place = self._own.book.place or (0, 0)
        replies = await self._tell({"op": "fence", "member": member, "place": place})
        found = {k: x for reply in replies for k, x in reply.header["credits"].items()}
        lost = {"op": "lose", "member": member, "credits": found}
        await self._recount(await self._apply(Message(lost)))
        self._liveness.forget(member)

    def _save(self) -> None:
        if self.shard is None:
            return
        try:
            self._kept.save(self.shard)
        except OSError as error:
            _say(f"the state is not saved: {error}; earlier files are untouched")


def _waiting(members: Iterable[int], member: int) -> Message:
    """Return the answer to a request of a member that waits for others."""
    return Message({"waits": sorted({replica_of(x) for x in members if x != member})})


def _say(text: str) -> None:
    print(f"pipollux server: {text}", file=sys.stderr, flush=True)
