"""Simulations in separate processes, several at a time, without leaving processes behind.

A child reports every round through a pipe. When the parent is interrupted it kills its children;
when the parent is killed, a child finds the pipe broken in its next round, and exits.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from pipollux_simulator.engine.cluster import SimulationError
from pipollux_simulator.engine.outcome import SimulationOutcome

from .experiment import Experiment, Workload

Pair = tuple[Workload, str]
"""A workload, and the name of a policy."""
WatchPair = Callable[[int, float, int], None]
"""Called with the pair's index, the simulated time, and the number of completed jobs."""


class _Child(NamedTuple):
    pair: int
    process: Any  # multiprocessing's types differ by how processes are started


def run_pairs(
    experiment: Experiment, pairs: Sequence[Pair], watch: WatchPair, processes: int = 1
) -> list[SimulationOutcome]:
    """Simulate every pair, and return outcomes in the order of the pairs.

    Outcomes do not depend on the number of processes, except for the policies' wall-clock seconds,
    which increase with more processes than idle cores. With 1 it runs in this process. Errors as of
    `Experiment.run`, and SimulationError if a process exits unexpectedly.
    """
    if processes < 2 or len(pairs) < 2:
        return [
            experiment.run(workload, policy, lambda now, done, i=index: watch(i, now, done))  # type: ignore[misc]  # the default binds the loop's number
            for index, (workload, policy) in enumerate(pairs)
        ]
    waiting = list(enumerate(pairs))
    running: dict[Connection, _Child] = {}
    found: dict[int, SimulationOutcome] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                receiver, child = _start(experiment, *waiting.pop(0))
                running[receiver] = child
            ready = wait(list(running))
            for receiver in [one for one in running if one in ready]:
                result = _hear(receiver, running[receiver], pairs, watch)
                if result is not None:
                    found[running[receiver].pair] = result
                    _end(receiver, running.pop(receiver))
    finally:
        for receiver, child in running.items():
            child.process.kill()
            _end(receiver, child)
    return [found[index] for index in range(len(pairs))]


def _start(experiment: Experiment, index: int, pair: Pair) -> tuple[Connection, _Child]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    # A child reads applications itself, which is faster than sending them.
    arguments = sender, replace(experiment), pair
    process = context.Process(target=_work, args=arguments, daemon=True)
    with _blocked_interrupts():
        process.start()
    # Only the child holds this end, so that its death closes the pipe.
    sender.close()
    return receiver, _Child(index, process)


def _hear(
    receiver: Connection, child: _Child, pairs: Sequence[Pair], watch: WatchPair
) -> SimulationOutcome | None:
    try:
        message = receiver.recv()
    except EOFError:
        workload, policy = pairs[child.pair]
        child.process.join()
        raise SimulationError(
            f"the process that simulated {workload.name} under {policy} ended with exit code "
            f"{child.process.exitcode}; run with one process to see why"
        ) from None
    if isinstance(message, Exception):
        raise message
    if isinstance(message, SimulationOutcome):
        return message
    watch(child.pair, *message)
    return None


def _end(receiver: Connection, child: _Child) -> None:
    child.process.join()
    child.process.close()
    receiver.close()


def _work(sender: Connection, experiment: Experiment, pair: Pair) -> None:
    try:
        try:
            sender.send(experiment.run(*pair, lambda now, done: sender.send((now, done))))
        except (SimulationError, ValueError) as error:
            sender.send(error)
    except BrokenPipeError:
        return  # the parent is gone


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block Ctrl-C for processes started meanwhile; it reaches only the parent, afterwards."""
    # multiprocessing's first process starts a companion, whose start unblocks Ctrl-C.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
