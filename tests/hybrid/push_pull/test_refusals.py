"""What cannot be trained by push and pull is refused in one sentence, before the first step."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import pipollux
from tests.hybrid.push_pull.jobs import TOKEN, servers
from tests.hybrid.replicas import run_replicas
from tests.waiting import until


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(8, 2))


def refusal(kind: str, options: dict[str, Any]) -> str:
    """Return the message of the error that a script ends with."""
    try:
        pipollux.init_process_group("gloo")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if kind == "frozen":
            model.requires_grad_(False)
        if kind == "thawed":
            model[0].requires_grad_(False)
        if kind == "complex":
            model = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))
        compression: Any = "int8" if kind == "complex" else None
        synchronization: Any = pipollux.PushPull(sync_every=2, compression=compression)
        if kind in ("none", "wrong"):
            synchronization = None if kind == "none" else "push"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = pipollux.HybridParallel(
            model, optimizer, synchronization=synchronization, **options
        )
        data: Any = Stream() if kind == "stream" else TensorDataset(torch.randn(8, 2))
        loader: Any = pipollux.AdaptiveDataLoader(data, batch_size=2)
        if kind == "loaded":
            wrapped.load_state_dict({n: x + 1.0 for n, x in wrapped.state_dict().items()})
        if kind == "autoscaled":
            loader.autoscale_batch_size(4)
        if kind == "thawed":
            model[0].requires_grad_(True)
        if kind == "frozen later":
            model[0].requires_grad_(False)
        if kind == "evaluated":
            wrapped.eval()
        if kind == "plain loader":
            loader = torch.utils.data.DataLoader(data, batch_size=2)
        for _ in pipollux.remaining_epochs_until(2):
            for batch in loader:
                if kind == "no backward":
                    continue
                inputs = batch if kind == "stream" else batch[0]
                wrapped(inputs).sum().backward()
                optimizer.step()
                if kind == "break":
                    break
    except pipollux.PipolluxError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("none", {}, "give it synchronization=pipollux.PushPull(…), or remove the variable"),
        ("wrong", {}, "synchronization='push': pipollux.PushPull(…) is needed"),
        ("", {"shard_optimizer": True}, "shard_optimizer=True divides the optimizer's state"),
        ("", {"check_replicas": True}, "check_replicas compares replicas after steps"),
        ("frozen", {}, "no parameter of this stage is trained: nothing to push"),
        ("stream", {}, "positions of a map-style data set"),
        ("loaded", {}, "was changed outside of a training loop, and servers hold its value"),
        ("autoscaled", {}, "a replica keeps its batch size; set max_batch_size=2"),
        ("thawed", {}, "was frozen when HybridParallel(…) was made"),
        ("frozen later", {}, "parameter 0.weight was frozen after HybridParallel(…) was made"),
        ("complex", {}, "0.weight is complex, and compression='int8' is for real numbers"),
        ("plain loader", {}, "optimizer.step() outside of a loop over an AdaptiveDataLoader"),
        ("break", {}, "the training loop before was left by break"),
        ("evaluated", {}, "or in one that began after model.eval() or under torch.no_grad()"),
        ("no backward", {}, "an iteration over training samples had no backward"),
    ],
)
def test_scripts(kind: str, options: dict[str, Any], message: str) -> None:
    with servers(1) as running:
        (found,) = run_replicas(refusal, 1, kind, options, environment=running.environment())
    assert message in found


def test_without_servers() -> None:
    (found,) = run_replicas(refusal, 1, "", {})
    assert "needs servers: under a scheduler, add servers: 1 to the job file; else start" in found
    assert "python -m pipollux.server for each address in PIPOLLUX_SERVERS" in found


def test_a_wrong_token() -> None:
    with servers(1) as running:
        environment = {**running.environment(), "PIPOLLUX_TOKEN": f"{TOKEN}!"}
        (found,) = run_replicas(refusal, 1, "", {}, environment=environment)
    assert "PIPOLLUX_TOKEN has to be the same for the servers and for all replicas" in found


def test_replicas_with_other_options_or_models() -> None:
    with servers(1) as running:
        found = run_replicas(refusal, 1, "", {}, environment=running.environment())
        assert found == ["nothing was refused"]
        (other,) = run_replicas(differing, 1, "options", environment=running.environment())
        assert "PushPull(sync_every=3), but the servers' job has sync_every=2" in other
        (other,) = run_replicas(differing, 1, "layers", environment=running.environment())
        assert "another number of layers" in other
        (other,) = run_replicas(differing, 1, "frozen", environment=running.environment())
        assert "the frozen parameters differ" in other
        for what, shape, kind in (("width", [1, 2], "float32"), ("dtype", [2, 2], "float64")):
            (other,) = run_replicas(differing, 1, what, environment=running.environment())
            assert f"layer 0 has 0.weight of shape {shape} and {kind}, and on other repl" in other
            assert "0.weight of shape [2, 2] and float32: all need the same model" in other


def test_a_servers_folder_of_another_model(tmp_path: Path) -> None:
    with servers(1, tmp_path) as running:
        run_replicas(refusal, 1, "", {}, environment=running.environment())
    with servers(1, tmp_path) as running:
        (other,) = run_replicas(differing, 1, "width", environment=running.environment())
    assert "layer 0 has 0.weight of shape [1, 2] and float32, and the servers' folder has" in other


def test_servers_that_know_other_addresses() -> None:
    with servers(1) as running, servers(1) as others:
        both = ",".join([*running.addresses, *others.addresses])
        environment = {**running.environment(), "PIPOLLUX_SERVERS": both}
        (found,) = run_replicas(refusal, 1, "", {}, environment=environment)
    assert "takes it for number" in found
    assert "set PIPOLLUX_SERVERS to the same addresses, in the same order" in found


def test_a_loop_that_is_left_says_so_and_others_take_its_samples(tmp_path: Path) -> None:
    with servers(1, options=("--lost-after", "1000")) as running:
        found = run_replicas(leaving, 2, tmp_path / "ended", environment=running.environment())
    (left, said), (rest, nothing) = found
    assert "replica 0 has left a training loop before its end" in said
    assert nothing == ""
    assert len(left) == 2
    assert sorted(rest) == list(range(16))


def leaving(ended: Path) -> tuple[list[int], str]:
    """Train an epoch, which replica 0 leaves before its first push; it waits for the other one."""
    pipollux.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = pipollux.PushPull(sync_every=4)
    wrapped = pipollux.HybridParallel(model, optimizer, synchronization=options)
    loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.arange(16)), batch_size=2)
    taken: list[int] = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for (numbers,) in loader:
            wrapped(numbers[:, None].float()).sum().backward()
            optimizer.step()
            taken += numbers.tolist()
            if pipollux.process_rank() == 0:
                break
    if pipollux.process_rank() == 0:  # its heartbeats go on until the other one has ended
        until(ended.exists, "the other one has ended", 60.0)
    else:
        ended.touch()
    lines = [line for line in said.getvalue().splitlines() if "left a training loop" in line]
    return taken, "\n".join(lines)


def late(given: bool) -> str:
    """Train two epochs, with a learning-rate schedule that HybridParallel knows or not."""
    pipollux.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    options = pipollux.PushPull(sync_every=2)
    try:
        wrapped = pipollux.HybridParallel(
            model,
            optimizer,
            lr_scheduler=schedule if given else None,
            synchronization=options,
        )
    except pipollux.PipolluxError as error:
        return str(error)
    loader = pipollux.AdaptiveDataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2)
    for _ in pipollux.remaining_epochs_until(2):
        for (inputs,) in loader:
            wrapped(inputs).sum().backward()
            optimizer.step()
        schedule.step()
    return ""


def test_a_schedule_that_would_begin_anew() -> None:
    with servers(1) as running:
        assert run_replicas(late, 1, False, environment=running.environment()) == [""]
        for given in (False, True):
            (found,) = run_replicas(late, 1, given, environment=running.environment())
            assert "joins in epoch 1, and its learning-rate schedule would begin anew" in found


def test_replicas_with_other_data(tmp_path: Path) -> None:
    codes = (0, -signal.SIGKILL)
    with servers(1) as running:
        found = run_replicas(
            shuffled, 2, tmp_path, environment=running.environment(), exit_codes=codes
        )
    told = [message for message in found if isinstance(message, str)]
    assert any("all replicas need the same data in the same order" in message for message in told)


def shuffled(folder: Path) -> str:
    """Return why the replica is refused, and end the other one, which would wait for it."""
    pipollux.init_process_group("gloo")
    (folder / str(os.getpid())).touch()
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipollux.HybridParallel(model, optimizer, synchronization=pipollux.PushPull(sync_every=2))
    assert pipollux.num_replicas() == 2
    data = TensorDataset(torch.zeros(8, 2))
    seed = pipollux.replica_rank()
    loader = pipollux.AdaptiveDataLoader(data, batch_size=2, shuffle=True, seed=seed)
    assert len(loader) == 2
    try:
        for _ in loader:
            break
    except pipollux.PipolluxError as error:
        for other in {int(path.name) for path in folder.iterdir()} - {os.getpid()}:
            os.kill(other, signal.SIGKILL)
        return str(error)
    return ""


def differing(what: str) -> str:
    pipollux.init_process_group("gloo")
    width = 1 if what == "width" else 2
    layers = [nn.Linear(2, width), *[nn.Linear(width, 2) for _ in range(1 + (what == "layers"))]]
    model = nn.Sequential(*layers)
    if what == "dtype":
        model.double()
    if what == "frozen":
        model[0].requires_grad_(False)
    every = 3 if what == "options" else 2
    try:
        pipollux.HybridParallel(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            synchronization=pipollux.PushPull(sync_every=every),
        )
    except pipollux.PipolluxError as error:
        return str(error)
    return "nothing was refused"


def joining(folder: Path) -> str:
    """Join, the second replica with another learning rate once the first one has; return why not.

    A schedule has changed the rate of the first one by then.
    """
    pipollux.init_process_group("gloo")
    joined, refused = folder / "joined", folder / "refused"
    model = nn.Sequential(nn.Linear(2, 2))
    rate = 1e-3
    if pipollux.process_rank() > 0 or pipollux.replica_rank() > 0:
        until(joined.exists, "the first replica has joined", 60.0)
        rate = 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    try:
        options = pipollux.PushPull(sync_every=2)
        pipollux.HybridParallel(model, optimizer, synchronization=options)
    except pipollux.PipolluxError as error:
        refused.touch()
        return str(error)
    joined.touch()
    until(refused.exists, "the second replica is refused", 60.0)
    return ""


def test_a_replica_with_another_learning_rate(tmp_path: Path) -> None:
    with servers(1) as running:
        first, second = run_replicas(joining, 2, tmp_path, environment=running.environment())
    assert first == ""
    assert "replica 1 differs from the replicas that train: lr of group 0 is 0.001 there" in second
    assert "and 0.01 here: start all of them with the same script, arguments and seed" in second
