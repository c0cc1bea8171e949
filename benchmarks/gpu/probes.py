"""How NCCL behaves when groups of processes form, fail and end: the facts behind elastic resizing.

    .venv/bin/python benchmarks/gpu/probes.py --out probes.json
    .venv/bin/python benchmarks/gpu/probes.py --device cpu kill leave

Processes of a probe share one GPU: NCCL_HOSTID gives each a host of its own, so that they are
connected by sockets. Each probe has a time limit, and one that fails does not stop the others.
With --device cpu all of them run over gloo, which shows that the script works, and nothing of NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Result = dict[str, Any]
MIB = 2**20
# Of these NCCL's watchdog reads the first four; without them it ends the process after an error.
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RUNTIME_CONNECT": "0",
}


class Process:
    """One process of a probe: its rank, its device, and the store that all of them share."""

    def __init__(self, rank: int, port: int, device: str) -> None:
        self.rank, self.device = rank, torch.device(device)
        self.store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)

    @property
    def big(self) -> int:
        """Elements of a large sum."""
        return 32 * MIB if self.on_gpu else MIB

    @property
    def on_gpu(self) -> bool:
        """Whether the groups are NCCL's."""
        return self.device.type == "cuda"

    def group(self, name: str, rank: int, size: int) -> Any:
        """Return a group that has no communicator yet: the first collective makes it."""
        store = dist.PrefixStore(name, self.store)
        if not self.on_gpu:
            return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=10))
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=60)
        return dist.ProcessGroupNCCL(store, rank, size, options)

    def ones(self, count: int = 1024) -> Tensor:
        """Return a vector of ones on the device."""
        return torch.ones(count, device=self.device)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def sum_of_ones(self, group: Any, count: int = 1024) -> float:
        """All-reduce ones and wait for the sum."""
        tensor = self.ones(count)
        wait_for(self, group.allreduce([tensor]), lambda: False, 20)
        return float(tensor[-1])

    def memory(self) -> int:
        """Bytes of the GPU that all processes use together, in MiB."""
        if not self.on_gpu:
            return 0
        free, total = torch.cuda.mem_get_info()
        return (total - free) // MIB

    def report(self, found: Result) -> None:
        """Hand over what was found, in place of an earlier report."""
        self.store.set(f"result{self.rank}", json.dumps(found))

    def agree(self, name: str, size: int) -> None:
        """Wait until `size` processes are here."""
        self.store.add(name, 1)
        while self.store.add(name, 0) < size:
            time.sleep(0.002)


def wait_for(process: Process, work: Any, gone: Callable[[], bool], limit: float) -> str:
    """Wait on the host for a collective: "done", "gone" once a peer is, or "late"."""
    if process.on_gpu:
        work.wait()  # queues only
        event = torch.cuda.Event()
        event.record()
        done = event.query
    else:
        done = work.is_completed
    end = time.monotonic() + limit
    while not done():
        if gone():
            return "gone"
        if time.monotonic() > end:
            return "late"
    return "done"


def seconds_of(function: Callable[[], object]) -> float:
    begin = time.monotonic()
    function()
    return round(time.monotonic() - begin, 4)


def counts() -> Result:
    """Threads and file descriptors of this process."""
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


@contextmanager
def death_of(pid: int) -> Iterator[Callable[[], bool]]:
    """Give a function that returns whether the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield lambda: bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


class Training:
    """Steps of a small network that all-reduces its gradients over a group."""

    def __init__(self, process: Process, group: Any) -> None:
        self.process, self.group = process, group
        width = 1024 if process.on_gpu else 64
        self.weight = torch.randn(width, width, device=process.device)
        self.gradient = torch.zeros(width * width + 1, device=process.device)
        self.steps: list[float] = []

    def step(self, flag: bool = False) -> float:
        """Return the sum of all flags."""
        begin = time.monotonic()
        product = self.weight @ self.weight
        self.gradient[:-1] = product.flatten()
        self.gradient[-1] = float(flag)
        wait_for(self.process, self.group.allreduce([self.gradient]), lambda: False, 30)
        total = float(self.gradient[-1])
        self.steps.append(time.monotonic() - begin)
        return total

    def stall(self, begin: int) -> Result:
        """The median step before `begin`, and the longest from there on, in ms."""
        before, after = self.steps[5:begin], self.steps[begin:]
        return {
            "median_step_ms": round(1e3 * statistics.median(before), 2),
            "longest_step_ms": round(1e3 * max(after), 1),
            "steps_during": len(after),
        }


# The probes. Each takes its process and returns what it found; sizes are in PROBES.


def form(process: Process) -> Result:
    """What forming a group costs: time, memory, and the longest step of a training beside it."""
    found: Result = {"memory_mib": [process.memory()]}
    group = process.group("form-a", process.rank, 2)
    found["first_collective_s"] = seconds_of(lambda: process.sum_of_ones(group))
    found["second_collective_s"] = seconds_of(lambda: process.sum_of_ones(group))
    process.agree("formed", 2)
    found["memory_mib"].append(process.memory())
    training = Training(process, group)
    for _ in range(60):
        training.step()
    other: Result = {}

    def form_beside() -> None:
        if process.on_gpu:
            torch.cuda.set_device(process.device)
        second = process.group("form-b", process.rank, 2)
        with torch.cuda.stream(torch.cuda.Stream()) if process.on_gpu else threading.Lock():
            other["seconds"] = seconds_of(lambda: process.sum_of_ones(second))
        other["group"] = second

    thread = threading.Thread(target=form_beside)
    begin = len(training.steps)
    thread.start()
    while training.step(flag=not thread.is_alive()) < 2:
        pass
    thread.join()
    found |= {"beside_training_s": other["seconds"], **training.stall(begin)}
    process.agree("second", 2)
    found["memory_mib"].append(process.memory())
    other["group"].abort()
    process.agree("aborted", 2)
    found["memory_mib"].append(process.memory())
    if process.on_gpu:
        found["eager"] = eager(process)
    return found


def eager(process: Process) -> Result:
    """Connect at once: whether `_comm_ptr` waits, and whether the first collective works."""
    group = process.group("eager", process.rank, 2)
    found: Result = {
        "connect_s": seconds_of(lambda: group.eager_connect_single_device(process.device))
    }
    try:
        found["comm_ptr_s"] = seconds_of(group._comm_ptr)
        found["collective_s"] = seconds_of(lambda: process.sum_of_ones(group))
    except Exception as error:  # what NCCL raises is what is asked
        found["error"] = str(error)[:300]
    return found


def whole(process: Process) -> Result:
    """A process group of gloo for CPU tensors and NCCL for the GPU's, made without new_group."""
    store = dist.PrefixStore("whole", process.store)
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("cpu", store), process.rank, 2, timedelta(seconds=10)
    )
    if process.on_gpu:  # as elastic jobs make it
        from pipollux_hybrid.job.device_groups import Nccl

        group: Any = Nccl().make(store, process.rank, 2, gloo, 60.0)
    else:
        group = dist.ProcessGroup(store, process.rank, 2)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(process.device, dist.ProcessGroup.BackendType.GLOO, gloo)
    sums = []
    for device in sorted({"cpu", process.device.type}):  # the same order in all processes
        tensor = torch.ones(4, device=device)
        work = group.allreduce([tensor])
        work.wait()
        process.synchronize()
        sums.append(float(tensor[0]))
    found: Result = {"sums": sums, "name": group.name()}
    group.abort()
    return found


def initkill(process: Process) -> Result:
    """One of three is killed while the group forms: the others raise in time, and go on."""
    process.store.set(f"pid{process.rank}", str(os.getpid()))
    group = process.group("init", process.rank, 3)
    process.agree("there", 3)
    if process.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    found: Result = {"error": ""}
    begin = time.monotonic()
    try:
        found["outcome"] = wait_for(process, group.allreduce([process.ones()]), lambda: False, 20)
    except Exception as error:  # what NCCL raises is what is asked
        found["error"] = str(error)[:300]
    found["raised_s"] = round(time.monotonic() - begin, 2)
    found["abort_s"] = seconds_of(group.abort)
    found["sum_after"] = process.sum_of_ones(process.group("init-after", process.rank, 2))
    return found


def kill(process: Process, rounds: int = 10) -> Result:
    """A third process is killed in an all-reduce, ten times; in odd rounds it has launched.

    NCCL connects where an algorithm is used for the first time, and large sums take another one
    than small ones. So in all rounds but the last two the group has summed as much before.
    """
    if process.rank >= 2:
        return victim(process, process.rank - 2)
    found: Result = {"rounds": []}
    for number in range(rounds):
        found["rounds"].append(survive(process, number))
        process.report(found)  # all that is left of it, if the next round fails
    return found


COLD = (8, 9)


def victim(process: Process, number: int) -> Result:
    process.store.set(f"victim{number}", str(os.getpid()))
    process.store.wait([f"round{number}"], timedelta(seconds=60))
    group = process.group(f"kill{number}", 2, 3)
    process.sum_of_ones(group, process.big if number not in COLD else 1024)
    process.agree(f"go{number}", 3)
    if number % 2:
        group.allreduce([process.ones(process.big)])
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def survive(process: Process, number: int, abort: bool = True) -> Result:
    process.store.wait([f"victim{number}"], timedelta(seconds=60))
    process.store.set(f"round{number}", "")
    pid = int(process.store.get(f"victim{number}"))
    with death_of(pid) as gone:
        group = process.group(f"kill{number}", process.rank, 3)
        count = process.big if number not in COLD else 1024
        form_s = seconds_of(partial(process.sum_of_ones, group, count))
        parameters = torch.full((1024,), 7.0, device=process.device)
        gradient = process.ones(process.big)
        process.synchronize()
        process.agree(f"go{number}", 3)
        found: Result = {"form_s": form_s}
        begin = time.monotonic()
        try:
            found["outcome"] = wait_for(process, group.allreduce([gradient]), gone, 20)
        except Exception as error:  # what NCCL raises is what is asked
            found["outcome"] = str(error)[:200]
        found["noticed_s"] = round(time.monotonic() - begin, 3)
    if not abort:
        return found | {"group": group}
    found["abort_s"] = seconds_of(group.abort)
    found["device_idle_s"] = seconds_of(process.synchronize)
    found["sum_is_garbage"] = bool((gradient != 3).any())
    found["parameters_untouched"] = bool((parameters == 7).all())
    del group, gradient
    process.agree(f"given-up{number}", 2)
    after = process.group(f"after{number}", process.rank, 2)
    found["form_again_s"] = seconds_of(lambda: found.update(sum_after=process.sum_of_ones(after)))
    process.agree(f"end{number}", 2)
    after.abort()
    return found | counts() | {"memory_mib": process.memory()}


def watchdog(process: Process, seconds: float = 70) -> Result:
    """Nobody aborts after a death: with the variables of ENVIRONMENT the process lives on."""
    if process.rank == 2:
        return victim(process, 0)
    found = survive(process, 0, abort=False)
    group = found.pop("group")
    time.sleep(seconds)
    found["lived_s"] = seconds
    found["abort_s"] = seconds_of(group.abort)
    found["sum_after"] = process.sum_of_ones(process.group("late", process.rank, 2))
    return found


def leave(process: Process, changes: int = 25) -> Result:
    """Groups change under a training: formed in a thread, swapped at a step, ended in a thread."""
    training = Training(process, process.group("leave", process.rank, 2))
    for _ in range(60):
        training.step()
    begin, history = len(training.steps), []
    for number in range(changes):
        new: Result = {}

        def prepare(number: int = number, new: Result = new) -> None:
            if process.on_gpu:
                torch.cuda.set_device(process.device)
            group = process.group(f"leave{number}", process.rank, 2)
            with torch.cuda.stream(torch.cuda.Stream()) if process.on_gpu else threading.Lock():
                new["s"] = seconds_of(lambda: process.sum_of_ones(group))
            new["group"] = group

        forming = threading.Thread(target=prepare)
        forming.start()
        while training.step(flag=not forming.is_alive()) < 2:
            pass
        old, training.group = training.group, new["group"]
        ending = threading.Thread(target=old.abort)
        ending.start()
        while training.step(flag=not ending.is_alive()) < 2:
            pass
        forming.join()
        ending.join()
        del old
        history.append({"form_s": new["s"], "memory_mib": process.memory(), **counts()})
    return {
        **training.stall(begin),
        "form_s": [x["form_s"] for x in history],
        "first": history[1],
        "last": history[-1],
    }


def wait(process: Process) -> Result:
    """What it costs to wait on the host for the gradients before each optimizer step."""
    from model import SIZES, data, layers, loss_of

    found: Result = {}
    for name in ("small", "medium") if process.on_gpu else ("tiny",):
        size = SIZES[name]
        model = layers(size).to(process.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        codes, targets = (x[: size.batch].to(process.device) for x in data(size, 1).tensors)
        times: dict[bool, list[float]] = {True: [], False: []}
        for block in range(22 if process.on_gpu else 6):
            waits = bool(block % 2)
            process.synchronize()
            begin = time.monotonic()
            for _ in range(10):
                optimizer.zero_grad()
                loss_of(model(codes), targets).backward()
                if waits and process.on_gpu:
                    event = torch.cuda.Event()
                    event.record()
                    while not event.query():
                        pass
                optimizer.step()
            process.synchronize()
            if block > 1:
                times[waits].append((time.monotonic() - begin) * 100)
        plain, waited = (statistics.median(times[x]) for x in (False, True))
        found[name] = {
            "plain_ms": round(plain, 2),
            "waits_ms": round(waited, 2),
            "ratio": round(waited / plain, 3),
        }
    return found


def states(process: Process, mib: int = 1024, piece_mib: int = 64) -> Result:
    """Send a state: over gloo through ordinary memory, through pinned memory, and over NCCL."""
    count, piece = mib * MIB // 4, piece_mib * MIB // 4
    if not process.on_gpu:
        count //= 16
    state = torch.arange(count, device=process.device, dtype=torch.float32)
    if process.rank:
        state.zero_()
    pieces = state.split(piece)
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", process.store), process.rank, 2, timedelta(seconds=30)
    )
    root = dist.BroadcastOptions()
    root.rootRank = 0

    def pageable() -> None:
        for part in pieces:
            host = part.cpu() if not process.rank else torch.empty(part.shape)
            gloo.broadcast([host], root).wait()
            if process.rank:
                part.copy_(host)

    def pinned() -> None:
        buffers = [torch.empty(piece, pin_memory=process.on_gpu) for _ in range(2)]
        works: list[Any] = [None, None]
        for index, part in enumerate(pieces):
            host = buffers[index % 2][: part.numel()]
            if works[index % 2] is not None:
                works[index % 2]()
            if not process.rank:
                host.copy_(part, non_blocking=True)
                process.synchronize()
                works[index % 2] = gloo.broadcast([host], root).wait
            else:
                gloo.broadcast([host], root).wait()
                part.copy_(host, non_blocking=True)
                works[index % 2] = process.synchronize
        for finish in works:
            if finish is not None:
                finish()
        process.synchronize()

    found: Result = {}
    ways = {"gloo_pageable_s": pageable, "gloo_pinned_s": pinned}
    if process.on_gpu:
        nccl = process.group("nccl", process.rank, 2)
        process.sum_of_ones(nccl)

        def over_nccl() -> None:
            for part in pieces:
                nccl.broadcast([part], root).wait()
            process.synchronize()

        ways["nccl_s"] = over_nccl
    for name, send in ways.items():
        if process.rank:
            state.zero_()
        process.synchronize()
        process.agree(name, 2)
        found[name] = seconds_of(send)
        expected = torch.arange(count, device=process.device, dtype=torch.float32)
        found["right"] = found.get("right", True) and bool((state == expected).all())
    return found


def graph(process: Process) -> Result:
    """End a group while a CUDA graph that captured one of its all-reduces is alive."""
    if not process.on_gpu:
        return {"skipped": "no GPU"}
    group = process.group("graph", process.rank, 2)
    process.sum_of_ones(group)
    tensor = process.ones()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        group.allreduce([tensor]).wait()
    tensor.fill_(1)
    captured.replay()
    process.synchronize()
    found: Result = {"sum": float(tensor[0])}
    process.agree("captured", 2)
    ending = threading.Thread(target=group.abort, daemon=True)
    begin = time.monotonic()
    ending.start()
    ending.join(8)
    found["abort_returned_with_graph_alive"] = not ending.is_alive()
    del captured
    ending.join(8)
    found["abort_returned"] = not ending.is_alive()
    found["abort_s"] = round(time.monotonic() - begin, 2)
    return found


PROBES: dict[str, tuple[Callable[[Process], Result], int, float]] = {
    "form": (form, 2, 40),
    "whole": (whole, 2, 30),
    "initkill": (initkill, 3, 40),
    "kill": (kill, 12, 100),
    "leave": (leave, 2, 60),
    "wait": (wait, 1, 40),
    "states": (states, 2, 40),
    "graph": (graph, 2, 40),
    "watchdog": (watchdog, 3, 100),
}
"""Each with the number of its processes and its limit in seconds."""


def run(name: str, device: str) -> Result:
    """Run the processes of one probe; return what each found, or how it ended."""
    _, size, limit = PROBES[name]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "--device", device, "--port", str(store.port), name]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env=os.environ | ENVIRONMENT | {"NCCL_HOSTID": f"p{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    begin = time.monotonic()
    results: Result = {}
    for rank, process in enumerate(processes):
        ending: Result = {}
        try:
            left = max(begin + limit - time.monotonic(), 0.1)
            _, stderr = process.communicate(timeout=left)
            if process.returncode not in (0, -signal.SIGKILL):
                ending = {"failed": f"exit status {process.returncode}", "stderr": stderr[-600:]}
        except subprocess.TimeoutExpired:
            process.kill()
            _, stderr = process.communicate()
            ending = {"failed": f"not done within {limit:.0f} s", "stderr": stderr[-600:]}
        key = f"result{rank}"
        results[str(rank)] = ending | (json.loads(store.get(key)) if store.check([key]) else {})
    return {"seconds": round(time.monotonic() - begin, 1), "ranks": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("probes", nargs="*", choices=[*PROBES, []], help="all of them if none")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="also write the results as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        process = Process(options.rank, options.port, options.device)
        found = PROBES[options.probes[0]][0](process)
        process.report(found)
        os._exit(0)  # groups that were given up have no end worth waiting for
    results = {}
    for name in options.probes or PROBES:
        results[name] = run(name, options.device)
        print(json.dumps({name: results[name]}), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
