"""How states come from replicas that have them to those that do not."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pipollux_hybrid as pipollux
from pipollux_hybrid.checkpoint.model_state import ModelState
from pipollux_hybrid.checkpoint.state import State, States
from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job.context import context
from pipollux_hybrid.resize import transfer
from pipollux_hybrid.resize.pieces import LARGEST, Memory, Piece, Route, Slice, make_plan
from pipollux_hybrid.resize.skeleton import Kind, fill, find_room, take_apart
from tests.hybrid.replicas import run_replicas


@given(
    sizes=st.lists(st.integers(1, 5 * LARGEST) | st.integers(1, 1000), max_size=20),
    num_senders=st.integers(1, 4),
    num_receivers=st.integers(1, 3),
    data=st.data(),
)
def test_pieces_are_all_bytes_once(
    sizes: list[int], num_senders: int, num_receivers: int, data: st.DataObject
) -> None:
    equal = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    senders = tuple(range(num_senders))
    route = Route(senders, tuple(range(num_senders, num_senders + num_receivers)))
    plan = make_plan(sizes, equal, route)
    ends = dict.fromkeys(range(len(sizes)), 0)
    for piece in plan:
        assert 0 < piece.size <= LARGEST
        assert piece.owner in route.receivers
        for number, begin, end in piece.slices:
            assert begin == ends[number], "a tensor is gone through from its beginning"
            ends[number] = end
            assert piece.source in (senders if equal[number] else senders[:1])
    assert list(ends.values()) == sizes
    shared = Counter(
        {sender: sum(piece.size for piece in plan if piece.source == sender) for sender in senders}
    )
    if all(equal):
        assert max(shared.values()) - min(shared.values()) <= LARGEST * 4


TENSORS = {
    "contiguous": lambda: torch.arange(12.0).view(3, 4),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "a part": lambda: torch.arange(12.0).view(3, 4)[:, 1:3],
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.arange(5).to(torch.bfloat16),
    "complex": lambda: torch.tensor([1 + 2j, 3j]),
    "number": lambda: torch.tensor(7.0, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_read_and_written_slice_by_slice(name: str) -> None:
    tensor = TENSORS[name]()
    target = torch.zeros_like(tensor)
    here, there = Memory([tensor]), Memory([target])
    for begin in range(0, tensor.nbytes, 3):
        piece = Piece((Slice(0, begin, min(begin + 3, tensor.nbytes)),), 0, 1)
        room = there.room(piece)
        room.copy_(here.read(piece))
        there.write(piece, room)
    assert torch.equal(tensor, target)


def test_a_contiguous_tensor_is_sent_from_where_it_lies_and_received_where_it_belongs() -> None:
    tensor = torch.arange(12.0)
    piece = Piece((Slice(0, 8, 16),), 0, 1)
    memory = Memory([tensor])
    assert memory.read(piece).data_ptr() == memory.room(piece).data_ptr() == tensor.data_ptr() + 8


def test_buffers_of_small_tensors_on_the_cpu_are_ordinary_memory() -> None:
    tensors = [torch.arange(3.0), torch.arange(4.0).view(2, 2).t()]
    piece = Piece((Slice(0, 4, 12), Slice(1, 0, 16)), 0, 1)
    memory = Memory(tensors)
    for content in (memory.read(piece), memory.room(piece)):
        assert content.shape == (24,)
        assert not content.is_pinned()
    assert memory.read(piece).view(torch.float32).tolist() == [1, 2, 0, 1, 2, 3]


def test_a_skeleton_has_each_tensor_once_and_is_filled_again() -> None:
    shared = torch.arange(6.0)
    sparse = torch.eye(2).to_sparse()
    content = OrderedDict(
        a=[shared, (shared, 1, "x")],
        b={"t": shared.view(2, 3), 3: None, "none": torch.empty(0)},
        s=sparse,
    )
    content._metadata = {"version": 2}  # type: ignore[attr-defined]  # as a module's state has
    tensors: list[Tensor] = []
    skeleton = take_apart(content, tensors)
    assert [tuple(x.shape) for x in tensors] == [(6,), (2, 3)]
    again = fill(skeleton, tensors)
    assert again["a"][0] is again["a"][1][0]
    assert torch.equal(again["b"]["t"], shared.view(2, 3))
    assert again["b"][3] is None
    assert again["b"]["none"].shape == (0,)
    assert again["s"] is sparse
    assert again._metadata == {"version": 2}


def test_one_memory_is_overwritten_by_one_tensor() -> None:
    """What is tied here and not there keeps the second apart, to be copied as a restart would."""
    tensors: list[Tensor] = []
    skeleton = take_apart({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(3)}, tensors)
    own = torch.empty(2)
    tied = {"a": own, "b": own, "c": torch.ones(3, dtype=torch.int64)}
    room = find_room(skeleton, tied, [Kind.of(x) for x in tensors])
    assert list(room) == [0]
    assert room[0].data_ptr() == own.data_ptr()
    assert not find_room(skeleton, {"a": torch.zeros(1).expand(2)}, [Kind.of(x) for x in tensors])


class Notes(State):
    """A state that is bytes."""

    def __init__(self, text: str) -> None:
        super().__init__("notes.txt")
        self.text = text

    def save(self, fileobj: Any) -> None:
        fileobj.write(self.text.encode())

    def load(self, fileobj: Any) -> None:
        self.text = fileobj.read().decode()


def build(seed: int, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A model with tied, transposed and small parameters, running statistics and Adam's state."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Linear(300, 300),
        nn.Linear(300, 300),
        nn.BatchNorm1d(300),
        nn.Linear(700, 300, bias=False),
        nn.Linear(300, 300),
    ).to(dtype)
    if tied:
        module[4].weight = module[0].weight
    module[1].weight = nn.Parameter(module[1].weight.detach().t())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(module: nn.Sequential, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        x = module[2](module[1](module[0](torch.randn(8, 300))))
        (module[4](x).sum() + module[3].weight.sum()).backward()
        optimizer.step()
        schedule.step()


def exchange(num_senders: int, num_receivers: int, **other: Any) -> Any:
    """Train on those that send, and return what all have after the others took it."""
    pipollux.init_process_group("gloo")
    ctx = context()
    rank = ctx.env.rank
    route = Route(tuple(range(num_senders)), tuple(range(num_senders, ctx.env.num_replicas)))
    sends = rank < num_senders
    made = build(1, **({} if sends else other)) if sends else build(2, **other)
    average = torch.optim.swa_utils.AveragedModel(made[0])
    state, notes = ModelState(*made), Notes(f"of replica {rank}")
    pipollux.register_for_checkpointing("average", average)
    states = dict(ctx.component(States))
    group = ctx.control.group
    assert group is not None
    own = [x.data_ptr() for x in made[0].parameters()]
    if sends:
        train(*made)
        # What is not the same on all is replica 0's.
        average.module[0].bias.data.fill_(rank)
        ctx.control.gather_bytes(transfer.outline(states))
        transfer.send(group, rank, transfer.pack(states, leads=rank == 0), route)
    else:
        told = ctx.control.gather_bytes(b"")[0]
        spare = transfer.prepare(told, states, 60.0)
        ready = {x.data_ptr() for tensors in spare.values() for x in tensors}
        transfer.take(group, rank, states, spare=spare).adopt(states)
        moments = {x["exp_avg"].data_ptr() for x in made[1].state.values()}
        assert len(moments & ready) == len(moments), "they lie in the memory that was ready"
        assert own == [x.data_ptr() for x in made[0].parameters()], "they are still the same"
        assert made[0][4].weight is made[0][0].weight
    return state.content(), notes.text, average.state_dict(), len(states)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(x, other[name]) for name, x in one.items())
    if isinstance(one, (list, tuple)):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize(
    ("num_senders", "num_receivers"),
    [
        (1, 1),
        pytest.param(2, 1, marks=pytest.mark.exhaustive),
        pytest.param(1, 2, marks=pytest.mark.exhaustive),
        (2, 3),
    ],
)
def test_those_that_receive_have_what_those_that_send_have(
    num_senders: int, num_receivers: int
) -> None:
    everyone = run_replicas(exchange, num_senders + num_receivers, num_senders, num_receivers)
    model, _, average, _ = everyone[0]
    assert float(average["module.0.bias"][0]) == 0.0
    assert len(model["optimizer"]["state"]) == 8
    for found in everyone[num_senders:]:
        assert same(found[0], model)
        assert found[1] == "of replica 0"
        assert same(dict(found[2]), dict(average))


def refuse() -> str:
    pipollux.init_process_group("gloo")
    ctx = context()
    rank, group = ctx.env.rank, ctx.control.group
    assert group is not None
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 3 + (rank == 2)))
    before = module[0].weight.detach().clone()
    state = ModelState(module, torch.optim.SGD(module.parameters(), lr=0.1), None)
    states: dict[str, State] = {state.name: state}
    route = Route((0,), (1, 2))
    try:
        if rank == 0:
            transfer.send(group, rank, transfer.pack(states, leads=True), route)
        else:
            transfer.take(group, rank, states)
    except transfer.RefusedError as refusal:
        assert torch.equal(module[0].weight, before)
        return str(refusal)
    raise AssertionError("it was not refused")


def test_one_that_cannot_take_it_is_heard_by_all_before_anything_has_changed() -> None:
    said = run_replicas(refuse, 3)
    assert len(set(said)) == 1
    assert "model.pt: it is of another model: '0.weight' has shape (3, 3) in the" in said[0]


def test_a_state_that_cannot_be_saved_is_named() -> None:
    class Broken(State):
        def __init__(self) -> None:  # registered nowhere
            self.name = "broken"

        def save(self, fileobj: Any) -> None:  # noqa: ARG002  # as all states
            raise OSError("no")

    with pytest.raises(CheckpointError, match="the state broken cannot be saved: no"):
        transfer.pack({"broken": Broken()}, leads=True)
