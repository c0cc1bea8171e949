"""A real Slurm on several hosts: slurmctld on the machine itself, and a slurmd on each host.

GPUs are generic resources (GRES) whose device files are `/dev/null`: Slurm accounts for them, and
gives no two steps the same one. Nothing of the machine's own Slurm, if it has one, is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.hosts.harness import hosts as namespaces
from tests.hosts.harness.hosts import GATEWAY_NAME, TIMEOUT, Hosts, runs

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")

CONFIGURATION = """\
ClusterName=pipollux
SlurmctldHost={gateway_name}({gateway})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=20
CommunicationParameters=NoCtldInAddrAny
SlurmctldPort=17100
SlurmdPort=17101
SrunPortRange=17200-17999
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
InactiveLimit=0
KillWait=5
MinJobAge=3600
PlugStackConfig={folder}/plugstack.conf
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdSpoolDir={folder}/%n/spool
"""
PREEMPTION = """\
PreemptType=preempt/partition_prio
PreemptMode={mode}
PartitionName=spot Nodes=ALL MaxTime={time_limit} PriorityTier=1 PreemptMode={mode}
PartitionName=main Nodes=ALL MaxTime={time_limit} PriorityTier=2 PreemptMode=OFF Default=YES
"""
ONE_PARTITION = "PartitionName=main Nodes=ALL MaxTime={time_limit} Default=YES\n"


def why_not() -> str | None:
    """Say why there is no Slurm here, None if there can be one."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no program is named {' or '.join(missing)}"
    return namespaces.why_not()


class SlurmCluster:
    """A Slurm cluster over hosts; a context manager that ends it, with what still runs on it.

    Its partition is `main`. With `preemption` there is also `spot`, over the same nodes, whose jobs
    give way to those of `main`.

    Attributes:
        nodes: their names, which are the hosts'.
        environment: variables with which Slurm's commands, on the machine or a host, find it.
        folder: configuration, state, logs.

    Args:
        hosts: where the slurmds run.
        gpus: GPUs of each node.
        cpus: CPUs of each node, of which the machine needs not have as many.
        time_limit: longest time of a job, as Slurm writes it, such as `"2"` for minutes.
        preemption: what becomes of `spot` jobs that give way: `"REQUEUE"` or `"CANCEL"`.
        node_timeout: seconds after which a silent node is down; it is asked three times as often.
        settings: further lines of slurm.conf, such as `{"KillWait": "30"}`.

    Example::

        with Hosts(3) as hosts, SlurmCluster(hosts) as cluster:
            print(cluster.call("srun", "-N3", "hostname"))
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        gpus: int = 4,
        cpus: int = 16,
        time_limit: str = "INFINITE",
        preemption: str | None = None,
        node_timeout: int = 30,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._hosts = hosts
        self.nodes = list(hosts.names)
        self.folder = hosts.folder / "slurm"
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._write(gpus, cpus, {"SlurmdTimeout": str(node_timeout), **(settings or {})})
        partitions = PREEMPTION if preemption else ONE_PARTITION
        with (self.folder / "slurm.conf").open("a") as file:
            file.write(partitions.format(mode=preemption, time_limit=time_limit))
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_until(lambda: set(self.states().values()) == {"IDLE"})

    def start_controller(self) -> None:
        """Start slurmctld, which goes on from what the last one knew."""
        # It listens where its host's name leads to, so as not to meet another one of the machine.
        self._start(self._hosts.outside(), "slurmctld")

    def stop_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld; jobs run on.

        Args:
            number: SIGKILL makes it forget what it has not written yet, which is some seconds.
        """
        self._end(self.folder / "slurmctld.pid", number)

    def restart_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End slurmctld, start another, and return when that knows the nodes again."""
        self.stop_controller(number)
        self.start_controller()
        # The state of an idle node is not written: it is asked for when its time comes.
        self.wait_until(lambda: not any("UNKNOWN" in x for x in self.states().values()))

    def saved_with(self, step: str) -> bytes:
        """Return what slurmctld has written down of its jobs, as soon as a step is in it.

        Args:
            step: the step's name.
        """
        path = self.folder / "state" / "job_state"
        self.wait_until(lambda: path.exists() and step.encode() in path.read_bytes())
        return path.read_bytes()

    def go_back_to(self, saved: bytes) -> None:
        """Kill slurmctld, and start one that has forgotten what came after `saved_with`."""
        self.stop_controller(signal.SIGKILL)
        (self.folder / "state" / "job_state").write_bytes(saved)
        self.start_controller()
        self.wait_until(lambda: not any("UNKNOWN" in x for x in self.states().values()))

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._start(self._hosts.inside(node), "slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill a node's slurmd; its steps run on, and nobody can reach them."""
        self._end(self.folder / node / "slurmd.pid", signal.SIGKILL)

    def drain(self, node: str, reason: str = "a new disk") -> None:
        """Give the node no further jobs; those that it has run on."""
        self._update(node, "State=DRAIN", f"Reason={reason}")

    def fail(self, node: str, reason: str = "it burns") -> None:
        """Declare the node down: jobs on it end as NODE_FAIL, or are queued again."""
        self._update(node, "State=DOWN", f"Reason={reason}")

    def resume(self, node: str) -> None:
        """Let a drained or failed node take jobs again."""
        self._update(node, "State=RESUME")

    def states(self) -> dict[str, str]:
        """Return the state of each node in Slurm's words, such as IDLE or MIXED+DRAIN."""
        lines = self.call("scontrol", "--oneliner", "show", "nodes").splitlines()
        fields = [dict(x.split("=", 1) for x in line.split() if "=" in x) for line in lines]
        return {found["NodeName"]: found["State"] for found in fields if "NodeName" in found}

    def call(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Run one of Slurm's commands on the machine itself, and return what it printed.

        Args:
            command: the program and its arguments.
            env: variables besides this process's own.
        """
        answer = self.start(
            *command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        output, errors = answer.communicate(timeout=TIMEOUT)
        assert answer.returncode == 0, f"{command} ended with {answer.returncode}: {errors}"
        return str(output)

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start one of Slurm's commands on the machine itself.

        Args:
            command: the program and its arguments.
            env: variables besides this process's own.
            options: what else `subprocess.Popen` takes.
        """
        environment = {**os.environ, **self.environment, **(env or {})}
        return subprocess.Popen(command, env=environment, **options)

    def allocate(self, *options: str) -> int:
        """Return the number of a job that holds nodes and runs nothing.

        Args:
            options: of salloc, such as "-N2".
        """
        with self.start("salloc", "--no-shell", *options, stderr=-1, text=True) as command:
            assert command.stderr is not None
            said = command.stderr.read()
        found = re.search(r"Granted job allocation (\d+)", said)
        assert found is not None, said
        return int(found[1])

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Return when a condition holds; what Slurm's commands refuse meanwhile does not count."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            with suppress(AssertionError):
                if condition():
                    return
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of all logs."""
        paths = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in paths)

    def close(self) -> None:
        """End all jobs, and Slurm."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "--signal=KILL", "--full", "--user=root")
        for node in self.nodes:
            self._hosts.kill(node)
        self.stop_controller(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, gpus: int, cpus: int, settings: Mapping[str, str]) -> None:
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "plugstack.conf").touch()
        lines = [
            CONFIGURATION.format(
                gateway_name=GATEWAY_NAME, gateway=self._hosts.gateway, folder=self.folder
            ),
            *(f"{name}={value}\n" for name, value in settings.items()),
        ]
        devices = [self.folder / f"gpu{number}" for number in range(gpus)]
        for device in devices:
            # GRES are counted by their device files.
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        gres = f"Gres=gpu:{gpus}" if gpus else ""
        for node in self.nodes:
            (self.folder / node / "spool").mkdir(parents=True)
            where = f"NodeName={node} NodeHostname={node} NodeAddr={self._hosts.address(node)}"
            lines.append(f"{where} CPUs={cpus} RealMemory=4000 {gres}\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        files = ",".join(map(str, devices))
        (self.folder / "gres.conf").write_text(
            "".join(f"NodeName={x} Name=gpu File={files}\n" for x in self.nodes) if gpus else ""
        )

    def _start(self, prefix: list[str], *command: str) -> None:
        """Start a daemon, which detaches itself."""
        subprocess.run(
            [*prefix, *command],
            env={**os.environ, **self.environment, **self._hosts.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )

    def _end(self, pid_file: Path, number: signal.Signals) -> None:
        """End a daemon, and return when it has ended."""
        self.wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
        pid = int(pid_file.read_text())
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        self.wait_until(lambda: not runs(pid))
        pid_file.unlink(missing_ok=True)

    def _update(self, node: str, *settings: str) -> None:
        self.call("scontrol", "update", f"NodeName={node}", *settings)
