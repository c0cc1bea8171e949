"""GPUs that are broken, or used by others: left out, shown, and used again."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from pipollux_sched.backend.base import Node, ReplicaKey, SlotAssignment
from pipollux_sched.backend.local.gpus.foreign import LATE, RETURN_AFTER, ForeignUse
from pipollux_sched.backend.local.gpus.probe_process import GpuProbe
from pipollux_sched.backend.local.local_gpus import LocalGpus
from pipollux_sched.backend.slots import SlotLedger
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.store import StateDir
from tests.sched.backend.local.nvml import GIB, FakeNvml, gpu, mig, process, slice_uuid, uuid
from tests.waiting import until

HEALTHY = {"ecc": 0, "pending_pages": 0, "retired": 0, "remap_pending": 0, "recovery": 0}


@pytest.fixture
def probe() -> Iterator[GpuProbe]:
    found = GpuProbe(timeout=20.0)
    yield found
    found.close()


CASES: list[tuple[Mapping[str, int], str]] = [
    (HEALTHY, ""),
    # A consumer's GPU, or a virtual one: nothing is supported, and nothing speaks against it.
    (dict.fromkeys((*HEALTHY, "used", "util", "processes", "mig"), -3), ""),
    # Without permission, or with an old driver that lacks the function.
    (dict.fromkeys(HEALTHY, -4), ""),
    (dict.fromkeys(HEALTHY, -13), ""),
    ({"ecc": 1}, "1 uncorrectable ECC error since its last reset"),
    ({"ecc": 2}, "2 uncorrectable ECC errors since its last reset"),
    ({"remap_pending": 1}, "a row of its memory waits to be remapped: it needs a reset"),
    ({"remap_failed": 1}, "a row of its memory could not be remapped: it has to be replaced"),
    ({"pending_pages": 1}, "a page of its memory waits to be retired: it needs a reset"),
    ({"retired": 59}, ""),
    ({"retired": 60}, "60 retired pages: it has to be replaced"),
    ({"recovery": 1}, "the driver says that it needs a reset"),
    ({"recovery": 2}, "the driver says that it needs a reboot of the machine"),
    ({"recovery": 3}, ""),
    ({"lost": 15}, "it does not work (GPU is lost)"),
    ({"handle": 15}, "it does not work (GPU is lost)"),
    ({"ecc": -16}, "it does not work (GPU requires restart)"),
    (
        {"ecc": 1, "remap_pending": 1},
        "1 uncorrectable ECC error since its last reset; a row of its memory waits to be "
        "remapped: it needs a reset",
    ),
]
"""How GPUs differ from a healthy one, and what is wrong with each."""


def test_what_is_wrong_with_a_gpu(nvml: FakeNvml, probe: GpuProbe) -> None:
    """All of them are in one machine, so that none hides what is wrong with another one."""
    nvml.set(*(gpu(number, **values) for number, (values, _) in enumerate(CASES)))
    found = probe.read().gpus
    assert [(one.index, one.problem) for one in found] == [
        (number, problem) for number, (_, problem) in enumerate(CASES)
    ]
    nameless = [number for number, (values, _) in enumerate(CASES) if "handle" in values]
    assert [one.index for one in found if one.uuid == ""] == nameless
    assert {one.uuid for one in found if one.uuid} == {
        uuid(number) for number in range(len(CASES)) if number not in nameless
    }


def test_use_is_that_of_the_device(nvml: FakeNvml, probe: GpuProbe) -> None:
    nvml.set(
        *(gpu(0, used=61 * GIB, util=87), process(71), process(70), process(71)),
        *(gpu(1, mig=1, used=GIB), mig(0, 1), process(72), gpu(2, used=-3, util=-3, processes=-4)),
    )
    whole, parent, unknown = probe.read().gpus
    assert (whole.use.memory_used, whole.use.memory_total) == (61 * GIB, 141 * GIB)
    assert (whole.use.utilization, whole.use.processes) == (0.87, (70, 71))
    ((name, use),) = parent.devices()
    assert name == slice_uuid(0, 1)
    assert (use.memory_total, use.processes) == (17 * GIB, (72,))
    assert use.utilization is None, "NVML does not support it for slices"
    assert (unknown.use.memory_used, unknown.use.utilization, unknown.use.processes) == (None,) * 3


class Marked:
    """Who is on a GPU, by a clock that a test sets; marked processes are ours."""

    def __init__(self) -> None:
        self.now = 0.0
        self.foreign = ForeignUse(lambda found: found.get("MARK") == "ours", lambda: self.now)

    def look(self, *pids: int, held: bool = False) -> str:
        return self.foreign.look("GPU-0", pids, held=held)


@pytest.fixture
def marked() -> Marked:
    return Marked()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process without a mark, with a child that is marked as ours, and so is not foreign."""
    # The child says that it runs: while a program is loaded, its environment is empty.
    inner = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    program = (
        "import subprocess, sys;"
        f"child = subprocess.Popen([sys.executable, '-c', {inner!r}],"
        " stdin=subprocess.PIPE, env={'MARK': 'ours'});"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={"PATH": "/bin"}) as started:
        yield started
        assert started.stdin is not None
        started.stdin.close()


def test_processes_of_jobs_are_ours(marked: Marked, sleeper: subprocess.Popen[bytes]) -> None:
    assert sleeper.stdout is not None
    child = int(sleeper.stdout.readline())
    assert marked.look(child) == ""
    said = marked.look(child, sleeper.pid)
    name = psutil.Process(sleeper.pid).name()
    assert said == f"process {sleeper.pid} ({name}) of user {getpass.getuser()}"
    assert " and 1 more" in marked.look(sleeper.pid, os.getppid())


def test_a_gpu_is_used_again_a_while_after_its_foreign_process(
    marked: Marked, sleeper: subprocess.Popen[bytes]
) -> None:
    said = marked.look(sleeper.pid)
    assert said
    marked.now = RETURN_AFTER - 1
    assert marked.look() == said, "another one may follow at once"
    marked.now = RETURN_AFTER
    assert marked.look() == ""


def test_nothing_on_a_gpu_is_foreign_while_a_job_holds_it(
    marked: Marked, sleeper: subprocess.Popen[bytes]
) -> None:
    """It may be in a container of the job, which ends a while after the job."""
    gone = 2**22 + 1
    assert marked.look(sleeper.pid, gone, held=True) == ""
    assert marked.look(sleeper.pid, gone) == ""
    marked.now = LATE - 1
    assert marked.look(sleeper.pid) == ""
    assert marked.look(os.getppid()), "this one was not there with the job"
    marked.now = LATE
    assert str(sleeper.pid) in marked.look(sleeper.pid)


def test_a_process_that_is_not_visible_counts_if_it_stays(marked: Marked) -> None:
    """It has just ended, or is in another PID namespace."""
    gone = 2**22 + 1  # above the largest process id
    assert marked.look(gone) == ""
    marked.now = LATE - 1
    assert marked.look(gone) == ""
    marked.now = LATE
    assert marked.look(gone) == f"process {gone}, which is not visible here"
    marked.now += RETURN_AFTER
    assert marked.look() == ""
    assert marked.look(gone) == "", "it is another one"


def test_slots_that_are_left_out_keep_their_holder() -> None:
    spec = NodeSpec(name="a", slots=4)
    ledger = SlotLedger({"a": Node(spec, left_out=dict.fromkeys((0, 2), "it is broken"))})
    assert ledger.free() == {"a": 2}
    assert ledger.fits(["a"], 2)
    assert not ledger.fits(["a"], 3)
    assert ledger.take("one", {0: "a"}, 2) == {0: SlotAssignment("a", (1, 3))}
    assert ledger.take("two", {0: "a"}, 1) is None
    ledger.resize({"a": Node(spec, left_out={1: "it is broken"})})
    assert ledger.free() == {"a": 2}
    assert ledger.held() == {("a", 1): "one", ("a", 3): "one"}
    assert ledger.fits(["a"], 4), "the slot that is held may stay so"
    ledger.release("one")
    assert ledger.free() == {"a": 3}
    assert not ledger.fits(["a"], 4)
    assert ledger.restore("adopted", {0: SlotAssignment("a", (1,))}), "what runs there goes on"


def local_gpus(state_dir: StateDir, slots: int) -> LocalGpus:
    cluster = ClusterSpec(nodes=(NodeSpec(name="a", slots=slots),))
    return LocalGpus(cluster, state_dir, interval=0.02)


def test_a_broken_gpu_is_left_out_until_it_is_healthy(
    nvml: FakeNvml, state_dir: StateDir, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.set(gpu(0), gpu(1))
    gpus = local_gpus(state_dir, 2)
    try:
        assert gpus.nodes()["a"].slots == 2
        nvml.set(gpu(0), gpu(1, ecc=3))
        until(lambda: gpus.nodes()["a"].slots == 1, "it is left out")
        (why,) = gpus.nodes()["a"].left_out.values()
        assert why == "GPU 1 (GPU-00000001): 3 uncorrectable ECC errors since its last reset"
        nvml.set(gpu(1))
        until(lambda: 0 in gpus.nodes()["a"].left_out, "the other one is gone")
        nvml.set("driver init=999\n")
        until(lambda: gpus.nodes()["a"].slots == 0, "the driver has failed")
        nvml.set(gpu(1), gpu(0))
        until(lambda: gpus.nodes()["a"].slots == 2, "they are back, in another order")
        ids = [one.id for one in gpus.devices()["a"]]
        assert ids == [uuid(0), uuid(1)]
    finally:
        gpus.close()
    assert "node a: slot 1 is left out. GPU 1 (GPU-00000001): 3 uncorrectable" in caplog.text
    assert "node a: slot 1 is used again" in caplog.text


def test_a_gpu_with_a_foreign_process_is_left_out_unless_a_job_holds_it(
    nvml: FakeNvml, state_dir: StateDir
) -> None:
    pid = os.getppid()
    nvml.set(gpu(0), gpu(1), process(pid))
    gpus = local_gpus(state_dir, 2)
    try:
        (why,) = gpus.nodes()["a"].left_out.values()
        assert why.startswith(f"GPU 1 (GPU-00000001): used by process {pid} (")
        gpus.hold(ReplicaKey("toy", 1, 0), {"CUDA_VISIBLE_DEVICES": uuid(1)})
        until(lambda: not gpus.nodes()["a"].left_out, "its job may have started the process")
        gpus.keep_held([])
        nvml.set(gpu(0), process(pid), gpu(1))
        until(lambda: 0 in gpus.nodes()["a"].left_out, "it is on the other one now")
        assert gpus.nodes()["a"].slots == 1
    finally:
        gpus.close()


def test_gpus_are_watched_once_a_node_has_some(
    nvml: FakeNvml, state_dir: StateDir, tmp_path: Path
) -> None:
    nvml.set(gpu(0, ecc=1))
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes:\n  - {name: c, slots: 1, kind: cpu}\n")
    gpus = LocalGpus(file, state_dir, interval=0.02)
    try:
        assert gpus.devices() == {}
        aside = tmp_path / "new.yaml"
        aside.write_text(file.read_text() + "  - {name: a, slots: 1}\n")
        aside.replace(file)
        assert gpus.nodes()["a"].slots == 0
        nvml.set(gpu(0))
        until(lambda: gpus.nodes()["a"].slots == 1, "it is healthy again")
    finally:
        gpus.close()


def test_nodes_that_come_while_the_driver_fails_have_no_gpus(
    nvml: FakeNvml, state_dir: StateDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*names: str) -> None:
        aside = tmp_path / "new.yaml"
        aside.write_text("nodes:\n" + "".join(f"  - {{name: {n}, slots: 1}}\n" for n in names))
        aside.replace(file)

    file = tmp_path / "cluster.yaml"
    write("a")
    nvml.set(gpu(0), gpu(1), gpu(2, remap_pending=1))
    LocalGpus(file, state_dir, interval=60.0).close()
    nvml.set("driver init=999\n")
    gpus = LocalGpus(file, state_dir, interval=0.02)
    try:
        write("a", "b")
        assert gpus.nodes().keys() == {"a"}
        assert "the driver of this machine does not list its GPUs" in caplog.text
        nvml.set(gpu(0), gpu(1), gpu(2, remap_pending=1))
        until(lambda: gpus.nodes()["a"].slots == 1, "the driver works again")
        write("a", "b", "c")
        assert gpus.nodes()["c"].slots == 0, "its state was not read yet, or needs a reset"
        until(lambda: gpus.nodes()["b"].slots == 1, "it was read")
        assert gpus.nodes()["c"].slots == 0
    finally:
        gpus.close()


def test_the_processes_of_this_schedulers_jobs_are_not_foreign(
    nvml: FakeNvml, state_dir: StateDir
) -> None:
    marks = {**os.environ, "PIPOLLUX_STATE_DIR": str(state_dir.path)}
    other = {**os.environ, "PIPOLLUX_STATE_DIR": f"{state_dir.path}-2"}
    code = "import sys; print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=environment)
        for environment in (marks, other)
    ]
    for one in started:
        assert one.stdout is not None
        one.stdout.readline()
    nvml.set(*(line for n, one in enumerate(started) for line in (gpu(n), process(one.pid))))
    gpus = local_gpus(state_dir, 2)
    try:
        assert gpus.nodes()["a"].left_out.keys() == {1}
    finally:
        gpus.close()
        for one in started:
            one.communicate(b"")
