"""One job under the scheduler that grows and shrinks over NCCL while it trains, on one GPU.

    .venv/bin/python benchmarks/gpu/scheduler.py
    .venv/bin/python benchmarks/gpu/scheduler.py --device cpu

`pipollux serve` has two virtual nodes of one slot, and both slots are the same GPU. One node is
returned to service, which makes the job grow; then the other one, with the first replica, is
drained, which makes it shrink. Both changes must be elastic resizes: a restart fails the run. With
--device cpu the stand-in of the tests is in NCCL's place.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from resize import RESIZED
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pipollux
from pipollux_sched.store import StateDir
from tests.hybrid.resize.nccl_stand_in import STAND_IN, backend

NAME = "resized"
A, B = "node-a", "node-b"
LIMIT = 150.0
"""Seconds to wait for a single change."""
BATCH, SAMPLES, WIDTH, LAYERS = 32, 2048, 512, 8
HINTS = 10
"""Seconds between reports of step times: no change of the job's own falls between those here."""
SAMPLE_SECONDS = 0.002
"""Artificial time of a sample, so that a second replica pays off even where both share a GPU."""


class RestartError(Exception):
    """The job was restarted, or failed."""


def job(device: str, visible: str, finish: Path) -> None:
    """Train until the file is there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = visible  # the scheduler's slots are of the CPU
    os.environ["NCCL_HOSTID"] = f"p{os.environ['PIPOLLUX_REPLICA']}"
    pipollux.init_process_group(backend(), timeout=LIMIT)
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    samples = TensorDataset(torch.randn(SAMPLES, WIDTH))
    loader = pipollux.AdaptiveDataLoader(samples, BATCH, shuffle=True)
    model = pipollux.HybridParallel(
        module, optimizer, num_stages=1, devices=[device], check_replicas=True
    )
    asked = pipollux.Accumulator()
    for _ in pipollux.remaining_epochs_until(10**6):
        for (inputs,) in loader:
            time.sleep(SAMPLE_SECONDS * len(inputs))
            optimizer.zero_grad()
            loss: Tensor = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
        asked["to finish"] += int(finish.exists())
        with asked.synchronized():
            if asked["to finish"] > 0:
                break


class Service:
    """`pipollux serve`, and the job that it runs."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._state = folder, StateDir(folder / "state")
        self.finish = folder / "finish"
        nodes = [{"name": name, "slots": 1, "kind": "cpu"} for name in (A, B)]
        cluster = folder / "cluster.yaml"
        cluster.write_text(json.dumps({"nodes": nodes}))
        program = Path(sys.executable).with_name("pipollux")
        command = [sys.executable, str(program), "serve", "--cluster", str(cluster)]
        command += ["--state-dir", str(folder / "state"), "--interval", "1"]
        command += ["--hints-interval", str(HINTS)]
        with (folder / "serve.log").open("wb") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._options = options
        self._client: httpx.Client | None = None

    def submit(self) -> None:
        """Submit the job once the scheduler answers."""
        self.wait("the scheduler answers", lambda: self._info() is not None)
        info = self._info()
        headers = {"Authorization": f"Bearer {info.token}"}
        self._client = httpx.Client(base_url=info.url, headers=headers, timeout=20, trust_env=False)
        self.set_node(B, "draining")
        self._request("POST", "/jobs", json=self._spec())

    def _request(self, method: str, path: str, **content: Any) -> Any:
        if self._client is None:
            raise RuntimeError("the scheduler has not answered yet")
        answer = self._client.request(method, path, **content)
        if not answer.is_success:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json()

    def _info(self) -> Any:
        if self._server.poll() is not None:
            raise RuntimeError("the scheduler has ended")
        info = self._state.read_server()
        return info if info is not None and info.pid == self._server.pid else None

    def _spec(self) -> dict[str, object]:
        options = self._options
        settings = STAND_IN if options.device == "cpu" else {"BACKEND": options.backend}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        args = ["--job", str(self.finish), "--device", options.device, "--visible", visible]
        local = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return {
            "name": NAME,
            "script": str(Path(__file__).resolve()),
            "args": args,
            "max_replicas": 2,
            "environment": {**local, "PIPOLLUX_ELASTIC_NCCL": "1", **settings},
        }

    def get(self, path: str, **query: int) -> Any:
        """Return what the scheduler answers."""
        return self._request("GET", path, params=query)

    def job(self) -> Any:
        """Return the job's details, of its first attempt only."""
        found = self.get(f"/jobs/{NAME}", points=0)
        if found["attempt"] > 1 or found["num_restarts"] or found["failures"]:
            raise RestartError(f"attempt {found['attempt']}: {found['message']}")
        return found

    def set_node(self, name: str, condition: str) -> None:
        """Set a node ready or draining."""
        self._request("PUT", f"/nodes/{name}", json={"condition": condition})

    def pauses(self) -> list[tuple[int, float]]:
        """Return the number of replicas after each resize, and its pause, as the job prints."""
        logs = self.get(f"/jobs/{NAME}/logs", tail=1000)
        lines = [line for log in logs for line in log["lines"]]
        found = (RESIZED.search(line) for line in lines)
        return [(int(match[1]), float(match[2])) for match in found if match]

    def wait(self, what: str, holds: Callable[[], bool]) -> float:
        """Wait until something holds; return the seconds."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > LIMIT:
                raise TimeoutError(f"{what}: not within {LIMIT:g} s")
            time.sleep(0.05)
        return time.monotonic() - began

    def trains_on(self, *nodes: str) -> bool:
        """Whether the job trains on these nodes, and nothing is being changed."""
        found = self.job()
        here = sorted(found["running_on"]) == sorted(nodes)
        return bool(here and found["training"] and found["changing"] is None)

    def can_resize(self) -> bool:
        """Whether the next change can be an elastic resize."""
        following = self.get(f"/jobs/{NAME}/explanation")["next_change"]
        return bool(following and following["elastic"])

    def resize(self, changed: str, condition: str, *nodes: str) -> dict[str, object]:
        """Change a node, and return how long the job took to train on these nodes."""
        before = len(self.pauses())
        self.set_node(changed, condition)
        seconds = self.wait(f"the job trains on {nodes}", lambda: self.trains_on(*nodes))
        self.wait("its pause is printed", lambda: len(self.pauses()) > before)
        replicas, pause = self.pauses()[-1]
        if replicas != len(nodes):
            raise RuntimeError(f"{replicas} replicas train on {nodes}")
        return {"replicas": replicas, "pause_s": pause, "until_it_trains_s": round(seconds, 2)}

    def errors(self) -> str:
        """Return the job's explanation and the ends of all logs."""
        logs = [self._folder / "serve.log", *(self._folder / "state").rglob("*.log")]
        why = json.dumps(self.get(f"/jobs/{NAME}/explanation")) if self._client else ""
        return "\n".join([why, *(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)])

    def end(self, *, at_once: bool) -> None:
        """End the scheduler and its jobs."""
        self._server.terminate()
        if at_once and self._server.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(1)
            self._server.terminate()  # the second signal kills its jobs
        self._server.wait(LIMIT)


def measure(service: Service) -> dict[str, object]:
    """Grow and shrink the job, and let it finish."""
    service.submit()
    started = service.wait("the job trains", lambda: service.trains_on(A) and service.can_resize())
    changes = [service.resize(B, "ready", A, B), service.resize(A, "draining", B)]
    service.finish.touch()
    service.wait("the job is complete", lambda: service.job()["phase"] == "Complete")
    found = service.job()
    if found["num_resizes"] != len(changes):
        raise RuntimeError(f"{found['num_resizes']} resizes were counted")
    return {
        "started_s": round(started, 1),
        "changes": changes,
        "resizes": found["num_resizes"],
        "restarts": found["num_restarts"],
        "phase": found["phase"],
        "steps": found["progress"]["step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--visible", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.device, options.visible, options.job)
        return
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder), options)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            found = measure(service)
        except BaseException:
            print(service.errors(), file=sys.stderr)
            service.end(at_once=True)
            raise
        service.end(at_once=False)
    name = "stand-in" if options.device == "cpu" else options.backend
    print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
