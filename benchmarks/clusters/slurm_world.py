"""A real scheduler with a real Slurm on separate hosts.

`pipollux serve --backend slurm` runs on the machine itself, as on a login node; a slurmd runs on
each host. It allocates nodes from Slurm, whose CPUs are slots.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(HERE.parent / "faults")]

from world import World  # of benchmarks/faults

from pipollux_sched.client.client import Client
from tests.hosts.harness.hosts import Hosts
from tests.hosts.harness.slurm import SlurmCluster, why_not

PIPOLLUX = Path(sys.executable).with_name("pipollux")
INTERVALS = (
    *("--interval=2", "--hints-interval=5", "--checkpoint-interval=3"),
    *("--grace=20", "--heartbeat-timeout=12"),
)
"""As for the scheduler of benchmarks/faults."""


class SlurmWorld(World):
    """A Slurm cluster, and a scheduler that allocates nodes from it; a context manager.

    Args:
        folder: an empty folder for the scheduler; all hosts see it.
        num_hosts: how many hosts there are.
        slots: CPUs of each host in Slurm's configuration.
        options: of `pipollux serve`, besides the backend, the state directory and the address.
        settings: further lines of slurm.conf.
        preparation: options of `sbatch` for a foreign job that runs before.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_hosts: int = 3,
        slots: int = 4,
        options: Sequence[str] = INTERVALS,
        settings: Mapping[str, str] | None = None,
        preparation: str | None = None,
    ) -> None:
        reason = why_not()
        if reason is not None:
            sys.exit(f"no Slurm on hosts can be made here: {reason}")
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts = Hosts(num_hosts)
        try:
            self.slurm = SlurmCluster(self.hosts, gpus=0, cpus=slots, settings=settings)
            self._port = _free_port(self.hosts.gateway)
            self._options = options
            self.num_kills = 0
            if preparation:
                self.slurm.call("sbatch", "--wrap=sleep inf", *preparation.split())
            super().__init__(folder, dict.fromkeys(self.hosts.names, slots))
        except BaseException:  # also Ctrl-C: end everything
            self.close()
            raise

    def command(self) -> list[str]:
        """Return the command of a scheduler: see `World`."""
        address = (f"--host={self.hosts.gateway}", f"--port={self._port}")
        state_dir = f"--state-dir={self.directory.path}"
        backend = ("--backend=slurm", "--time=600", state_dir)
        return [str(PIPOLLUX), "serve", *backend, *address, *self._options]

    def environment(self) -> Mapping[str, str]:
        """Return variables of the scheduler: see `World`."""
        return {**self.slurm.environment, **self.hosts.mark}

    def is_ours(self, environment: Mapping[str, str]) -> bool:
        """Whether a process belongs to a job: see `World`; `srun` counts as well."""
        where = environment.get("PIPOLLUX_CHECKPOINT_DIR", "")
        return where.startswith(str(self.directory.path))

    def steps(self) -> dict[str, str]:
        """Return the node of each Slurm step, by its name."""
        lines = self.slurm.call("squeue", "--noheader", "--steps", "--format=%j %N").splitlines()
        return dict(line.split() for line in lines)

    def lives(self) -> bool:
        """Whether the scheduler has not been killed."""
        return self._server is not None and self._server.poll() is None

    def pools(self) -> list[int]:
        """Return the allocations that the scheduler holds."""
        lines = self.slurm.call("squeue", "--noheader", "--states=RUNNING", "--format=%A %j")
        return [int(number) for number in re.findall(r"^(\d+) pipollux-", lines, re.MULTILINE)]

    def api(self) -> Client:
        """Return a client of the scheduler."""
        return Client.of(self.directory)

    def close(self) -> None:
        """End everything, including the scheduler."""
        if getattr(self, "_server", None) is not None:
            self.kill()
        for pid in self.processes() if hasattr(self, "directory") else ():
            self.signal(pid, 9)
        if hasattr(self, "slurm"):
            self.slurm.close()
        self.hosts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
