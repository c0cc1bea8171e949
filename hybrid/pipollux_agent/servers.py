"""Servers for push and pull beside the first replicas of a job.

::

    agent of replica 0 ── script, one job of one replica
                     └─── server 0 ◀── push, pull ── scripts of all replicas
    agent of replica 1 ── script
                     └─── server 1

The agents exchange the servers' addresses through the scheduler. A server that dies is started
again at its address. After the script it runs on until no replica is left that uses it. Like its
sibling modules, this one imports nothing from its package by name, as agents run as files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import ModuleType

from pipollux_protocol import environment as variables

PATIENCE = 600.0
"""Seconds to wait for the other agents' addresses; torch's default for a rendezvous."""
LINGER = 120.0
"""Seconds that a server has for the other replicas after this one's script."""
SAVING = 10.0
"""Seconds that a server has to save."""
PAUSE = 1.0
"""Seconds before a server that died is started again; they double each time."""
LONGEST_PAUSE = 30.0
FOLDER = "servers"
"""Name of the servers' folder beside the checkpoints."""


class ServerHost:
    """The server beside this replica, if it has one.

    Args:
        exchange: The module `address_exchange`.
    """

    def __init__(self, exchange: ModuleType) -> None:
        self._exchange = exchange
        self._index: int | None = None
        self._host = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._lock = threading.Lock()
        """Held to start the server, so that none is started once the end has begun."""
        self._watch: threading.Thread | None = None

    def start(self) -> None:
        """Start the server of this replica, and set the addresses of all for the script."""
        environment = os.environ
        count = variables.NUM_SERVERS.read(environment) or 0
        replica = variables.REPLICA.read(environment) or 0
        self._host = self._exchange.own_address()
        if not variables.JOINS.read(environment):
            port = 0
            if replica < count:
                self._index = replica
                with self._exchange.listen(self._host, 0) as free:
                    port = free.getsockname()[1]
            self._exchange.register(replica, self._host, port, PATIENCE)
        addresses = self._exchange.addresses_of(range(count), PATIENCE)
        environment.update(variables.SERVERS.write(tuple(addresses)))
        environment.update(variables.ADDRESS.write(self._host))
        if self._index is not None:
            self._launch()
            self._watch = threading.Thread(target=self._relaunch, daemon=True)
            self._watch.start()

    def end(self, *, at_once: bool) -> None:
        """End the server: once no replica uses it, or at once."""
        with self._lock:
            self._ending.set()
            process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            if at_once:
                process.terminate()
            process.wait(SAVING if at_once else LINGER)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(SAVING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watch is not None:
            self._watch.join()

    def hurry(self) -> None:
        """End the server now."""
        self._ending.set()
        if self._process is not None:
            self._process.terminate()

    def _launch(self) -> None:
        words = [sys.executable, "-P", "-m", "pipollux.server", "--until-unused"]
        words += ["--index", str(self._index), "--host", self._host]
        folder = variables.CHECKPOINT_DIR.read(os.environ)
        if folder is not None:
            words += ["--directory", str(folder / FOLDER)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, env=_for_a_server(os.environ), start_new_session=True
        )

    def _relaunch(self) -> None:
        """Start the server again whenever it ends before `end`."""
        pause = PAUSE
        while self._process is not None:
            status = self._process.wait()
            if self._ending.wait(pause):
                return
            pause = min(2.0 * pause, LONGEST_PAUSE)
            print(
                f"pipollux: server {self._index} ended with status {status}, and is started again",
                file=sys.stderr,
                flush=True,
            )
            with self._lock:
                if self._ending.is_set():
                    return
                self._launch()


def _for_a_server(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server, which uses one CPU and no GPU."""
    return {**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
