"""Runs a function in several real processes that are the replicas of a job.

The processes are forked from a server that has imported torch already, so a test with two replicas
takes a fraction of a second. Each is told its rank as torchrun would.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 90.0
PRELOADED = [
    *("torch._dynamo", "torchgpipe", "scipy.optimize", "pipollux_hybrid"),
    # What the package imports when it is needed.
    *("pipollux_hybrid.reporter", "pipollux_perfmodel.fit", "pipollux_perfmodel.hints"),
]


def run_replicas(
    function: Callable[..., Any],
    num_replicas: int,
    *args: Any,
    environment: Mapping[str, str] | None = None,
    exit_codes: tuple[int, ...] = (0,),
) -> list[Any]:
    """Call ``function(*args)`` in each replica.

    Returns:
        What each replica returned, in the order of ranks; an exit code for one that exited.
    """
    mp = multiprocessing.get_context("forkserver")
    mp.set_forkserver_preload(PRELOADED)
    port = free_port()
    processes, pipes = [], []
    for rank in range(num_replicas):
        ours, theirs = mp.Pipe(duplex=False)
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_replicas),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        if num_replicas == 1:
            del env["MASTER_ADDR"]
        process = mp.Process(target=_replica, args=(function, args, env, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _collect(processes, pipes, exit_codes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _collect(
    processes: list[Any], pipes: list[Connection], exit_codes: tuple[int, ...]
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    failures = []
    while waiting:
        ready = wait(list(waiting), timeout=TIMEOUT)
        assert ready, f"replicas {sorted(waiting.values())} did not answer in {TIMEOUT} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failed, results[rank] = pickle.loads(pipe.recv_bytes())  # noqa: S301  # from a process that this test started
            except EOFError:
                processes[rank].join(TIMEOUT)
                code = processes[rank].exitcode
                failed, results[rank] = code not in exit_codes, code
            pipe.close()
            if failed:
                failures.append(f"replica {rank}: {results[rank]}")
                if len(failures) == 1:
                    waiting = {}  # the others wait for one that is gone
                    break
    assert not failures, "\n".join(failures)
    return results


def _replica(
    function: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str], pipe: Connection
) -> None:
    os.environ.update(env)
    warnings.simplefilter("error")
    import torch

    from pipollux_hybrid import destroy_process_group

    torch.set_num_threads(1)
    try:
        result = (False, function(*args))
    except Exception:  # sent to the test, which raises it
        result = (True, traceback.format_exc())
    destroy_process_group()
    # Plain pickling: multiprocessing's own would share tensors with a process that ends.
    pipe.send_bytes(pickle.dumps(result))
