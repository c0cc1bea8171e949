"""A server, and the next one with a copy of its range, while either is lost at any moment."""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from pipollux_hybrid.push_pull import worker as worker_module
from pipollux_hybrid.push_pull.key_range import KeyRange, Push
from pipollux_hybrid.push_pull.options import OuterSGD, PushPull
from pipollux_hybrid.push_pull.packing import packed
from pipollux_hybrid.push_pull.server import Server
from pipollux_hybrid.push_pull.transport import Message, ServerError
from pipollux_hybrid.push_pull.worker import KVWorker, is_here
from tests.extent import examples
from tests.hybrid.push_pull.jobs import PATIENCE, TOKEN, servers

OPTIONS = PushPull(sync_every=1, outer_optimizer=OuterSGD()).to_json_object()
LAYERS, MEMBERS = (0, 1), (1, 2, 3)


class LostError(Exception):
    """The server was killed here."""


class Direct:
    """A connection to a server in this process; it can end with the server that holds it."""

    def __init__(self, server: Server) -> None:
        self.server, self.ends_after = server, ""

    async def call(self, message: Message, _timeout: float = 0.0) -> Message:
        reply = await self.server._handle(message)
        if "error" in reply.header:
            raise ServerError(reply.header["error"])
        if self.ends_after and self.ends_after in (
            message.header["op"],
            message.header.get("inner"),
        ):
            raise LostError
        return reply


class Pair:
    """Server 0 with two layers, and server 1 with their copy."""

    def __init__(self) -> None:
        self.last: dict[int, Message] = {}
        """Of each member, the push that no server has confirmed."""
        self.numbers = dict.fromkeys(MEMBERS, 0)
        self.fenced: set[int] = set()

    async def begin(self) -> None:
        self.servers = [self._new(index) for index in range(2)]
        self._join()
        for index, server in enumerate(self.servers):
            header = {"op": "configure", "options": OPTIONS, "again": False}
            await server._handle(Message({**header, "place_in_list": [index, 2]}))
        names = {str(layer): ["w"] for layer in LAYERS}
        header = {"op": "init", "counts": dict.fromkeys(map(str, LAYERS), 1), "names": names}
        header["again"] = False
        zeros = [torch.zeros(2, dtype=torch.float64) for _ in LAYERS]
        await self.ask(Message(header, zeros))
        for member in MEMBERS:
            await self.ask(Message({"op": "admit", "member": member}))
        await self.ask(Message({"op": "count", "members": dict.fromkeys(MEMBERS, True)}))

    def _new(self, index: int) -> Server:
        server = Server(index, ["127.0.0.1:1", "127.0.0.1:2"], TOKEN)
        server.ready.set()
        return server

    def _join(self) -> None:
        others: list[Any] = [Direct(server) for server in self.servers]
        self.servers[0]._others, self.servers[1]._others = {1: others[1]}, {0: others[0]}
        self.to_copy: Direct = others[1]

    async def ask(self, message: Message) -> Message:
        return await Direct(self.servers[0]).call(message)

    async def lose(self, index: int) -> None:
        """Start a server again, which has lost everything; replicas send again what is due."""
        self.servers[index] = self._new(index)
        self._join()
        await self.servers[index]._recover()
        for member in list(self.last):
            if not await self.is_known(member):
                await self.send(member)

    async def push(self, member: int, how: str, *, ends_after: str = "") -> None:
        """Push unless the push before waits; the server may be lost while it sends an operation."""
        if member in self.fenced or await self.waits(member):
            return
        self.numbers[member] += 1
        self.last[member] = push_of(member, self.numbers[member], how)
        self.to_copy.ends_after = ends_after
        try:
            await self.send(member)
        except LostError:
            await self.lose(0)
        self.to_copy.ends_after = ""

    async def send(self, member: int) -> None:
        header, tensors = self.last[member]
        if header.get("laid_down"):
            await Direct(self.servers[1]).call(Message({**header, "op": "lay_down"}, tensors))
        if header["copy_is_lost"]:
            self.servers[1] = self._new(1)
            self._join()
            await self.servers[1]._recover()
        reply = await self.ask(self.last[member])
        if not reply.header.get("kept_back"):
            del self.last[member]

    async def waits(self, member: int) -> bool:
        keys = self.servers[0]._own.keys
        return any(member in keys.layers[layer].pending for layer in LAYERS)

    async def is_known(self, member: int) -> bool:
        keys = self.servers[0]._own.keys
        found = keys.settled(member, dict.fromkeys(LAYERS, self.numbers[member]))
        if found:
            del self.last[member]
        return found is not False

    async def fence(self, member: int) -> None:
        if member not in self.fenced:
            self.fenced.add(member)
            self.last.pop(member, None)  # the replica has died
            await self.ask(Message({"op": "fence", "member": member, "place": (0, 0)}))


def push_of(member: int, number: int, how: str) -> Message:
    weights = {str(layer): float(member) for layer in LAYERS}
    header = {"op": "push", "member": member, "number": number, "at_once": how != "kept back"}
    header |= {"laid_down": how.startswith("laid down"), "copy_is_lost": how.endswith("lost")}
    header |= {"place": (0, 0), "weights": weights}
    header["revisions"] = dict.fromkeys(map(str, LAYERS), 0)
    header["intervals"] = {key: [span_of(member, number)] for key in weights}
    header["counts"] = dict.fromkeys(weights, 1)
    return Message(header, [change_of(member, number, layer) for layer in LAYERS])


def span_of(member: int, number: int) -> tuple[int, int]:
    return 1000 * member + number, 1000 * member + number + 1


def change_of(member: int, number: int, layer: int) -> Tensor:
    return torch.tensor([0.1 * member + number, layer - 0.3 * number], dtype=torch.float64)


def expected(actions: list[tuple[Any, ...]]) -> KeyRange:
    """Return what the same pushes make if nothing is lost."""
    keys = KeyRange(OuterSGD(), None, 0)
    for layer in LAYERS:
        keys.init(layer, ["w"], [torch.zeros(2, dtype=torch.float64)])
    for member in MEMBERS:
        keys.admit(member)
    keys.count(dict.fromkeys(MEMBERS, True))
    numbers = dict.fromkeys(MEMBERS, 0)
    for name, *arguments in actions:
        if name == "push" and arguments[0] in keys.counted:
            member = arguments[0]
            if member in keys.layers[0].pending:
                continue
            numbers[member] += 1
            number = numbers[member]
            spans = {key: [span_of(member, number)] for key in LAYERS}
            weights = dict.fromkeys(LAYERS, float(member))
            push = Push(member, number, weights, (0, 0), spans, dict.fromkeys(LAYERS, 0))
            keys.push(push, {layer: [change_of(member, number, layer)] for layer in LAYERS})
        elif name == "fence":
            keys.fence(arguments[0], (0, 0))
        elif name == "count":
            keys.count({arguments[0]: arguments[1]})
        for layer in keys.due():
            keys.step(layer, keys.next_step(layer, complete=False))
    return keys


PUSHES = st.tuples(
    st.just("push"),
    st.sampled_from(MEMBERS),
    st.sampled_from(["kept back", "at once", "laid down", "laid down and lost"]),
    st.sampled_from(["", "", "lay_down", "push", "step"]),
)
ACTIONS = st.lists(
    st.one_of(
        PUSHES,
        PUSHES,
        st.tuples(st.just("lose"), st.sampled_from([0, 1])),
        st.tuples(st.just("fence"), st.just(3)),
        st.tuples(st.just("count"), st.sampled_from([1, 2]), st.booleans()),
    ),
    max_size=25,
)


@examples(usual=200)
@given(ACTIONS)
def test_no_loss_of_a_server_changes_what_pushes_make(actions: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        pair = Pair()
        await pair.begin()
        for name, *arguments in actions:
            if name == "push":
                member, how, ends_after = arguments
                await pair.push(member, how, ends_after=ends_after)
            elif name == "lose":
                await pair.lose(arguments[0])
            elif name == "count":
                await pair.ask(Message({"op": "count", "members": {arguments[0]: arguments[1]}}))
            else:
                await pair.fence(arguments[0])
            check(pair, bool(pair.servers[0]._kept_back.layers()))
        wanted = expected(actions)
        found = pair.servers[0]._own.keys
        for layer in LAYERS:
            ours, theirs = found.layers[layer], wanted.layers[layer]
            assert torch.equal(ours.outer.values[0], theirs.outer.values[0])
            assert torch.equal(ours.outer.momentum[0], theirs.outer.momentum[0])
            assert list(ours.credits) == list(theirs.credits)
            assert (ours.numbers, set(ours.pending)) == (theirs.numbers, set(theirs.pending))
            assert ours.clocks == theirs.clocks

    asyncio.run(run())


def check(pair: Pair, lacks: bool) -> None:
    """Check that the copy is equal, but for pushes that it gets with their step."""
    own, copied = pair.servers[0]._own, pair.servers[1]._held
    assert copied is not None
    for layer in LAYERS:
        ours, theirs = own.keys.layers[layer], copied.keys.layers[layer]
        assert torch.equal(ours.outer.values[0], theirs.outer.values[0])
        assert ours.revision == theirs.revision
        assert lacks or set(ours.pending) == set(theirs.pending)
    if not lacks:
        all_ours, all_theirs = packed(own.content()), packed(copied.content())
        assert all_ours.header == all_theirs.header
        tensors = zip(all_ours.tensors, all_theirs.tensors, strict=True)
        assert all(torch.equal(mine, copy) for mine, copy in tensors)


def test_only_the_push_that_was_laid_down_counts() -> None:
    async def run() -> list[str]:
        pair = Pair()
        await pair.begin()
        found = []
        for laid_down, counts in ((1, 1), (1, 1), (2, 3), (None, 4)):
            if laid_down is not None:
                message = push_of(1, laid_down, "laid down")
                await pair.to_copy.call(
                    Message({**message.header, "op": "lay_down"}, message.tensors)
                )
            header = {**push_of(1, counts, "laid down").header, "op": "forward", "inner": "push"}
            found.append(",".join((await pair.to_copy.call(Message(header))).header))
        return found

    assert asyncio.run(run()) == ["", "", "lacks", "lacks"]


def test_a_replica_beside_a_copy_pulls_from_it_and_else_from_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with servers(2) as running:
        second = running.addresses[1]
        monkeypatch.setattr(worker_module, "is_here", lambda address: address == second)
        worker = KVWorker(running.addresses, TOKEN, [1, 1], PATIENCE, copies=True)
        try:
            worker.configure(OPTIONS, again=False)
            values = {key: [torch.full((2,), float(key))] for key in LAYERS}
            worker.init(values, {key: ["w"] for key in LAYERS})
            join = {"op": "join", "replica": 0, "processes": 1, "num_layers": 2, "former": 0}
            join |= {"fragments": [[0, 1]], "settings": {}}
            asked = worker.ask({**join, "expected": 1, "node": "a"}).wait()
            member = asked.header["member"]
            request = {"op": "pull", "member": member, "layers": {"0": 0}, "copy": True}
            reply = worker._start(worker._call(1, Message(request))).wait()
            assert reply.header["revisions"] == {"0": 0}
            for _ in range(2):
                pulled = worker.pull({0: 0, 1: 0}, {"member": member}).wait()
                assert {key: x[0].tolist() for key, x in pulled.values.items()} == {
                    0: [0.0, 0.0],
                    1: [1.0, 1.0],
                }
                running.kill(1)  # its successor gets the copy again
                running.start(1)
        finally:
            worker.close()


def test_the_host_of_an_address_is_recognized() -> None:
    assert is_here("127.0.0.1:7700")
    assert is_here("[::1]:7700")
    assert not is_here("192.0.2.1:7700")  # reserved for documentation
    assert not is_here("no-such-host.invalid:7700")
