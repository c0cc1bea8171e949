"""Runs a function in several real processes that are the replicas of a job.

The processes are forked from a server that has imported torch already, so a test with two replicas
takes a fraction of a second. Each is told its rank as torchrun would. One that does not answer is
asked for the stacks of its threads.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.programs import fork_server, free_port, ranks
from tests.waiting import until

TIMEOUT = 240.0


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
    mp = fork_server()
    port = free_port()
    processes, pipes = [], []
    folder = tempfile.TemporaryDirectory()
    stacks = [Path(folder.name) / f"stacks-{rank}" for rank in range(num_replicas)]
    for rank in range(num_replicas):
        ours, theirs = mp.Pipe(duplex=False)
        # What a fit makes of batch sizes is the machine's doing.
        env = {**os.environ, "PIPOLLUX_HINTS_INTERVAL": "1000000"}
        env |= {**ranks(rank, num_replicas, port), **(environment or {})}
        process = mp.Process(target=_replica, args=(function, args, env, theirs, stacks[rank]))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        return _collect(processes, pipes, stacks, exit_codes)
    finally:
        folder.cleanup()
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def _collect(
    processes: list[Any],
    pipes: list[Connection],
    stacks: list[Path],
    exit_codes: tuple[int, ...],
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    failures = []
    while waiting:
        ready = wait(list(waiting), timeout=TIMEOUT)
        if not ready:
            silent = sorted(waiting.values())
            found = "\n".join(_stacks_of(processes[rank], stacks[rank]) for rank in silent)
            raise AssertionError(f"replicas {silent} did not answer in {TIMEOUT} s:\n{found}")
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


def _stacks_of(process: Any, path: Path) -> str:
    """Have a process write the stacks of its threads to a file, and return them."""
    if not path.exists():
        return f"process {process.pid} has not come to its function"
    os.kill(process.pid, signal.SIGUSR1)
    try:
        # The last line is of the main thread, which takes the signal: the bottom of its stack.
        until(lambda: path.read_text().endswith("<module>\n"), "its stacks are written", 10.0)
    except AssertionError as error:
        return f"process {process.pid}: {error}"
    return path.read_text()


def _replica(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    env: Mapping[str, str],
    pipe: Connection,
    stacks: Path,
) -> None:
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            _run(function, args, env, pipe)
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], env: Mapping[str, str], pipe: Connection
) -> None:
    os.environ.clear()  # of the server's, which some test or other has started
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # for loaders' workers, as in any script
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
