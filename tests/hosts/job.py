"""A job on several hosts: one torchrun agent on each, as somebody starts them by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.hosts.harness.hosts import TIMEOUT, Hosts

PORT = 29500


class Agents:
    """The agents of a job, one on each of its hosts.

    Args:
        agents: by host.
        folder: where each writes `HOST.log`.
    """

    def __init__(self, agents: Mapping[str, subprocess.Popen[bytes]], folder: Path) -> None:
        self.agents = agents
        self._folder = folder

    def log(self, host: str) -> str:
        """What a host's agent and replicas have printed so far."""
        return (self._folder / f"{host}.log").read_text()

    @property
    def logs(self) -> str:
        return "\n".join(f"{host}:\n{self.log(host)}" for host in self.agents)

    def poll(self) -> int | None:
        """Return a status that is not 0, or 0 where all ended well; None while they run."""
        codes = [agent.poll() for agent in self.agents.values()]
        return next(filter(None, codes), None if None in codes else 0)

    def wait(self) -> dict[str, int]:
        """Return the exit status of each agent when all have ended."""
        return {host: agent.wait(TIMEOUT) for host, agent in self.agents.items()}


@contextmanager
def torchrun(
    hosts: Hosts,
    names: Sequence[str],
    script: Path,
    folder: Path,
    environment: Mapping[str, str],
    *arguments: str,
    processes: int = 1,
) -> Iterator[Agents]:
    """Run a script with a replica on each of some hosts, the first of which the others meet.

    Args:
        hosts: which there are.
        names: those that it runs on.
        script: file to run.
        folder: for logs.
        environment: added to this process's.
        arguments: of the script.
        processes: of each replica.
    """
    meeting = [f"--nnodes={len(names)}", f"--master-addr={names[0]}", f"--master-port={PORT}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PIPOLLUX_PROGRESS": "0", **environment}
    with ExitStack() as files:
        agents = {}
        for rank, host in enumerate(names):
            command = [sys.executable, "-m", "torch.distributed.run", *meeting]
            count = f"--nproc-per-node={processes}"
            command += [f"--node-rank={rank}", count, str(script), *arguments]
            log = files.enter_context((folder / f"{host}.log").open("wb"))
            agents[host] = hosts.run(host, command, env=env, stdout=log, stderr=log)
        try:
            yield Agents(agents, folder)
        finally:
            for host, agent in agents.items():
                hosts.kill(host)
                agent.wait()
