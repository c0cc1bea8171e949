"""Everything that is to be measured when a GPU is there, in one command and under nine minutes.

    make gpu-day                                      on the first GPU
    .venv/bin/python benchmarks/gpu/day.py --device cpu    shows on a CPU that it works
    .venv/bin/python benchmarks/gpu/day.py tests resize    some parts only

Each part has a time limit, and one that fails does not stop the others. Results go into
benchmarks/gpu/results: what each part printed, and a summary as JSON and Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUDGET = 530.0
"""Seconds for all parts together: a part gets no more than is left."""
TAIL = 4000
"""Characters of a part's output in the summary."""


@dataclass(frozen=True)
class Part:
    """A command: on a GPU, on a CPU, and the seconds that it may take."""

    gpu: list[str]
    cpu: list[str]
    limit: float


def script(name: str, *args: str) -> list[str]:
    return [sys.executable, str(HERE / name), *args]


def pytest(*args: str) -> list[str]:
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    return [sys.executable, "-m", "pytest", *plain, *args]


RUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PROBES = ["form", "whole", "initkill", "kill", "leave", "wait", "states", "graph"]
SHORT = ["form", "leave"]
PARTS = {
    "tests": Part(
        pytest("tests/gpu", "--gpu", "-n", "5"),
        pytest("tests/hybrid/resize/test_device_groups.py", "-n", "2"),
        120,
    ),
    "resize": Part(
        script("resize.py", "--mib", "1024"),
        script("resize.py", "--mib", "16", "--rounds", "1", "--device", "cpu"),
        90,
    ),
    "probes": Part(
        script("probes.py", *PROBES), script("probes.py", *SHORT, "--device", "cpu"), 110
    ),
    "overhead": Part(
        script("overhead.py", "--steps", "100"),
        script("overhead.py", "--steps", "80", "--sizes", "tiny", "--device", "cpu"),
        70,
    ),
    "memory": Part(script("memory.py"), [], 60),
    "memory-processes": Part([*RUN, str(HERE / "memory.py"), "--processes"], [], 45),
    "watchdog": Part(script("probes.py", "watchdog"), [], 100),
}
"""In the order of their worth."""


def run(name: str, part: Part, device: str, out: Path, left: float) -> dict[str, object]:
    """Run a part; return how it ended."""
    command = part.cpu if device == "cpu" else part.gpu
    if not command:
        return {"status": "needs a GPU", "seconds": 0.0, "output": ""}
    limit = min(part.limit, left)
    if limit < 10:
        return {"status": "no time left", "seconds": 0.0, "output": ""}
    log = out / f"{name}.log"
    began = time.monotonic()
    with log.open("wb") as to:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=to,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            code = process.wait(limit)
            status = "passed" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"not done within {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own processes, too
            process.wait()
    seconds = round(time.monotonic() - began, 1)
    output = log.read_text(errors="replace")
    return {"status": status, "seconds": seconds, "output": output[-TAIL:]}


def environment(device: str) -> dict[str, str]:
    """Return what was measured on."""
    found = {"torch": torch.__version__, "Python": platform.python_version()}
    found["device"] = "CPU" if device == "cpu" else torch.cuda.get_device_name(0)
    if torch.distributed.is_nccl_available() and device != "cpu":
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def page(found: dict[str, dict[str, object]], where: dict[str, str]) -> str:
    """Return the summary as Markdown."""
    lines = ["# GPU day", "", ", ".join(f"{key} {value}" for key, value in where.items()), ""]
    lines += ["| part | result | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {x['status']} | {x['seconds']} |" for name, x in found.items()]
    for name, x in found.items():
        lines += ["", f"## {name}", "", "```", str(x["output"]).strip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them if none")
    parser.add_argument("--device", default="cuda:0", choices=["cuda:0", "cpu"])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    where = environment(options.device)
    end = time.monotonic() + BUDGET
    found: dict[str, dict[str, object]] = {}
    for name in options.parts or PARTS:
        found[name] = run(name, PARTS[name], options.device, options.out, end - time.monotonic())
        print(f"{name}: {found[name]['status']}, {found[name]['seconds']} s", flush=True)
        summary = {"environment": where, "parts": found}
        (options.out / "day.json").write_text(json.dumps(summary, indent=2))
        (options.out / "day.md").write_text(page(found, where))
    return int(any(x["status"] not in ("passed", "needs a GPU") for x in found.values()))


if __name__ == "__main__":
    sys.exit(main())
