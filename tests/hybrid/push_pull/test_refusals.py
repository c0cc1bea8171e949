"""What cannot be trained by push and pull is refused in one sentence, before the first step."""

from __future__ import annotations

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
        synchronization: Any = pipollux.PushPull(sync_every=2)
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
        ("plain loader", {}, "optimizer.step() outside of a loop over an AdaptiveDataLoader"),
        ("break", {}, "the training loop before was left by break"),
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
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3 if what == "layers" else 2)])
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
