"""Elastic resizes and recovery where collectives behave like NCCL's (nccl_stand_in.py).

The tests of resizes, deaths, fault points and runs of any shape run over it as over gloo (`over`).
"""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from pipollux_hybrid import HybridParallel
from pipollux_hybrid.job import device_groups
from pipollux_hybrid.job.context import context
from pipollux_hybrid.job.groups import register_backend
from pipollux_hybrid.sync.buffers import all_reduce_sum, broadcast_tensors
from tests.extent import first
from tests.hybrid.replicas import run_replicas
from tests.hybrid.resize.changing_job import ChangingJob
from tests.hybrid.resize.nccl_stand_in import STAND_IN, Group, StandIn
from tests.hybrid.resize.test_unplanned_death import DyingJob

MakeJob = Callable[..., Any]


@pytest.fixture
def make_job(tmp_path: Path, repository: Path) -> Iterator[MakeJob]:
    made: list[ChangingJob] = []

    def make(kind: type[ChangingJob], **settings: str) -> ChangingJob:
        folder = tmp_path / f"job-{len(made)}"
        made.append(kind(folder, repository, **{**STAND_IN, **settings}))
        return made[-1]

    yield make
    for job in made:
        with job:
            pass


@pytest.mark.exhaustive
def test_a_joining_replica_with_another_backend_is_refused(make_job: MakeJob) -> None:
    job = make_job(ChangingJob, CHANGES="5")
    (job.results / "hold-12").touch()
    job.begin(1)
    job.wait_until_at(5)
    other = job.add(BACKEND="gloo")
    assert other.wait() == 1
    said = "the backend is nccl in the job and gloo here; PIPOLLUX_ELASTIC_NCCL is 1 in the job and"
    assert said in other.errors
    job.programs.remove(other)
    (job.results / "hold-12").unlink()
    job.wait()
    assert job.check() == [(1, 1)]


@pytest.mark.exhaustive
def test_late_news_of_a_death_abort_no_group_of_the_next_membership(make_job: MakeJob) -> None:
    job = make_job(DyingJob, DIES="1:7:backward", OPTIONS="aborts-late", EPOCHS="1")
    job.begin(3)
    job.finish()
    assert [program.poll() for program in job.programs] == [0, -signal.SIGKILL, 0], job.errors()
    assert [replicas for _, replicas in job.check_done()] == [3, 2]


@pytest.mark.exhaustive
def test_one_that_is_late_to_connect_is_not_left_behind(make_job: MakeJob) -> None:
    """Those that are early close connections, which is not to pass for their end."""
    job = make_job(DyingJob, DIES="1:7:backward", OPTIONS="lags-2", EPOCHS="1")
    job.begin(3)
    job.finish()
    assert [program.poll() for program in job.programs] == [0, -signal.SIGKILL, 0], job.errors()
    assert [replicas for _, replicas in job.check_done()] == [3, 2]


@pytest.mark.parametrize("change", first(1, ["leaves", "joins"]))
def test_groups_that_do_not_connect_are_given_up(make_job: MakeJob, change: str) -> None:
    """Before anybody votes for them: the replicas go on with those that they have."""
    settings = {"UNCONNECTED": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "3", "EPOCHS": "1"}
    job = make_job(ChangingJob, CHANGES="5", **settings)
    job.begin(3)
    job.wait_until_at(5)
    if change == "leaves":
        job.ask_to_leave(2, 3)
    else:
        job.add(UNCONNECTED="none")
    job.wait()
    assert job.check() == [(1, 3)]


LATE = [
    *("1.1 of 2, 2, 1f1b", "1.0 of 2, 1, ", "0.0 of 2, 2, gpipe"),
    *("0.1 of 1, 2, interleaved", "0.2 of 1, 3, 1f1b", "0.1 of 1, 2, 1f1b"),
]


@pytest.mark.parametrize("case", first(1, LATE))
def test_a_process_may_be_late_in_its_first_step(make_job: MakeJob, case: str) -> None:
    """As it compiles its layers, for longer than NCCL waits where it connects two processes."""
    late, processes, schedule = case.split(", ")
    who, _, replicas = late.partition(" of ")
    stages = {"PROCESSES": processes, "STAGES": "3" if processes == "3" else "2"}
    limit = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "3", "EPOCHS": "1"}
    job = make_job(DyingJob, OPTIONS=f"slow-{who}", SCHEDULE=schedule, **stages, **limit)
    job.begin(int(replicas))
    job.wait()
    assert job.check_done() == [(1, int(replicas))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_device_that_is_of_no_use_any_more_ends_the_job_and_says_why(
    make_job: MakeJob, processes: str
) -> None:
    """The one whose device is well says so, too: both begin again."""
    dies = "1:7:backward" if processes == "1" else "1.0:7:backward"
    job = make_job(DyingJob, DIES=dies, OPTIONS="breaks-2", PROCESSES=processes)
    job.begin(3)
    codes = [program.wait() for program in job.programs]
    told = zip(codes, job.errors(), strict=True)
    said = (
        "cannot continue without a restart: cpu of a surviving replica cannot be used without a "
        "new process (CUDA error: an illegal memory access was encountered)"
    )
    survivors = [(code, said in errors) for code, errors in told if code != -signal.SIGKILL]
    if processes == "2":  # the other process of the replica that was lost
        survivors.remove((1, False))
    assert survivors == [(1, True)] * 2 * int(processes), job.errors()
    job.programs.clear()


@pytest.mark.exhaustive
def test_sums_are_gloos_and_garbage_without_the_wait_on_the_host(make_job: MakeJob) -> None:
    """The stand-in would show nothing, if a product without the wait trained as well."""
    found = []
    for settings in ({"BACKEND": "gloo"}, {}):
        job = make_job(ChangingJob, EPOCHS="1", **settings)
        job.begin(2)
        job.wait()
        found.append([[x["parameters"] for x in step] for step in job.steps().values()])
    gloo, stand_in = found
    assert stand_in == gloo
    mutant = make_job(ChangingJob, EPOCHS="1", MUTANT="no host wait")
    mutant.begin(2)
    assert {program.wait() for program in mutant.programs} == {1}
    assert all("all(bool(tensor.isfinite().all())" in errors for errors in mutant.errors())
    assert not mutant.steps(), "not even the first one"
    mutant.programs.clear()


def join() -> Group:
    """The group of all replicas of a test, whose communicator is not made yet."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=rank == 0)
    seconds = timedelta(seconds=60)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, seconds)
    device_groups.BACKENDS["nccl"] = StandIn
    device_groups.use("nccl", 60.0)
    made = device_groups.with_device(store, rank, size, gloo)
    assert isinstance(made, Group)
    return made


def queue_a_sum() -> list[float]:
    """An element of a sum when ``wait`` has returned, and when the host has waited."""
    group = join()
    device_groups.connect([group], 60.0)
    found = torch.ones(3)
    group.allreduce([found]).wait()
    before = float(found[0])
    passed = StandIn().fence(torch.device("cpu"))
    while not passed():
        pass
    group.shutdown()
    return [before, float(found[0])]


def test_a_sum_is_garbage_until_the_host_has_waited() -> None:
    for before, after in run_replicas(queue_a_sum, 2):
        assert math.isnan(before)
        assert after == 2.0


class Gpus(StandIn):
    """A library for GPUs, of which this machine has none."""

    device_type = "cuda"

    def current(self) -> torch.device:
        return torch.device("cuda", 3)


class Entered(Gpus):
    """A library that makes groups on the current device of the thread."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.here.device = None

    def enter(self, device: torch.device) -> None:
        self.here.device = device

    def make(self, *_: object) -> Any:
        return getattr(self.here, "device", None)


def test_a_thread_that_forms_a_group_has_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_groups.BACKENDS, "nccl", Entered)
    device_groups.use("nccl", 60.0)
    try:
        device_groups.place([torch.device("cuda", 1)])
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(device_groups.with_device, dist.HashStore(), 0, 1, None)
        assert made.result() == torch.device("cuda", 1)
    finally:
        device_groups.forget()


def test_groups_have_the_devices_of_the_stages() -> None:
    device_groups.BACKENDS["gpus"] = Gpus
    try:
        assert device_groups.place([torch.device("cuda", 1)]) is None
        device_groups.use("gpus", 60.0)
        found = []
        for names in (["cpu"], ["cuda:1", "cuda", "cuda:1", "cuda:3"], ["cpu", "cuda:2"]):
            shared = device_groups.place([torch.device(name) for name in names])
            found.append((shared, [str(device) for device in device_groups._current.devices]))
    finally:
        device_groups.forget()
        del device_groups.BACKENDS["gpus"]
    assert found == [
        ("0", ["cuda:3"]),
        ("0, 1, 0, 1", ["cuda:1", "cuda:3"]),
        ("0, 1", ["cuda:2"]),
    ]


def test_a_model_says_which_devices_its_stages_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a comparison with the other replicas, also with those that join later."""
    monkeypatch.setitem(device_groups.BACKENDS, "nccl", StandIn)
    device_groups.use("nccl", 60.0)
    try:
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        HybridParallel(module, optimizer, devices=["cpu", "cpu:0", "cpu"], num_stages=3)
        assert context().control.settings["devices"] == "0, 1, 0"
    finally:
        device_groups.forget()


class Aborted(StandIn):
    """A library that notes which groups were aborted, when it may."""

    def __init__(self) -> None:
        self.ended: set[object] = set()
        self.may_end = threading.Event()

    def abort(self, group: object) -> None:
        assert self.may_end.wait(60.0)
        self.ended.add(group)


def test_all_are_aborted_also_those_that_another_thread_has_begun_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the timer of a death does while the job recovers: destroying a group that is not aborted
    would wait for the one that is gone."""
    library, group = Aborted(), StandIn()
    monkeypatch.setitem(device_groups.BACKENDS, "nccl", lambda: library)
    monkeypatch.setattr(device_groups, "_all_groups", lambda: [group])
    begins, goes_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "pipollux-abort":
            begins.set()
            assert goes_on.wait(60.0)
        start(thread)

    def abort_all() -> None:
        device_groups.abort_all()
        found.append(group in library.ended)

    found: list[bool] = []
    device_groups.use("nccl", 60.0)
    try:
        monkeypatch.setattr(threading.Thread, "start", start_late)
        timer = threading.Thread(target=device_groups.abort, args=([group],))
        timer.start()
        assert begins.wait(60.0)
        recovery = threading.Thread(target=abort_all)
        recovery.start()
        recovery.join(0.2)  # it is over by then if it waits for nobody
        goes_on.set()
        timer.join()
        recovery.join(0.2)
        library.may_end.set()
        recovery.join()
    finally:
        device_groups.forget()
    assert found == [True]


def connect_two_devices() -> list[Any]:
    """Sums for the communicators of two devices, and then of one that a process does not have."""
    group = join()
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    shared = device_groups.place([*devices, devices[0]])
    sums, launch = [], group.allreduce

    def counted(tensors: Any) -> Any:
        sums.append(tensors)
        return launch(tensors)

    group.allreduce = counted  # type: ignore[method-assign]  # of a process of this test's own
    device_groups.connect([group], 60.0)
    count = len(sums)
    if group.rank() == 1:
        device_groups.place(devices[:1])
    said = ""
    try:
        device_groups.connect([group], 0.5)
    except RuntimeError as error:
        said = str(error)
    group.gloo.barrier().wait()
    group.abort()
    return [shared, count, said]


def test_the_communicators_of_all_devices_are_made_in_time_or_given_up() -> None:
    late = "a collective on cpu:0 took longer than 0.5 s"
    assert run_replicas(connect_two_devices, 2) == [["0, 1, 0", 2, late], ["0, 1, 0", 2, ""]]


def connect_to_one_that_is_gone() -> list[str]:
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "0.5"  # of a process of this test's own
    group = join()
    group.gloo.barrier().wait()
    if group.rank() == 1:
        os._exit(3)
    said = []
    for _ in range(2):
        try:
            device_groups.connect([group], 60.0)
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_communicator_that_is_not_made_in_time_is_given_up() -> None:
    """And one that was given up is of no use any more."""
    said, _ = run_replicas(connect_to_one_that_is_gone, 2, exit_codes=(3,))
    assert said == ["NCCL timeout", "NCCL communicator was aborted"]


def exchange_buffers() -> list[list[float]]:
    """Buffers that all take from rank 0, by collectives on bytes, and ones that they add up."""
    device_groups.BACKENDS["nccl"] = StandIn
    device_groups.use("nccl", 60.0)
    register_backend()
    dist.init_process_group(device_groups.BACKEND)
    group: Any = dist.group.WORLD
    device_groups.connect([group], 60.0)

    def broadcast(tensors: Any, options: Any) -> Any:
        return group._launch(lambda own, x: own.broadcast(x, options), tensors)

    group.broadcast = broadcast
    taken, added = (torch.full((2,), 1.0 + dist.get_rank()) for _ in range(2))
    broadcast_tensors([taken])
    all_reduce_sum([added])
    dist.destroy_process_group()
    return [taken.tolist(), added.tolist()]


def test_buffers_are_read_when_the_host_has_waited() -> None:
    assert run_replicas(exchange_buffers, 2) == [[[1.0, 1.0], [3.0, 3.0]]] * 2


def reach_after_an_abort() -> str:
    """What a wait for a sum with one that is gone says when its group is aborted."""
    group = join()
    store = PrefixStore("world", group._store)
    dist.init_process_group("gloo", store=store, rank=group.rank(), world_size=group.size())
    device_groups.connect([group], 60.0)
    if group.rank() == 1:
        os._exit(3)
    found = torch.ones(3)
    group.allreduce([found]).wait()
    device_groups.abort([group], after=0.1)
    said = ""
    try:
        device_groups.reach(found.device, group)
    except RuntimeError as error:
        said = str(error)
    return said


def test_nobody_goes_on_with_the_garbage_of_an_abort() -> None:
    said, _ = run_replicas(reach_after_an_abort, 2, exit_codes=(3,))
    assert said == "its group was aborted, as a process is gone"


def test_a_group_that_nobody_enters_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a job in which joining replicas die again and again would grow."""
    monkeypatch.setitem(device_groups.BACKENDS, "nccl", StandIn)
    device_groups.use("nccl", 60.0)
    try:
        group = device_groups.with_device(dist.HashStore(), 0, 1, None)
        device_groups.abort([group])
        device_groups.abort_all()
        known = weakref.ref(group)
        del group
        gc.collect()
        assert known() is None
        assert not device_groups._current.aborting
    finally:
        device_groups.forget()


def lose_one() -> list[Any]:
    """A sum with one that is gone, before and after the abort."""
    group = join()
    device_groups.connect([group], 60.0)
    if group.rank() == 1:
        os._exit(3)
    found = torch.ones(3)
    group.allreduce([found]).wait()
    passed = StandIn().fence(torch.device("cpu"))
    before = passed()
    group.abort()
    group.shutdown()
    return [before, passed(), math.isnan(found[0])]


def test_a_sum_with_one_that_is_gone_ends_by_an_abort_and_is_garbage() -> None:
    told, _ = run_replicas(lose_one, 2, exit_codes=(3,))
    assert told == [False, True, True]
