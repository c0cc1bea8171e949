"""Which GPUs are slots, through NVIDIA's real package and a library that stands for the driver."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pipollux_sched.backend.base import BackendError, Launch, SlotAssignment
from pipollux_sched.backend.local import hardware, local_gpus
from pipollux_sched.backend.local.attempt_folder import AttemptFolder, LocalPlacement
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.backend.local.gpus.probe_process import MOST_STUCK, GpuProbe
from pipollux_sched.backend.local.gpus.slots import assign, load
from pipollux_sched.backend.local.gpus.state import GpuState, MigSlice
from pipollux_sched.backend.local.gpus.visible import index_of, select
from pipollux_sched.backend.local.hardware import count_gpus, this_machine
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.store import StateDir
from tests.sched.backend.local.nvml import FakeNvml, gpu, mig, slice_uuid, uuid

WHOLE = [GpuState(index=index, uuid=f"GPU-{name}") for index, name in enumerate(("1a", "1b", "2a"))]
MIXED = [
    GpuState(index=0, uuid="GPU-1a"),
    GpuState(
        index=1,
        uuid="GPU-1b",
        mig=True,
        slices=tuple(
            MigSlice(uuid=f"MIG-{name}", gpu_instance=n, compute_instance=0)
            for n, name in ((7, "5a"), (8, "5b"))
        ),
    ),
]
ENTRIES = ("0", "2", "3", " 1", "-1", "+1", "1gpu", "", "x", "GPU-1a", "GPU-1b", "GPU-1", "GPU-2")
ENTRIES += ("GPU-2a", "GPU-3", " GPU-1b", "MIG-5a")


def by_torch(value: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the GPUs that torch takes to be visible, which knows CUDA's rules for whole GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = torch.cuda._parse_visible_devices()
    uuids = [one.uuid for one in WHOLE]
    if found and isinstance(found[0], str):
        names = [name for name in found if isinstance(name, str)]
        indices = (
            []
            if names[0].startswith("MIG-")
            else torch.cuda._transform_uuid_to_ordinals(names, uuids)
        )
    else:
        indices = list(itertools.takewhile(lambda n: n < len(uuids), map(int, found)))
    return [uuids[index] for index in indices]


@pytest.mark.parametrize("length", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_whole_gpus_are_visible_as_torch_says(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    for entries in itertools.product(ENTRIES, repeat=length):
        value = ",".join(entries)
        stripped = [entry.strip() for entry in entries]
        known = [entry if index_of(entry) is None else index_of(entry) for entry in stripped]
        if len(set(known)) < length:
            # With one that is repeated where it is hidden, torch does not look for invalid ones.
            continue
        assert select(value, WHOLE) == by_torch(",".join(stripped), monkeypatch), value
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, ["GPU-1a", "MIG-5a", "MIG-5b"]),
        *(("", []), ("-1", []), ("0,0", []), ("0,-1,0", ["GPU-1a"]), ("GPU-1a,GPU-1a", [])),
        *(("1", ["MIG-5a", "MIG-5b"]), ("1,0", ["MIG-5a", "MIG-5b", "GPU-1a"])),
        *(("GPU-1b", ["MIG-5a", "MIG-5b"]), ("GPU-1", [])),
        *(("MIG-5b,MIG-5a", ["MIG-5b", "MIG-5a"]), ("MIG-5", []), ("MIG-5a,0,MIG-5b", ["MIG-5a"])),
        *(("MIG-GPU-1b/8/0", ["MIG-5b"]), ("MIG-GPU-1b/8/0,MIG-5b", [])),
        *(("MIG-GPU-1b/9/0", []), ("MIG-GPU-1/8/0", []), ("MIG-GPU-1a/8/0", [])),
        *(("0,MIG-5a", ["GPU-1a"]), ("GPU-1a,MIG-5a", ["GPU-1a"])),
    ],
)
def test_slices_are_visible(value: str | None, found: list[str]) -> None:
    assert select(value, MIXED) == found


def rows_of(**rows: str) -> dict[str, tuple[str, ...]]:
    return {node: tuple(row) for node, row in rows.items()}


@pytest.mark.parametrize(
    ("saved", "wanted", "present", "rows"),
    [
        ({}, {"a": 2, "b": 1}, "012", rows_of(a="01", b="2")),
        # The driver lists them in another order, a node is new, and one is gone.
        ({"a": "10", "gone": "2"}, {"b": 1, "a": 2}, "0123", rows_of(b="2", a="10")),
        # A broken one keeps its slot, so that others keep theirs.
        ({"a": "0123"}, {"a": 4}, "013", rows_of(a="0123")),
        ({"a": "0123"}, {"a": 3}, "013", rows_of(a="0123")),
        # A new one takes the place of a broken one.
        ({"a": "01", "b": "23"}, {"a": 2, "b": 2}, "1234", rows_of(a="41", b="23")),
        ({"a": "0123"}, {"a": 2}, "0123", rows_of(a="01")),
        ({"a": "01"}, {"a": 3}, "01", rows_of(a="01")),
        ({"a": "00", "b": "0"}, {"a": 1, "b": 1}, "01", rows_of(a="0", b="1")),
    ],
)
def test_slots_keep_their_gpus(
    saved: dict[str, str],
    wanted: dict[str, int],
    present: str,
    rows: dict[str, tuple[str, ...]],
) -> None:
    assert assign({node: [*row] for node, row in saved.items()}, wanted, [*present]) == rows


def test_gpus_that_must_not_be_used_any_more_lose_their_slots() -> None:
    assert assign({"a": ["0", "1"]}, {"a": 2}, ["1"], ["0"]) == {"a": ("1",)}
    assert assign({"a": ["0", "1"]}, {"a": 2}, ["1", "2"], ["0"]) == {"a": ("2", "1")}


def test_the_driver_tells_the_gpus_of_this_machine(nvml: FakeNvml) -> None:
    nvml.set(gpu(0), gpu(1, mig=1), mig(0, 1), mig(1, 1), mig(2, 1), gpu(2))
    whole, slices = this_machine().nodes
    assert (whole.slots, slices.slots) == (2, 3)
    assert slices.name == f"{whole.name}-mig"
    assert whole.memory is not None
    assert slices.memory is not None
    assert whole.memory * 3 // 2 - 3 <= slices.memory <= whole.memory * 3 // 2 + 3
    nvml.set(gpu(0, mig=1), mig(0))
    (only,) = this_machine().nodes
    assert (only.name, only.slots) == (whole.name, 1)
    # Without permission, or where the driver knows no MIG mode.
    nvml.set(gpu(0, handle=4), gpu(1, mig=-3), gpu(2, mig=-13))
    assert count_gpus() == 2


@pytest.mark.parametrize(
    ("value", "count"),
    [(uuid(1)[:12], 1), (f"{uuid(1)[:12]},{uuid(0)}", 2), (uuid(0)[:7], 0), ("1,0,7", 2)],
)
def test_the_variable_selects_among_the_drivers_gpus(
    value: str, count: int, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.set(gpu(0), gpu(1), gpu(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert count_gpus() == count


def test_cpu_slots_lie_beside_the_gpus_of_this_machine(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "count_cpus", lambda: 16)
    nvml.set(gpu(0), gpu(1))
    (plain,) = this_machine().nodes
    gpus, cpus = this_machine(cpu_slots=4).nodes
    assert (gpus.name, gpus.slots, gpus.cpus) == (plain.name, 2, 12)
    assert (cpus.name, cpus.slots, cpus.beside) == (f"{plain.name}-cpu", 4, plain.name)
    assert plain.memory is not None
    assert gpus.memory is not None
    assert cpus.memory is not None
    assert cpus.memory == plain.memory // 4
    assert gpus.memory + cpus.memory == plain.memory
    nvml.set(gpu(0), gpu(1, mig=1), mig(0, 1))
    found = [(node.slots, node.cpus, node.kind) for node in this_machine(cpu_slots=4).nodes]
    assert found == [(1, 6, "gpu"), (4, 4, "cpu"), (1, 6, "gpu")]
    with pytest.raises(BackendError, match="16 CPU slots leave none of 16 CPUs"):
        this_machine(cpu_slots=16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BackendError, match="cannot lie beside GPUs: this machine has none"):
        this_machine(cpu_slots=4)


def test_indices_of_different_gpus_need_an_order(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.set(gpu(0, name="NVIDIA-T4"), gpu(1), gpu(2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(
        BackendError, match=r"NVIDIA-H200, NVIDIA-T4.*set CUDA_DEVICE_ORDER=PCI_BUS"
    ):
        this_machine()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert this_machine().nodes[0].slots == 2
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    for certain in (uuid(0), "0,1,2", "2,1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", certain)
        assert this_machine().nodes[0].slots == certain.count(",") + 1


def test_a_driver_that_fails_makes_no_cpu_node(nvml: FakeNvml) -> None:
    nvml.set("driver init=18\n")
    with pytest.raises(
        BackendError, match="does not list them: RM has detected an NVML/RM version mismatch"
    ):
        this_machine()
    nvml.set("driver init=9\n")
    assert this_machine().nodes[0].kind == "cpu", "there is no driver"


@contextmanager
def engine_on(state_dir: StateDir, **slots: int) -> Iterator[LocalEngine]:
    nodes = [NodeSpec(name=name, slots=number) for name, number in slots.items()]
    engine = LocalEngine(ClusterSpec(nodes=tuple(nodes)), state_dir)
    try:
        yield engine
    finally:
        engine.close()


def launch_on(node: str, *slots: int) -> Launch:
    return Launch(
        job="toy",
        attempt=1,
        assignments={0: SlotAssignment(node, slots)},
        num_first=1,
        scheduler_url="",
        checkpoints="",
    )


def visible(engine: LocalEngine, node: str) -> str:
    """Return what replicas on all slots of a node see."""
    slots = range(engine.nodes()[node].spec.slots)
    return engine._devices_of(launch_on(node, *slots))[0]["CUDA_VISIBLE_DEVICES"]


def test_a_slot_keeps_its_gpu_over_restarts(nvml: FakeNvml, state_dir: StateDir) -> None:
    """The driver lists the GPUs in another order, and one has fallen off the bus."""
    nvml.set(gpu(0), gpu(1), gpu(2))
    with engine_on(state_dir, a=2, b=1) as engine:
        assert visible(engine, "a") == f"{uuid(0)},{uuid(1)}"
        assert visible(engine, "b") == uuid(2)
    nvml.set(gpu(2), gpu(1))
    with engine_on(state_dir, b=1, a=2) as engine:
        assert visible(engine, "a") == f"{uuid(0)},{uuid(1)}"
        assert visible(engine, "b") == uuid(2)
        node = engine.nodes()["a"]
        assert node.left_out == {0: "GPU (GPU-00000000): the driver does not list it"}
        assert node.slots == 1
    with pytest.raises(BackendError, match=r"have 4 slots of kind gpu .* has 2 GPUs"):
        LocalEngine(ClusterSpec(nodes=(NodeSpec(name="x", slots=4),)), state_dir)
    with engine_on(state_dir, b=1) as engine:
        assert visible(engine, "b") == uuid(2)


def test_what_runs_is_adopted_only_on_its_own_gpus(nvml: FakeNvml, state_dir: StateDir) -> None:
    nvml.set(gpu(0), gpu(1))
    launch = launch_on("a", 1)
    with engine_on(state_dir, a=2) as engine:
        folder = AttemptFolder(state_dir, "toy", 1)
        folder.create()
        folder.write(LocalPlacement(devices=engine._devices_of(launch), port=1))
        assert engine.holds(launch)
    nvml.set(gpu(1), gpu(0))
    with engine_on(state_dir, a=2) as engine:
        assert engine.holds(launch), "it has the same GPU, at another index"
    (state_dir.path / "gpus.json").unlink()
    with engine_on(state_dir, a=2) as engine:
        assert not engine.holds(launch), "its slot is another GPU"


def test_slices_are_slots_of_single_stages(nvml: FakeNvml, state_dir: StateDir) -> None:
    nvml.set(gpu(0, mig=1), mig(0), mig(1), gpu(1))
    with engine_on(state_dir, whole=1, slices=2) as engine:
        assert visible(engine, "whole") == uuid(1)
        assert visible(engine, "slices") == f"{slice_uuid(0)},{slice_uuid(1)}"
        nodes = engine.nodes()
        assert [nodes[name].spec.single_stage for name in ("whole", "slices")] == [False, True]
    nvml.set(gpu(0, mig=1), mig(1), gpu(1, mig=1))
    with engine_on(state_dir, whole=1, slices=2) as engine:
        nodes = engine.nodes()
        assert nodes["slices"].left_out == {
            0: "MIG slice of GPU (MIG-00000000): the driver does not list it"
        }
        (why,) = nodes["whole"].left_out.values()
        assert "it is in MIG mode now; start the scheduler again" in why


def hang(nvml: FakeNvml) -> None:
    nvml.set(gpu(0), gpu(1, hang=1), gpu(2))


def test_a_gpu_that_blocks_the_driver_is_given_up(nvml: FakeNvml) -> None:
    now = [0.0]
    probe = GpuProbe(timeout=1.0, retry_after=100.0, clock=lambda: now[0])
    try:
        hang(nvml)
        for _ in range(2):  # the second time, it is not asked
            reading = probe.read()
            assert [one.uuid for one in reading.gpus] == [uuid(0), "", uuid(2)]
            assert reading.silent == (1,)
            assert "does not answer" in reading.gpus[1].problem
        nvml.set(gpu(0), gpu(1), gpu(2))
        assert probe.read().silent == (1,)
        now[0] = 200.0
        assert [one.uuid for one in probe.read().gpus] == [uuid(0), uuid(1), uuid(2)]
        nvml.set("driver hang=1\n")
        assert "did not answer within 1 s" in probe.read().error
    finally:
        probe.close()


def test_a_driver_that_keeps_processes_is_not_given_more(nvml: FakeNvml) -> None:
    """Even SIGKILL does not end a process in a call of a broken driver; others stand for these."""
    now = [0.0]
    probe = GpuProbe(timeout=0.5, retry_after=10.0, clock=lambda: now[0])
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as kept:
        try:
            hang(nvml)
            assert probe.read().silent == (1,)
            probe._stuck += [kept] * MOST_STUCK
            now[0] = 20.0
            nvml.set(gpu(0), gpu(1), gpu(2))
            assert probe.read().silent == (1,), "it is not asked, and others are"
            nvml.set("driver hang=1\n")
            assert "did not answer within" in probe.read().error
            nvml.set(gpu(0), gpu(1), gpu(2))
            assert f"{MOST_STUCK} processes hang in it" in probe.read().error
            kept.communicate(b"")
            assert probe.read().silent == ()
        finally:
            probe.close()


def broken(nvml: FakeNvml, problem: str) -> None:
    nvml.set("driver init=18\n" if problem == "driver" else "driver hang=1\n")


@pytest.mark.parametrize("problem", ["driver", "hang"])
def test_a_scheduler_starts_with_a_broken_driver(
    problem: str, nvml: FakeNvml, state_dir: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs is adopted, but only if it knows the GPUs from before."""
    monkeypatch.setattr(local_gpus, "GpuProbe", lambda: GpuProbe(timeout=1.0))
    broken(nvml, problem)
    with pytest.raises(BackendError, match="the driver of this machine does not list its GPUs"):
        LocalEngine(ClusterSpec(nodes=(NodeSpec(name="a", slots=1),)), state_dir)
    nvml.set(gpu(0))
    with engine_on(state_dir, a=1) as engine:
        assert engine.nodes()["a"].slots == 1
    broken(nvml, problem)
    with engine_on(state_dir, a=1) as engine:
        node = engine.nodes()["a"]
        assert node.slots == 0
        assert "its state cannot be read" in node.left_out[0]
        assert visible(engine, "a") == uuid(0)


def test_files_of_another_version_are_no_table(nvml: FakeNvml, state_dir: StateDir) -> None:
    nvml.set(gpu(0))
    table = state_dir.path / "gpus.json"
    table.parent.mkdir(exist_ok=True, parents=True)
    for text in ("", "[]", '{"nodes": 1}', '{"nodes": {"a": 5}}'):
        table.write_text(text)
        assert load(table) == {}
    with engine_on(state_dir, a=1) as engine:
        assert visible(engine, "a") == uuid(0)
    assert uuid(0) in Path(table).read_text()
