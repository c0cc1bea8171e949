"""Replicas and servers that are killed at any moment: nothing hangs, every sample counts once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_hybrid.push_pull import worker as worker_module
from pipollux_hybrid.push_pull.key_range import FENCED
from pipollux_hybrid.push_pull.transport import ServerError
from pipollux_hybrid.push_pull.worker import KVWorker
from tests.extent import first, first_points
from tests.hybrid.push_pull.jobs import TOKEN, Servers, servers
from tests.programs import fork_server, ranks
from tests.waiting import until

SAMPLES, BATCH = 160, 4
MANY = 480
"""Samples of jobs in which replicas train beside others."""
PATIENCE = 60.0
LOST = ("--lost-after", "2")


def train(
    environment: dict[str, str], options: dict[str, Any], folder: Path, stop: int, samples: int
) -> None:
    """Train a replica that writes each step to a file; with ``stop`` it pauses there."""
    os.environ.update(environment)
    if here := environment.get("HERE"):
        worker_module.is_here = lambda address: address == here
    with (folder / f"said-{environment['PIPOLLUX_REPLICA']}").open("a", buffering=1) as file:
        os.dup2(file.fileno(), 2)
    try:
        count_steps(environment["PIPOLLUX_REPLICA"], options, folder, stop, samples)
    except pipollux.PipolluxError as error:
        (folder / f"error-{environment['PIPOLLUX_REPLICA']}").write_text(str(error))
        raise


def count_steps(
    replica: str, options: dict[str, Any], folder: Path, stop: int, samples: int
) -> None:
    """Train so that parameters count the samples that they include, and write them to a file.

    The outer optimizer averages parameters, and the inner one subtracts 1 from those of each layer
    in every step.
    """
    pipollux.init_process_group("gloo")
    layers = [nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity()) for _ in range(3)]
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.fill_(1.0)
            super().step(closure)

    optimizer = Counts(model.parameters(), lr=2.0**-20)
    wrapped = pipollux.HybridParallel(
        model, optimizer, synchronization=pipollux.PushPull(**options)
    )
    data = TensorDataset(torch.arange(samples), torch.ones(samples, 1, dtype=torch.float64))
    loader = pipollux.AdaptiveDataLoader(data, batch_size=BATCH)
    count = 0
    with (folder / f"steps-{replica}").open("a", buffering=1) as log:
        for _ in pipollux.remaining_epochs_until(1):
            for indices, inputs in loader:
                optimizer.zero_grad()
                wrapped(inputs).mean().backward()
                optimizer.step()
                log.write(f"{indices.tolist()}\n")
                count += 1
                while count == stop and not (folder / "go").exists():
                    time.sleep(0.01)
    values = {name: float(x) for name, x in wrapped.state_dict().items()}
    (folder / f"done-{replica}").write_text(repr(values))


class Job:
    """Replicas of a test."""

    def __init__(
        self,
        running: Servers,
        options: dict[str, Any],
        folder: Path,
        samples: int = SAMPLES,
        *,
        apart: bool = False,
    ) -> None:
        self.servers, self.options, self.folder, self.samples = running, options, folder, samples
        self.apart = apart
        """Whether each replica takes one server only to be on its host."""
        self.processes: dict[int, Any] = {}

    def start(self, replica: int, count: int, stop: int = 0) -> None:
        environment = {**self.servers.environment(), "PIPOLLUX_REPLICA": str(replica)}
        environment |= {**ranks(0, count, 1), "PIPOLLUX_HINTS_INTERVAL": "1000000"}
        if self.apart:
            addresses = self.servers.addresses
            environment["HERE"] = addresses[replica % len(addresses)]
        arguments = (environment, self.options, self.folder, stop, self.samples)
        self.processes[replica] = fork_server().Process(target=train, args=arguments)
        self.processes[replica].start()

    def kill(self, replica: int) -> None:
        process = self.processes.pop(replica)
        process.kill()
        process.join(PATIENCE)

    def is_lost(self, member: int) -> bool:
        worker = KVWorker(self.servers.addresses, TOKEN, [1], PATIENCE, copies=False)
        try:
            worker.ask({"op": "pull", "member": member, "layers": {}, "copy": False}).wait()
        except ServerError as error:
            return str(error) == FENCED
        finally:
            worker.close()
        return False

    def servers_are_ready(self) -> bool:
        worker = KVWorker(self.servers.addresses, TOKEN, [1], PATIENCE, copies=False)
        try:
            worker.configure({}, again=False)
        except ServerError:
            return False
        finally:
            worker.close()
        return True

    def steps(self, replica: int) -> int:
        path = self.folder / f"steps-{replica}"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def end(self) -> list[dict[str, float]]:
        for replica, process in self.processes.items():
            process.join(PATIENCE)
            assert process.exitcode == 0, f"replica {replica}: {process.exitcode}"
        found = [self.folder / f"done-{replica}" for replica in self.processes]
        return [eval(path.read_text()) for path in found]  # noqa: S307  # written above

    def close(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()


def check(values: list[dict[str, float]], total: float) -> None:
    """Check that each layer's parameter includes each batch's step once, up to its weights."""
    assert all(value == values[0] for value in values)
    for name, value in values[0].items():
        steps = (1.0 - value) * 2.0**20
        assert steps == pytest.approx(total, abs=1e-6), name


# With one replica at a time that has unpushed steps, weights are 1 and the count of steps exact.
ALONE = {
    "sync_every": 5,
    "fragments": 3,
    "max_staleness": float("inf"),
    "adapt_to_speed": False,
    "outer_optimizer": pipollux.OuterSGD(lr=1.0, momentum=0.0, nesterov=False),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stop", [4, 2, 1, 3, 5, 6, 7, 12])
def test_samples_of_a_replica_that_dies_are_trained_once_in_each_layer(
    stop: int, tmp_path: Path
) -> None:
    with servers(2, options=LOST) as running:
        job = Job(running, ALONE, tmp_path)
        try:
            job.start(0, 1, stop)
            until(lambda: job.steps(0) == stop, "it has trained", PATIENCE)
            job.kill(0)
            until(lambda: job.is_lost(1), "the servers know it", PATIENCE)
            job.start(1, 1)
            (values,) = job.end()
        finally:
            job.close()
    check([values], SAMPLES / BATCH)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_server_that_is_killed_and_started_again_goes_on(which: int, tmp_path: Path) -> None:
    with servers(2, options=LOST) as running:
        job = Job(running, ALONE, tmp_path)
        try:
            job.start(0, 1, 8)
            until(lambda: job.steps(0) == 8, "it has trained", PATIENCE)
            running.kill(which)
            (tmp_path / "go").touch()
            running.start(which)
            (values,) = job.end()
        finally:
            job.close()
    check([values], SAMPLES / BATCH)


def test_a_single_server_goes_on_from_its_files(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = (*LOST, "--save-every", "0.01")
    with servers(1, kept, options) as running:
        job = Job(running, ALONE, tmp_path)
        try:
            job.start(0, 1, 8)
            until(lambda: job.steps(0) == 8, "it has trained", PATIENCE)
            until(lambda: len(list(kept.glob("layer-*.pt"))) == 3, "it is saved", PATIENCE)
            running.kill(0)
            (tmp_path / "go").touch()
            running.start(0)
            (values,) = job.end()
        finally:
            job.close()
    check([values], SAMPLES / BATCH)


@pytest.mark.parametrize(("stale", "count"), first_points(1, [(0, 2), (0, 3), (2, 3)]))
def test_replicas_and_servers_die_while_others_train(
    stale: float, count: int, tmp_path: Path
) -> None:
    options = {"sync_every": 4, "fragments": 2, "overlap": 1, "max_staleness": stale}
    with servers(2, options=LOST) as running:
        job = Job(running, options, tmp_path, MANY, apart=count == 2)
        try:
            for replica in range(count):
                job.start(replica, count, 14 if count == 2 else 0)
            until(lambda: job.steps(0) > 5, "it has trained", PATIENCE)
            job.kill(0)
            until(lambda: job.steps(1) > 9, "the others go on", PATIENCE)
            running.kill(1)
            running.start(1)
            until(job.servers_are_ready, "it has its range again", PATIENCE)
            job.start(4, 1)
            if count == 2:  # the survivor waits, as it might train all samples before
                until(lambda: job.steps(4) > 0, "it has joined", PATIENCE)
                (tmp_path / "go").touch()
            last = 4 if count == 2 else 2
            until(lambda: job.steps(last) > 12, "the others go on", PATIENCE)
            running.kill(0)
            job.kill(1)
            running.start(0)
            if count == 2:
                job.start(3, 1)
            values = job.end()
        finally:
            job.close()
    assert len(values) == 2
    assert values[0] == values[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stale", [0, float("inf")])
def test_two_servers_that_hold_copies_of_each_other_die_at_once(
    stale: float, tmp_path: Path
) -> None:
    """The range of one of them is lost, but for its files: all replicas join again."""
    kept, options = tmp_path / "kept", (*LOST, "--save-every", "0.01")
    with servers(3, kept, options) as running:
        job = Job(running, {**ALONE, "max_staleness": stale}, tmp_path, MANY)
        try:
            for replica in range(2):
                job.start(replica, 2, 8)
            until(lambda: min(map(job.steps, (0, 1))) == 8, "they have trained", PATIENCE)
            until(lambda: len(list(kept.glob("layer-*.pt"))) == 3, "it is saved", PATIENCE)
            for index in (2, 0):
                running.kill(index)
            (tmp_path / "go").touch()
            for index in (2, 0):
                running.start(index)
            values = job.end()
        finally:
            job.close()
    assert values[0] == values[1]


@pytest.mark.exhaustive
def test_a_frozen_replica_joins_again(tmp_path: Path) -> None:
    with servers(1, options=("--lost-after", "1")) as running:
        job = Job(running, ALONE, tmp_path, MANY)
        try:
            job.start(0, 1, 7)
            until(lambda: job.steps(0) == 7, "it has trained", PATIENCE)
            os.kill(job.processes[0].pid, 19)
            job.start(1, 1)
            until(lambda: job.steps(1) > 3, "the other one trains", PATIENCE)
            (tmp_path / "go").touch()
            os.kill(job.processes[0].pid, 18)
            values = job.end()
        finally:
            job.close()
    assert values[0] == values[1]


def test_a_server_that_was_frozen_has_lost_no_replica(tmp_path: Path) -> None:
    """Heartbeats of that time are still to be read when it goes on."""
    with servers(1, options=("--lost-after", "4")) as running:
        job = Job(running, ALONE, tmp_path)
        try:
            job.start(0, 1, 7)
            until(lambda: job.steps(0) == 7, "it has trained", PATIENCE)
            os.kill(running.processes[0].pid, signal.SIGSTOP)
            frozen = time.monotonic()
            until(lambda: time.monotonic() - frozen > 5.5, "the time of a loss is over", PATIENCE)
            os.kill(running.processes[0].pid, signal.SIGCONT)
            until(job.servers_are_ready, "it goes on", PATIENCE)
            assert not job.is_lost(1)
            (tmp_path / "go").touch()
            (values,) = job.end()
        finally:
            job.close()
    assert job.steps(0) == SAMPLES / BATCH  # as it had not to join again
    check([values], SAMPLES / BATCH)


@pytest.mark.exhaustive
def test_a_replica_that_waits_for_another_one_says_so(tmp_path: Path) -> None:
    """Its heartbeats go on, so nobody but the user can know whether it hangs."""
    with servers(1, options=LOST) as running:
        job = Job(running, {**ALONE, "max_staleness": 0}, tmp_path)
        try:
            job.start(0, 2)
            job.start(1, 2, 7)
            until(lambda: job.steps(1) == 7, "it has trained", PATIENCE)
            said = tmp_path / "said-0"
            until(lambda: "waiting for replica 1 " in said.read_text(), "it says so", PATIENCE)
            (tmp_path / "go").touch()
            values = job.end()
        finally:
            job.close()
    assert values[0] == values[1]
    assert said.read_text().count("waiting for") == 1


@pytest.mark.parametrize("again", first(1, [True, False]))
def test_nobody_waits_for_the_patience_with_a_killed_replica(again: bool, tmp_path: Path) -> None:
    """It is lost with its connection, or when it is started again."""
    with servers(1, options=("--lost-after", "1000")) as running:
        job = Job(running, {**ALONE, "max_staleness": 0}, tmp_path)
        try:
            job.start(0, 2)
            job.start(1, 2, 7)
            until(lambda: job.steps(1) == 7, "it has trained", PATIENCE)
            job.kill(1)
            if again:
                (tmp_path / "go").touch()
                job.start(1, 2)
            values = job.end()
        finally:
            job.close()
    assert all(value == values[0] for value in values)


def test_a_replica_that_runs_twice_is_refused(tmp_path: Path) -> None:
    with servers(1, options=("--lost-after", "1000")) as running:
        job = Job(running, ALONE, tmp_path)
        try:
            job.start(0, 1, 2)
            until(lambda: job.steps(0) == 2, "it has trained", PATIENCE)
            first = job.processes[0]
            job.start(0, 1, 3)
            until(lambda: job.steps(0) >= 5, "the second one has trained, too", PATIENCE)
            (tmp_path / "go").touch()
            first.join(PATIENCE)
            assert first.exitcode == 1
            job.end()
        finally:
            job.close()


@pytest.mark.parametrize("keeps", [False, True])
def test_servers_that_have_lost_their_state_are_named(keeps: bool, tmp_path: Path) -> None:
    """Also if it is that of one layer, as a server was killed during its first save."""
    kept = tmp_path / "kept" if keeps else None
    with servers(1, kept, (*LOST, "--save-every", "0.01")) as running:
        job = Job(running, ALONE, tmp_path)
        try:
            job.start(0, 1, 8)
            until(lambda: job.steps(0) == 8, "it has trained", PATIENCE)
            if kept is not None:
                until(lambda: len(list(kept.glob("layer-*.pt"))) == 3, "it is saved", PATIENCE)
            running.kill(0)
            if kept is not None:
                (kept / "layer-00002.pt").unlink()
            (tmp_path / "go").touch()
            running.start(0)
            job.processes[0].join(PATIENCE)
            assert job.processes[0].exitcode == 1
        finally:
            job.close()
    expected = "started again without their state: start them with --directory"
    assert expected in (tmp_path / "error-0").read_text()
