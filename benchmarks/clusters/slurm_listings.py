"""The cost of listing many steps for the Slurm backend: see `slurm_cost.py --read`.

The engine is the real one. The output is lines of Slurm 22.05, repeated with other numbers and
names; scripts in place of Slurm's commands print it at once.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pipollux_agent import supervisor
from pipollux_sched.backend.base import ReplicaKey
from pipollux_sched.backend.replica.replica_process import SessionProcess
from pipollux_sched.backend.slurm.engine import SlurmEngine
from pipollux_sched.backend.slurm.record import ReplicaFiles, ReplicaRecord, step_name
from pipollux_sched.backend.slurm.rented_pools import PoolOptions, RentedPools
from pipollux_sched.backend.slurm.snapshot import NODES_AT_ONCE, SlurmReader
from pipollux_sched.store import StateDir

SLOTS = 8
REPLICAS_OF_A_JOB = 5
POOL = "pipollux-abc"
JOB = "{job}|RUNNING|9:51:07|10:00:00|{node}|None|" + POOL
STEP = "{job}.{number}|{node}|{name}"
NODE = (
    "NodeName={node} Arch=x86_64 CoresPerSocket=1  CPUAlloc=16 CPUEfctv=16 CPUTot=16 CPULoad=11.33 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:8 NodeAddr=10.78.0.12 "
    "NodeHostName={node} Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  "
    "RealMemory=4000 AllocMem=0 FreeMem=16151 Sockets=16 Boards=1 State=ALLOCATED "
    "ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=main  "
    "BootTime=2026-11-22T03:46:09 SlurmdStartTime=2026-11-22T17:00:13 "
    "LastBusyTime=2026-11-22T17:00:13 CfgTRES=cpu=16,mem=4000M,billing=16 AllocTRES=cpu=16 "
    "CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 "
    "ExtSensorsTemp=n/s"
)
SHARE = (
    "JobId={job} JobName=" + POOL + " UserId=root(0) NodeList={node} BatchHost={node} NumNodes=1 "
    "NumCPUs=16 TRES=cpu=16,node=1,billing=16 CoreSpec=* JOB_GRES=gpu:8   Nodes={node} "
    "CPU_IDs=0-15 Mem=0 GRES=gpu:8(IDX:0-7) MinCPUsNode=1 TresPerNode=gres:gpu:8 "
)
SCRIPTS = {
    "squeue": 'case "$*" in *" -s "*) cat {folder}/steps;; *) cat {folder}/jobs;; esac',
    "scontrol": (
        'case "$2" in node) cat {folder}/nodes-"${{4%%,*}}";;\n'
        '*) if [ -n "$5" ]; then cat {folder}/job-"$5"; else cat {folder}/job-*; fi;; esac'
    ),
    "srun": "exit 0",
}
CALLS = 10


def listings(num_steps: int) -> None:
    """Print the usage of a scheduler for one listing of that many steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state_dir = StateDir(folder / "state")
        state_dir.create()
        keys = _print_steps(folder, num_steps)
        for place, key in enumerate(keys):
            _record(state_dir, key, place)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        pools = RentedPools(PoolOptions(name=POOL, num_nodes=-(-num_steps // SLOTS)))
        print(f"{num_steps} steps on {pools.options.num_nodes} nodes, each an allocation\n")
        print("| | CPU of the scheduler | of the commands |\n|---|---|---|")
        reader = SlurmReader(pools.choose)
        show("first snapshot", reader.read, 1)
        show("a later snapshot", reader.read)
        engine: list[SlurmEngine] = []
        show("start of the engine", lambda: engine.append(SlurmEngine(state_dir, pools)), 1)
        (there,) = engine
        try:
            there.recover({key[:2] for key in keys}, 0.0)
            there._slurm.stop()  # no other snapshots
            listed = there.listing().replicas
            assert len(listed) == num_steps
            assert not any(state.waiting or state.ended for state in listed.values())
            show("listing(), replicas of an earlier scheduler", there.listing)
            with subprocess.Popen(["sleep", "1000"]) as started:
                for step in there._replicas.values():
                    step._srun = SessionProcess(started.pid, None, started)
                show("listing(), replicas of this one", there.listing)
                show("listing(), and the snapshot is new", lambda: _look_anew(there))
                show("nodes()", there.nodes)
                started.kill()
        finally:
            there._pools.options = PoolOptions(name=POOL, num_nodes=0, keep=True)  # type: ignore[attr-defined]  # rented
            there.close()


def _look_anew(engine: SlurmEngine) -> None:
    engine._orphans_seen = 0
    engine.listing()


def _print_steps(folder: Path, num_steps: int) -> list[ReplicaKey]:
    """Write the output and the scripts of the commands; return the replicas."""
    keys = [
        ReplicaKey(f"job-{n // REPLICAS_OF_A_JOB:04d}", 1, n % REPLICAS_OF_A_JOB)
        for n in range(num_steps)
    ]
    nodes = [f"node-{n:04d}" for n in range(-(-num_steps // SLOTS))]
    for job, node in enumerate(nodes):
        (folder / f"job-{job}").write_text(SHARE.format(job=job, node=node) + "\n")
    for first in range(0, len(nodes), NODES_AT_ONCE):
        lines = [NODE.format(node=node) for node in nodes[first : first + NODES_AT_ONCE]]
        (folder / f"nodes-{nodes[first]}").write_text("\n".join(lines) + "\n")
    jobs = [JOB.format(job=job, node=node) for job, node in enumerate(nodes)]
    (folder / "jobs").write_text("\n".join(jobs) + "\n")
    steps = [
        STEP.format(job=n // SLOTS, number=n % SLOTS, node=nodes[n // SLOTS], name=step_name(key))
        for n, key in enumerate(keys)
    ]
    (folder / "steps").write_text("\n".join(steps) + "\n")
    for program, text in SCRIPTS.items():
        script = folder / program
        script.write_text(f"#!/bin/sh\n{text.format(folder=folder)}\n")
        script.chmod(0o755)
    return keys


def _record(state_dir: StateDir, key: ReplicaKey, place: int) -> None:
    """Store a replica as the scheduler does; its srun is this process."""
    files = ReplicaFiles.of(state_dir, key)
    files.base.parent.mkdir(parents=True, exist_ok=True)
    own = os.getpid()
    node = f"node-{place // SLOTS:04d}"
    files.write_record(ReplicaRecord(place // SLOTS, node, own, supervisor.birth(own)))


def show(what: str, call: Callable[[], object], calls: int = CALLS) -> None:
    """Print the cost of a call, the median of several."""
    own, commands = [], []
    for _ in range(calls):
        begun, before = time.process_time(), _of_commands()
        call()
        own.append(time.process_time() - begun)
        commands.append(_of_commands() - before)
    used = [f"{1000 * median(costs):.1f} ms" for costs in (own, commands)]
    print(f"| {what} | {used[0]} | {used[1]} |", flush=True)


def _of_commands() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
