"""Servers and replicas of tests, in real processes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.programs import fork_server, free_port
from tests.waiting import until

TOKEN = "a secret of this test"
PATIENCE = 60.0


@dataclass
class Servers:
    """The servers of a job."""

    addresses: list[str]
    directory: Path | None = None
    options: tuple[str, ...] = ()
    processes: dict[int, Any] = field(default_factory=dict)

    def start(self, index: int) -> None:
        arguments = ["--index", str(index), *self.options]
        if self.directory is not None:
            arguments += ["--directory", str(self.directory)]
        process = fork_server().Process(target=_serve, args=(arguments, self.environment()))
        process.start()
        self.processes[index] = process
        until(lambda: self._listens(index), "the server listens", PATIENCE)

    def _listens(self, index: int) -> bool:
        host, _, port = self.addresses[index].rpartition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def kill(self, index: int) -> None:
        process = self.processes.pop(index)
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)

    def environment(self) -> dict[str, str]:
        return {"PIPOLLUX_SERVERS": ",".join(self.addresses), "PIPOLLUX_TOKEN": TOKEN}


def _serve(arguments: list[str], environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    import torch

    from pipollux_hybrid.push_pull.server_main import main

    torch.set_num_threads(1)
    raise SystemExit(main(arguments))


@contextmanager
def servers(
    count: int, directory: Path | None = None, options: tuple[str, ...] = ()
) -> Iterator[Servers]:
    """Run servers; they end with the block, and a status other than 0 fails the test."""
    running = Servers([f"127.0.0.1:{free_port()}" for _ in range(count)], directory, options)
    for index in range(count):
        running.start(index)
    try:
        yield running
        for process in running.processes.values():
            process.terminate()
        for index, process in running.processes.items():
            process.join(PATIENCE)
            assert process.exitcode == 0, f"server {index} ended with {process.exitcode}"
    finally:
        for process in running.processes.values():
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
