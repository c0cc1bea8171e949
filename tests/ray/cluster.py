"""A real Ray of several raylets on this machine, without a dashboard and without statistics."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import until

MAIN = Path(__file__).with_name("cluster_main.py")
DETACHED = "import os, sys; os.fork() and os._exit(0); os.execv(sys.argv[1], sys.argv[1:])"
"""Workers that Ray keeps idle are no processes that a test has left behind."""
ANSWER_TIMEOUT = 120.0


class RayCluster:
    """A head, and nodes that are added; a context manager.

    Args:
        head: name of the head.
        num_cpus: how many CPUs the head offers.
    """

    def __init__(self, head: str = "head", num_cpus: int = 0) -> None:
        # Ray's sockets are below it, and the path of a socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", DETACHED, sys.executable, "-P", str(MAIN), head, str(num_cpus)],
            env={
                # With CUDA_VISIBLE_DEVICES, no node may have more GPUs than it names.
                **{name: value for name, value in os.environ.items() if "CUDA" not in name},
                "RAY_TMPDIR": str(self.folder),
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_enable_metrics_collection": "0",
                # A worker is started when it is needed.
                "RAY_enable_worker_prestart": "0",
                "RAY_prestart_worker_first_driver": "0",
                # A node without its raylet is lost in 3 s, not in 40 s.
                "RAY_health_check_initial_delay_ms": "1000",
                "RAY_health_check_period_ms": "500",
                "RAY_health_check_timeout_ms": "2000",
                # Ray must not guess that the machine of the tests has too little memory.
                "RAY_memory_monitor_refresh_ms": "0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.address = self.call("address")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of `Raylets`; return its value."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments, options]) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise AssertionError(
                f"{method}: no answer\n{(self.folder / 'log').read_text()[-2000:]}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        return answer["answer"]

    def close(self) -> None:
        """End it, and remove its files."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10.0)
        select.select([self._process.stdout], [], [], ANSWER_TIMEOUT)  # until it is closed
        self._process.stdout.close()
        self._log.close()
        try:
            until(lambda: not self._left(), "nothing of Ray runs", patience=30.0)
        finally:
            for process in self._left():
                process.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                ours = process.environ().get("RAY_TMPDIR") == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
