"""Limits of memory by control groups: where they can be created, and what they do."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipollux_agent.supervisor import MemoryGroup
from pipollux_sched.backend import ReplicaGroupManager, ReplicaProgram
from pipollux_sched.backend.local import cgroups
from pipollux_sched.backend.local.attempt_folder import AttemptFolder
from pipollux_sched.backend.local.cgroups import Hierarchy, MemoryGroups, NoGroupsError
from pipollux_sched.backend.replica.replica_process import ReplicaProcess
from pipollux_sched.lifecycle import Exited, Outcome
from pipollux_sched.store import StateDir
from tests.sched.backend.local.test_backend import wait_for, wait_for_text
from tests.sched.backends import cpu_nodes, first_membership, local_backend

MIB = 2**20
GREEDY = """
import pathlib, sys, time
print("up", flush=True)
go = pathlib.Path(sys.argv[1])
while not go.exists():
    time.sleep(0.01)
kept = b"x" * 2**28
print("it has more than it may", flush=True)
time.sleep(600)
"""
"""Allocates its memory at once, in less time than passes between two checks."""

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
UNIFIED = "33 32 0:28 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "37 32 0:32 / /sys/fs/cgroup/memory rw,nosuid,relatime shared:14 - cgroup cgroup rw,memory\n"
CPU = "42 32 0:37 / /sys/fs/cgroup/cpu,cpuacct rw shared:19 - cgroup cgroup rw,cpu,cpuacct\n"
SYSTEMD = "34 32 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
OVERLAY = "600 500 0:55 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/a:/b\n"
SESSION = "/user.slice/user-1000.slice/session-2.scope"


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "expected"),
    [
        pytest.param(
            "0::/system.slice/pipollux.service\n",
            OVERLAY + V2,
            [(2, "/sys/fs/cgroup", "/sys/fs/cgroup/system.slice/pipollux.service")],
            id="version 2",
        ),
        pytest.param(
            f"12:memory:{SESSION}\n10:freezer:/\n6:cpu,cpuacct:/user.slice\n"
            f"1:name=systemd:{SESSION}\n0::{SESSION}\n",
            OVERLAY + UNIFIED + SYSTEMD + V1 + CPU,
            [(1, "/sys/fs/cgroup/memory", f"/sys/fs/cgroup/memory{SESSION}")],
            id="hybrid: version 2 without controllers",
        ),
        pytest.param(
            "4:memory:/\n3:cpu,cpuacct:/\n",
            CPU + V1,
            [(1, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory")],
            id="version 1 without systemd",
        ),
        pytest.param(
            "9:memory:/docker/5425\n1:name=systemd:/docker/5425\n0::/docker/5425\n",
            "152 148 0:28 /docker/5425 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            [(1, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory")],
            id="container of version 1",
        ),
        pytest.param(
            "9:memory:/kubepods/burstable/pod1/2\n",
            "152 148 0:28 /kubepods/burstable/pod1 /cg rw master:9 - cgroup cgroup rw,memory\n",
            [(1, "/cg", "/cg/2")],
            id="pod of version 1",
        ),
        pytest.param("0::/\n", V2, [(2, "/sys/fs/cgroup", "/sys/fs/cgroup")], id="namespace"),
        pytest.param(
            "0::/../other\n",
            "30 23 0:26 /../.. /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n",
            [],
            id="outside of its namespace",
        ),
        pytest.param(
            "0::/init.scope\n",
            "30 23 0:26 /docker/5425 /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
            [],
            id="a mount of other groups",
        ),
        pytest.param(
            "0::/a:b\n",
            "30 23 0:26 / /mnt/my\\040groups rw - cgroup2 cgroup rw\n",
            [(2, "/mnt/my groups", "/mnt/my groups/a:b")],
            id="spaces and colons",
        ),
        pytest.param("", OVERLAY, [], id="none"),
    ],
)
def test_where_the_memory_controller_is(
    cgroup: str, mountinfo: str, expected: list[tuple[int, str, str]]
) -> None:
    found = cgroups.hierarchies(cgroup, mountinfo)
    assert found == [Hierarchy(version, Path(a), Path(b)) for version, a, b in expected]


class Tree:
    """A folder with the files that the kernel shows in a hierarchy of version 2."""

    def __init__(self, mount: Path, *, real_root: bool) -> None:
        self.mount = mount
        self.add(mount, root=real_root)

    def add(self, group: Path, *, root: bool = False, processes: str = "") -> Path:
        group.mkdir(exist_ok=True)
        files = {"cgroup.controllers": "cpu memory pids\n", "cgroup.subtree_control": "cpu\n"}
        files["cgroup.procs"] = processes
        if not root:
            files |= {"cgroup.type": "domain\n", "memory.max": "max\n", "memory.swap.max": "max\n"}
            files |= {"memory.oom.group": "0\n", "memory.peak": "0\n"}
            files["memory.events"] = "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n"
        for name, text in files.items():
            (group / name).write_text(text)
        return group

    def bases(self, own: Path) -> list[Path]:
        return list(cgroups.bases(Hierarchy(2, self.mount, own)))


@pytest.mark.parametrize("real_root", [False, True])
def test_groups_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_root: bool
) -> None:
    tree = Tree(tmp_path, real_root=real_root)
    unit = tree.add(tmp_path / "pipollux.service")
    scope = tree.add(tmp_path / "run-1.scope")
    child = tree.add(unit / "scheduler")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert tree.bases(unit) == ([tmp_path] if real_root else [])
    assert tree.bases(tmp_path) == [tmp_path]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    allowed = {group / "cgroup.subtree_control" for group in (unit, scope)}
    monkeypatch.setattr(os, "access", lambda path, _mode: path in allowed)
    assert [tree.bases(group) for group in (scope, unit, child)] == [[scope], [], []]
    for group in (unit, scope):
        os.setxattr(group, "user.delegate", b"1")  # as systemd's Delegate= does
    allowed.clear()
    for euid in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda euid=euid: euid)
        assert [tree.bases(group) for group in (scope, child)] == [[scope], [unit]]
    assert tree.bases(unit) == []


def test_files_of_version_2(tmp_path: Path) -> None:
    tree = Tree(tmp_path, real_root=True)
    group = tree.add(tmp_path / "pipollux-job-1-0-abcd")
    cgroups.set_limit(group, 2, 300 * MIB)
    values = ["memory.max", "memory.swap.max", "memory.oom.group"]
    # The kernel replaces the value; this folder keeps what a longer one has left.
    assert [(group / name).read_text().split()[0][:9] for name in values] == [
        "314572800",
        "0ax",
        "1",
    ]
    (group / "memory.swap.max").unlink()
    cgroups.set_limit(group, 2, 300 * MIB)
    assert not (group / "memory.swap.max").exists()


@pytest.mark.parametrize(
    ("events", "peak", "code", "recorded"),
    [
        ("oom 1\noom_kill 3\n", 300 * MIB, 1, (-9, [300 * MIB, 300 * MIB])),
        ("oom 1\noom_kill 3\n", None, -9, (-9, [300 * MIB, 300 * MIB])),
        ("oom 0\noom_kill 3\n", 300 * MIB, -9, (-9, None)),  # the machine had no memory
        ("oom 0\noom_kill 0\n", 300 * MIB, 1, (1, None)),
        ("oom 1\noom_kill 1\n", 300 * MIB, 0, (0, None)),
    ],
)
def test_what_version_2_says_of_the_end(
    tmp_path: Path,
    events: str,
    peak: int | None,
    code: int,
    recorded: tuple[int, list[int] | None],
) -> None:
    """The status is that of a killed process, even if the agent has noticed the kill before."""
    group = Tree(tmp_path, real_root=True).add(tmp_path / "job")
    (group / "memory.events").write_text(f"low 0\nhigh 0\nmax 7\n{events}oom_group_kill 0\n")
    (group / "memory.peak").unlink() if peak is None else (group / "memory.peak").write_text(
        f"{peak}\n"
    )
    watch = MemoryGroup(300 * MIB, group)
    assert (watch.end(code), watch.status().get("memory")) == recorded


def test_a_group_whose_processes_move(tmp_path: Path) -> None:
    """Those of a delegated group must go to a child before its children have controllers."""
    tree = Tree(tmp_path, real_root=False)
    tree.add(tmp_path / "pipollux-scheduler")
    with subprocess.Popen(["sleep", "600"]) as process:
        (tmp_path / "cgroup.procs").write_text(f"{process.pid}\n")
        cgroups._enable(tmp_path, tmp_path)
        process.kill()
    assert (tmp_path / "pipollux-scheduler" / "cgroup.procs").read_text() == str(process.pid)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    with pytest.raises(NoGroupsError, match="memory controller is not enabled"):
        cgroups._enable(tmp_path, tmp_path)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryGroups]:
    """Control groups of this machine; as root, the hierarchy is mounted where it is not."""
    mounted = tmp_path / "mounted"
    try:
        found = cgroups.find()
    except NoGroupsError as error:
        mounted.mkdir()
        mount = ["mount", "-t", "cgroup", "-o", "memory", "none", str(mounted)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
            # No service that could be installed, but a property of the machine or its container.
            pytest.skip(f"no control group can be created ({error}): run pytest as root")
        found = cgroups.find()
    monkeypatch.setattr(cgroups, "of_this_process", lambda: found)
    before = set(found.base.glob("pipollux-*"))
    yield found
    left = set(found.base.glob("pipollux-*")) - before
    if mounted.exists():
        subprocess.run(["umount", str(mounted)], check=True)
    assert left == set()


class Greedy:
    """A job that uses too much memory once a file exists."""

    def __init__(self, folder: Path, state_dir: StateDir) -> None:
        self.go, self.state_dir = folder / "go", state_dir
        script = folder / "greedy.py"
        script.write_text(GREEDY)
        self.program = ReplicaProgram(
            job="greedy", script=script, args=(str(self.go),), memory_limit=100 * MIB
        )
        self.log = state_dir.log("greedy", 1, 0)

    def backend(self) -> ReplicaGroupManager:
        return local_backend(cpu_nodes(node_a=1), self.state_dir)

    def start(self) -> ReplicaGroupManager:
        backend = self.backend()
        backend.apply(self.program, 1, ["node-a"])
        wait_for_text(self.log, "up")
        return backend

    def ends(self, backend: ReplicaGroupManager) -> None:
        """Let it allocate, and check the failure."""
        self.go.touch()
        exited = wait_for(backend, Exited)
        assert isinstance(exited, Exited)
        assert exited.outcome is Outcome.FAILED
        assert exited.status == 128 + signal.SIGKILL
        assert "out of memory: limit 0.10 GiB, used 0.10 GiB; raise memory_limit" in exited.message
        assert "it has more than it may" not in self.log.read_text()
        backend.forget("greedy", 1)
        backend.shutdown()


@pytest.fixture
def greedy(tmp_path: Path, state_dir: StateDir, light_agent: None) -> Greedy:
    return Greedy(tmp_path, state_dir)


def test_the_kernel_kills_what_allocates_at_once(groups: MemoryGroups, greedy: Greedy) -> None:
    backend = greedy.start()
    group = cgroups.recorded(AttemptFolder(greedy.state_dir, "greedy", 1).group(0))
    assert group is not None
    assert group.parent == groups.base
    assert len(cgroups.processes(group)) == 2  # the agent and the script
    greedy.ends(backend)
    assert not group.exists()


def test_the_next_scheduler_removes_the_group(groups: MemoryGroups, greedy: Greedy) -> None:
    """It reports the cause, too: the first one has ended without a word."""
    first = greedy.start()
    backend = greedy.backend()
    assert backend.adopt("greedy", 1, "", first_membership(1)) is None
    greedy.ends(backend)
    first.shutdown()  # only to wait for its child
    assert groups.base.exists()


def test_a_killed_supervisor(groups: MemoryGroups, greedy: Greedy) -> None:
    """Its processes end with it, and are found in the group."""
    backend = greedy.start()
    folder = AttemptFolder(greedy.state_dir, "greedy", 1)
    group = cgroups.recorded(folder.group(0))
    assert group is not None
    psutil.Process(ReplicaProcess(folder.status(0)).pid).kill()
    assert isinstance(wait_for(backend, Exited), Exited)
    assert not group.exists()
    backend.shutdown()
    assert groups.base.exists()


def test_without_groups_checks_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_dir: StateDir
) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text(OVERLAY)
    with pytest.raises(NoGroupsError, match="no hierarchy") as none:
        cgroups.find(tmp_path)
    monkeypatch.setattr(cgroups, "of_this_process", lambda: none.value)
    assert "enforced by checks twice a second, as no control" in cgroups.describe()
    record = state_dir.path / "replica-0.cgroup"
    assert cgroups.create_recorded("job-1-0", MIB, record) is None
    assert not record.exists()
    (tmp_path / "mountinfo").write_text(f"30 23 0:26 / {tmp_path} rw - cgroup2 cgroup rw\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with pytest.raises(NoGroupsError, match="is not delegated"):
        cgroups.find(tmp_path)
