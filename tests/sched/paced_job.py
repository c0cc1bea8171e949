"""A script that trains as fast as its hints say, on whatever it is given, and without torch.

It keeps the contract of a job: it goes on from where its checkpoint ended, reports its progress and
its hints, and on SIGTERM saves and ends. The time of a step is slept.

    paced_job.py HINTS.json SAMPLES
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from pipollux_perfmodel import SchedHints

_NAP = 0.05
_TELL = 0.5
stop_requested = False


def main() -> int:
    signal.signal(signal.SIGTERM, request_stop)
    hints = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    whole = float(sys.argv[2])
    folder = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank:
        while not stop_requested and not (folder / "done").exists():
            time.sleep(_NAP)
        return 143 if stop_requested else 0
    goodput = rate(hints, int(os.environ.get("PIPOLLUX_NUM_NODES", "1")), replicas)
    before, most = load(folder)
    supervisor = Supervisor(hints, replicas, most)
    began = told = time.monotonic()
    supervisor.report(before)
    while not stop_requested:
        time.sleep(_NAP)
        trained = min(before + goodput * (time.monotonic() - began), whole)
        if time.monotonic() - told > _TELL or trained >= whole:
            told = time.monotonic()
            supervisor.report(trained)
            supervisor.hint(trained, whole)
        if trained >= whole:
            (folder / "done").touch()
            return 0
    trained = min(before + goodput * (time.monotonic() - began), whole)
    write(folder / "checkpoint.json", {"samples": trained, "replicas": supervisor.most})
    marker = {"attempt": supervisor.attempt, "step": int(trained) + 1, "reason": "signal"}
    write(folder / "stopped.json", marker)
    return 143


def request_stop(*_: object) -> None:
    global stop_requested
    stop_requested = True


def rate(hints: dict[str, Any], num_nodes: int, num_replicas: int) -> float:
    """Return samples of the initial batch size's worth a second."""
    speedup = SchedHints.from_json_object(hints).speedup_function()
    assert speedup is not None
    return float(speedup(num_nodes, num_replicas) * speedup.base_goodput)


def load(folder: Path) -> tuple[float, int]:
    """Return what was trained, and on how many replicas at most."""
    try:
        saved = json.loads((folder / "checkpoint.json").read_text())
    except FileNotFoundError:
        return 0.0, 0
    return float(saved["samples"]), int(saved["replicas"])


def write(path: Path, content: object) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(content))
    aside.replace(path)


class Supervisor:
    """Tells the scheduler of the training."""

    def __init__(self, hints: dict[str, Any], num_replicas: int, most: int) -> None:
        self.attempt = int(os.environ["PIPOLLUX_ATTEMPT"])
        self.hints, self.num_replicas = hints, num_replicas
        self.most = max(num_replicas, most)
        self.job = os.environ["PIPOLLUX_JOB_ID"]
        self.client = httpx.Client(
            base_url=os.environ["PIPOLLUX_SCHEDULER_URL"],
            headers={"Authorization": f"Bearer {os.environ['PIPOLLUX_TOKEN']}"},
            timeout=60,
            trust_env=False,
        )

    def report(self, trained: float) -> None:
        point = {
            "time": time.time(),
            "step": int(trained) + 1,
            "epoch": 0,
            "samples": int(trained),
            "loss": 1.0,
            "batchSize": 32,
            "atomicBsz": 32,
            "accumSteps": 0,
            "numReplicas": self.num_replicas,
            "stepTime": 0.1,
            "predictedStepTime": None,
            "goodput": None,
            "efficiency": None,
        }
        body = {"attempt": self.attempt, "numEpochs": 1, "points": [point], "timeline": None}
        self.client.post(f"/jobs/{self.job}/reports", json=body).raise_for_status()

    def hint(self, trained: float, whole: float) -> None:
        url = f"/jobs/{self.job}/hints?attempt={self.attempt}"
        sizes = {"trainedSamples": trained, "remainingSamples": whole - trained}
        body = {**self.hints, **sizes, "maxProfiledReplicas": self.most}
        self.client.put(url, json=body).raise_for_status()


if __name__ == "__main__":
    sys.exit(main())
