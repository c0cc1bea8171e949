"""What Slurm's commands print, recorded from Slurm 22.05, and what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipollux_sched.backend.base import ReplicaKey
from pipollux_sched.backend.replica.step_files import read_step_name, step_name
from pipollux_sched.backend.slurm.commands import (
    controller_variables,
    is_away,
    last_line,
    run,
    slurm_environment,
)
from pipollux_sched.backend.slurm.nodes import NodeStates, is_unknown, node_spec, why_down
from pipollux_sched.backend.slurm.output import (
    Share,
    SlurmJob,
    read_jobs,
    read_nodes,
    read_shares,
    read_steps,
    seconds,
)
from pipollux_sched.backend.slurm.pools import OwnAllocation, ends_within, own_allocation
from pipollux_sched.backend.slurm.replica_step import slurm_messages
from pipollux_sched.backend.slurm.snapshot import SlurmAllocation, SlurmSnapshot

JOBS = """\
1|RUNNING|0:55|1:00|s1|None|pipollux-abc
2|CANCELLED|9:51|10:00|s2|None|pipollux-abc
3|PENDING|2:00|2:00||Priority|a|b
4|COMPLETING|UNLIMITED|UNLIMITED|s[1-3]|NodeDown|pool
7_[1-3]|PENDING|2:00|2:00||Priority|array
"""
STEPS = "1.0|s2|a.a1.r2\n1.1|s2|char-lm.a12.r0\n4.batch|s2|batch\n4.interactive|s2|x\n"
NODE = (
    "NodeName=s2 Arch=x86_64 CoresPerSocket=1  CPUAlloc=16 CPUEfctv=16 CPUTot=16 CPULoad=11.33 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:4 NodeAddr=10.78.0.12 "
    "NodeHostName=s2 Version=22.05.8 OS=Linux 6.18.44-fc-v657 #1 SMP PREEMPT_DYNAMIC @0  "
    "RealMemory=4000 AllocMem=0 FreeMem=16151 Sockets=16 Boards=1 State={state} "
    "ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main  "
    "BootTime=2026-11-22T03:46:09 SlurmdStartTime=2026-11-22T17:00:13 "
    "LastBusyTime=2026-11-22T17:00:13 CfgTRES=cpu=16,mem=4000M,billing=16 AllocTRES=cpu=16 "
    "CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 "
    "ExtSensorsTemp=n/s{reason}\n"
)
DRAINED = NODE.format(
    state="ALLOCATED+DRAIN", reason=" Reason=fan is broken [x] [root@2026-11-22T17:00:42]"
)
JOB = (
    "JobId=1 JobName=pipollux-abc UserId=root(0) NodeList=s1 BatchHost=s1 NumNodes=1 NumCPUs=16 "
    "TRES=cpu=16,node=1,billing=16 CoreSpec=* JOB_GRES=gpu:4   Nodes=s1 CPU_IDs=0-15 Mem=0 "
    "GRES=gpu:4(IDX:0-3)   Nodes=s[2-3] CPU_IDs=0-3,8 Mem=2048 GRES=gpu:a100:2(IDX:0,3) "
    "MinCPUsNode=1 TresPerNode=gres:gpu:4 "
)
UP = Share(nodes="s2", cpus=16, memory=0, gpus=4, gpu_type=None)


def test_jobs() -> None:
    jobs = read_jobs(JOBS)
    assert jobs[1] == SlurmJob(1, "RUNNING", 55.0, 60.0, "s1", "", "pipollux-abc")
    assert jobs[3].name == "a|b"
    assert jobs[4].seconds_left is None
    assert jobs[4].reason == "NodeDown"
    assert sorted(jobs) == [1, 2, 3, 4]


def test_an_allocation_past_its_limit_is_at_its_end() -> None:
    line = "8|RUNNING|INVALID|3:00|s1|None|interactive\n"  # for as long as OverTimeLimit, and more
    job = read_jobs(line)[8]
    assert ends_within(job, 1.0)
    snapshot = SlurmSnapshot(jobs={8: job}, allocations={8: SlurmAllocation(job, {"s1": UP})})
    assert OwnAllocation(8).leaving(snapshot) == {"s1": "its allocation 8 ends in 0 min."}


def test_steps() -> None:
    assert [(step.step, step.job, step.node, step.name) for step in read_steps(STEPS)] == [
        ("1.0", 1, "s2", "a.a1.r2"),
        ("1.1", 1, "s2", "char-lm.a12.r0"),
    ]
    assert read_step_name("char-lm.a12.r0") == ReplicaKey("char-lm", 12, 0)
    assert read_step_name("pipollux-check") is None
    assert step_name(ReplicaKey("char-lm", 12, 0)) == "char-lm.a12.r0"


def test_nodes() -> None:
    node = read_nodes(DRAINED)["s2"]
    assert node.flags == {"ALLOCATED", "DRAIN"}
    assert node.reason == "fan is broken [x]"
    assert (node.memory, node.cpus) == (4000 * 2**20, 16)
    silent = read_nodes(NODE.format(state="DOWN*", reason=""))["s2"]
    assert silent.flags == {"DOWN", "NOT_RESPONDING"}
    assert why_down(silent) == "DOWN"
    assert why_down(node) == ""
    assert is_unknown(read_nodes(NODE.format(state="UNKNOWN", reason=""))["s2"])
    assert not is_unknown(node)


def test_shares() -> None:
    assert read_shares(JOB) == [
        Share(nodes="s1", cpus=16, memory=0, gpus=4, gpu_type=None),
        Share(nodes="s[2-3]", cpus=5, memory=2048 * 2**20, gpus=2, gpu_type="a100"),
    ]
    assert read_shares("Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=") == [
        Share(nodes="n1", cpus=4, memory=0, gpus=0, gpu_type=None)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:55", 55.0),
        ("1:00:00", 3600.0),
        ("2-01:00:00", 176400.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_times(text: str, expected: float | None) -> None:
    assert seconds(text) == expected


def test_slots_are_gpus_where_there_are_some() -> None:
    assert node_spec("s2", UP, None).model_dump(include={"slots", "kind", "memory"}) == {
        "slots": 4,
        "kind": "gpu",
        "memory": None,
    }
    spec = node_spec("s2", UP._replace(gpus=0), read_nodes(DRAINED)["s2"])
    assert (spec.slots, spec.kind, spec.memory) == (16, "cpu", 4000 * 2**20)


@pytest.mark.parametrize(
    ("gres", "slices"),
    [
        (None, False),
        ("a100", False),
        ("h100_80gb", False),
        ("1g.5gb", True),
        ("a100_3g.20gb", True),
    ],
)
def test_mig_slices_hold_single_stages(gres: str | None, slices: bool) -> None:
    assert node_spec("s2", UP._replace(gpu_type=gres), None).single_stage is slices


def view_of(state: str, now: list[float], view: NodeStates | None = None) -> tuple[bool, bool]:
    job = SlurmJob(1, "RUNNING", None, None, "s2", "", "pool")
    snapshot = SlurmSnapshot(
        number=1,
        nodes=read_nodes(NODE.format(state=state, reason="")),
        allocations={1: SlurmAllocation(job, {"s2": UP})},
    )
    node = (view or NodeStates(lambda: now[0])).nodes(snapshot, {}, {})["s2"]
    return node.ready, node.draining


def test_a_silent_node_drains_only_after_a_while() -> None:
    now = [0.0]
    view = NodeStates(lambda: now[0])
    assert view_of("ALLOCATED", now, view) == (True, False)
    assert view_of("ALLOCATED+NOT_RESPONDING", now, view) == (True, False)
    now[0] = 29.0
    assert view_of("ALLOCATED*", now, view) == (True, False)
    now[0] = 31.0
    assert view_of("ALLOCATED*", now, view) == (True, True)
    assert view_of("ALLOCATED", now, view) == (True, False)
    assert view_of("UNKNOWN", now, view) == (True, False)
    assert view_of("DOWN*", now, view) == (False, False)


def test_an_allocation_is_left_before_its_time_is_over() -> None:
    job = read_jobs("1|RUNNING|4:00|8:00:00|s2|None|pool")[1]
    assert ends_within(job, 300.0)
    assert not ends_within(job, 60.0)
    # At most a quarter of the limit, so that something is left to train in.
    assert not ends_within(job._replace(limit=360.0), 300.0)
    assert not ends_within(job._replace(seconds_left=None), 300.0)
    snapshot = SlurmSnapshot(number=2, allocations={1: SlurmAllocation(job, {"s2": UP})})
    assert OwnAllocation(1).leaving(snapshot) == {"s2": "its allocation 1 ends in 4 min."}


def test_a_scheduler_outside_of_an_allocation_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"SLURM_JOB_ID is not set.*salloc.*--nodes"):
        own_allocation({})


def test_slurms_own_variables_are_no_options_of_its_commands() -> None:
    given = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JWT": "secret",
        "SLURM_NTASKS_PER_NODE": "3",
        "SBATCH_PARTITION": "x",
        "SLURMD_NODENAME": "n1",
    }
    assert set(slurm_environment(given)) == {"PATH", "SLURM_CONF", "SLURM_JWT"}
    assert controller_variables(given) == {"SLURM_CONF": "/etc/slurm.conf"}


def test_words() -> None:
    assert is_away("sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    assert is_away(
        "scancel: error: Kill job error on job step id 4: Communication connection failure"
    )
    assert not is_away("sbatch: error: invalid partition specified: nope")
    assert last_line("a\nb\n\n") == "b"
    with pytest.raises(RuntimeError, match="no-such-command cannot be run"):
        run(["no-such-command"])
    with pytest.raises(RuntimeError, match="Slurm refused sh: sh: error: what it says"):
        run(["sh", "-c", "echo sh: error: what it says >&2; exit 1"])
    with pytest.raises(RuntimeError, match=r"sleep did not end within 0\.1 s"):
        run(["sleep", "60"], timeout=0.1)


def test_slurms_words_in_a_log_are_told_from_the_scripts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "up\nnot srun: error: mine\n"
        "slurmstepd-s2: error: *** STEP 1.7 ON s2 CANCELLED AT 2026-11-22T16:54:45 DUE TO NODE "
        "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\nsignal 15\n"
        "srun: error: Node failure on s2\n"
    )
    words = slurm_messages(log)
    assert [line[:15] for line in words] == ["slurmstepd-s2: ", "srun: error: No"]
