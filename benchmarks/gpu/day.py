"""Everything that is to be measured when a GPU is there, in one command and under nine minutes.

    make gpu-day                                      on the first GPU
    .venv/bin/python benchmarks/gpu/day.py --device cpu    shows on a CPU that it works
    .venv/bin/python benchmarks/gpu/day.py tests resize    some parts only

Each part has a time limit, and one that fails does not stop the others. The results of all parts go
into benchmarks/gpu/results as day.json and day.md, with what each part printed beside them. On a
CPU limits are longer, and the results, which are not for publication, go into results-cpu.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from report import Results, page, results_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET = {"cuda:0": 530.0, "cpu": 3600.0}
"""Seconds for all parts together: a part gets no more than is left."""
PATIENCE = {"cuda:0": 1.0, "cpu": 8.0}
"""Factor of the limits."""
LEAST = 10.0
"""Seconds without which a part is not begun."""
GRACE = 15.0
"""Seconds in which a part may end its processes after its limit."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Part:
    """Commands of a part, its limit in seconds, and the part that it runs beside.

    Only parts that measure no times may run beside another one.
    """

    title: str
    gpu: list[str]
    cpu: list[str]
    limit: float
    beside: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and what it found."""

    title: str
    command: str
    status: str
    seconds: float = 0.0
    results: Results = field(default_factory=Results)
    errors: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        """Whether the part passed, or cannot run here."""
        return self.status in ("passed", "needs a GPU")


def script(name: str, *args: str) -> list[str]:
    return [sys.executable, str(HERE / name), *args]


def two(name: str, *args: str) -> list[str]:
    """Return the command of a script in two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", "2", str(HERE / name), *args]


def pytest(*args: str) -> list[str]:
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    return [sys.executable, "-m", "pytest", *plain, *args]


CPU = ["--device", "cpu"]
PROBES = ["form", "whole", "initkill", "kill", "leave", "wait", "states", "graph"]
THREE = ["--sizes", "small", "base", "medium", "--steps", "100", "--compile"]
TINY = ["--sizes", "tiny", "--steps", "60", "--seconds", "20", "--compile", *CPU]
TINY += ["--backend", "aot_eager"]
PARTS = {
    "tests": Part(
        "`make test-gpu`, over gloo and NCCL",
        pytest("tests/gpu", "--gpu", "-n", "5", "--ignore", "tests/gpu/test_nvml.py"),
        pytest("tests/hybrid/resize/test_device_groups.py", "-n", "2"),
        110,
    ),
    "nvml": Part(
        "Slots, health and use of GPUs against `nvidia-smi` and CUDA",
        pytest("tests/gpu/test_nvml.py", "--gpu"),  # alone: it compares memory and processes
        [],
        60,
    ),
    "scheduler": Part(
        "A job of `pipollux serve` that grows and shrinks over NCCL",
        script("scheduler.py"),
        script("scheduler.py", *CPU),
        75,
    ),
    "resize": Part(
        "Pauses of elastic resizes and of the recovery from a death",
        script("resize.py", *["--mib", "1024", "--rounds", "2"]),
        script("resize.py", *["--backends", "stand-in", "--mib", "16", "--rounds", "1"], *CPU),
        70,
    ),
    "overhead": Part(
        "Step times over the plain loop",
        script(
            "overhead.py",
            *["--against", "plain", "--seconds", "6"],
            *THREE,
        ),
        script("overhead.py", "--against", "plain", *TINY),
        90,
    ),
    "overhead-ddp": Part(
        "Step times over DistributedDataParallel, two replicas",
        two(
            "overhead.py",
            *["--against", "ddp", "--seconds", "10"],
            *THREE,
        ),
        two("overhead.py", "--against", "ddp", *TINY),
        110,
    ),
    "probes": Part(
        "How NCCL behaves when groups form, fail and end",
        script("probes.py", *PROBES),
        script("probes.py", *PROBES, *CPU),
        110,
    ),
    "memory": Part(
        "Memory against the prediction, all stages in one process", script("memory.py"), [], 60
    ),
    "memory-processes": Part(
        "Memory against the prediction, a process for each of two stages",
        two("memory.py", "--processes"),
        [],
        60,
        "memory",
    ),
    "watchdog": Part(
        "Whether NCCL's watchdog ends a process after a death",
        script("probes.py", "watchdog"),
        script("probes.py", "watchdog", *CPU),
        100,
        "memory",
    ),
}
"""In the order of their worth."""


def groups_of(names: Sequence[str]) -> list[list[str]]:
    """Return the parts in groups that run at the same time."""
    found: dict[str, list[str]] = {}
    for name in names:
        beside = PARTS[name].beside
        found.setdefault(beside if beside in names else name, []).append(name)
    return list(found.values())


def run(name: str, device: str, out: Path, left: float) -> Outcome:
    """Run a part; return how it ended."""
    part = PARTS[name]
    command = part.cpu if device == "cpu" else part.gpu
    words = " ".join(command).replace(f"{ROOT}/", "")
    if not command:
        return Outcome(part.title, words, "needs a GPU")
    limit = min(part.limit * PATIENCE[device], left)
    if limit < LEAST:
        return Outcome(part.title, words, "no time left")
    began = time.monotonic()
    logs = out / f"{name}.out.log", out / f"{name}.err.log"
    with logs[0].open("wb") as stdout, logs[1].open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PIPOLLUX_PROGRESS": "0"},
        )
        status = _wait(process, limit)
    seconds = round(time.monotonic() - began, 1)
    printed, errors = (log.read_text(errors="replace") for log in logs)
    tail = errors.splitlines()[-20:] if status != "passed" else []
    return Outcome(part.title, words, status, seconds, results_of(printed), tail)


def _wait(process: subprocess.Popen[bytes], limit: float) -> str:
    """Wait for a part, or end it; return how it ended."""
    try:
        code = process.wait(limit)
        return "passed" if code == 0 else f"exit status {code}"
    except subprocess.TimeoutExpired:
        # At an interrupt pytest still prints which tests have failed so far.
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE / 2)
        return f"not done within {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def adopt_orphans() -> None:
    """Become the parent of processes whose own one ends, to find what parts leave behind."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def end_children() -> None:
    """Kill all processes that descend from this one."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=10)


def environment(device: str) -> dict[str, str]:
    """Return what was measured on."""
    found = {"torch": torch.__version__, "Python": platform.python_version()}
    found["device"] = "CPU" if device == "cpu" else torch.cuda.get_device_name(0)
    found["CPUs"] = str(len(os.sched_getaffinity(0)))
    if torch.distributed.is_nccl_available() and device != "cpu":
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def write(out: Path, device: str, found: dict[str, Outcome]) -> None:
    """Write the results so far."""
    publish = device != "cpu"
    parts = {name: asdict(outcome) for name, outcome in found.items()}
    content: dict[str, Any] = {"for_publication": publish, "environment": environment(device)}
    (out / "day.json").write_text(json.dumps(content | {"parts": parts}, indent=2) + "\n")
    (out / "day.md").write_text(page(content | {"parts": parts}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all of them if none")
    parser.add_argument("--device", choices=BUDGET, help="cuda:0 if there is one, else cpu")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args(argv)
    if wrong := [name for name in options.parts if name not in PARTS]:
        parser.error(f"{', '.join(wrong)}: the parts are {', '.join(PARTS)}")
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    out: Path = options.out or HERE / ("results-cpu" if device == "cpu" else "results")
    out.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    end = time.monotonic() + BUDGET[device]
    found: dict[str, Outcome] = {}
    for group in groups_of(options.parts or list(PARTS)):
        left = end - time.monotonic()
        with ThreadPoolExecutor(len(group)) as pool:
            outcomes = list(pool.map(lambda name: run(name, device, out, left), group))  # noqa: B023  # ended here
        end_children()
        for name, outcome in zip(group, outcomes, strict=True):
            found[name] = outcome
            print(f"{name}: {outcome.status}, {outcome.seconds} s", flush=True)
        write(out, device, found)
    return int(not all(outcome.is_well for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
