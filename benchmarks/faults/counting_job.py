"""A job that accounts for every sample.

It counts steps of 32 samples and saves every few of them, slowly, so that it can be killed in the
middle of a save. A checkpoint records which attempt counted which steps; two processes that work as
the same replica of a job at the same time leave a file `violations` behind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from alone import hold_alone  # same folder

SAMPLES = 32
SAVE_EVERY = 10

asked_to_stop = threading.Event()


def main() -> int:
    """Count to the end, or until asked to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.set())
    folder = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
    rank, attempt = int(os.environ["RANK"]), int(os.environ["PIPOLLUX_ATTEMPT"])
    alone = hold_alone(folder, rank, attempt)
    if alone is None:
        return 3
    told = Supervisor(rank, attempt)
    saved = load(folder)
    begin = step = saved["step"]
    while step < options.steps:
        step += 1
        time.sleep(options.step_seconds)
        told.report(step)
        stopping = asked_to_stop.is_set()
        if rank == 0 and (step % SAVE_EVERY == 0 or step == options.steps or stopping):
            save(folder, saved, attempt, begin, step)
        if stopping:
            if rank == 0:
                write(folder / "stopped.json", {"attempt": attempt, "step": step})
            return 143
    return 0


def load(folder: Path) -> dict[str, Any]:
    """Return the last checkpoint."""
    try:
        saved: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text())
    except FileNotFoundError:
        return {"step": 0, "samples": 0, "counted": []}
    return saved


def save(folder: Path, saved: dict[str, Any], attempt: int, begin: int, step: int) -> None:
    """Save aside and rename, slowly; a file `saving` exists meanwhile."""
    counted = [entry for entry in saved["counted"] if entry[0] != attempt]
    content = {
        "step": step,
        "samples": SAMPLES * step,
        "counted": [*counted, [attempt, begin, step]],
        "weights": "0" * 4096,
    }
    (folder / "saving").touch()
    text = json.dumps(content)
    aside = folder / "checkpoint.part"
    with aside.open("w") as file:
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            file.write(part)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.05)
    aside.replace(folder / "checkpoint.json")
    (folder / "saving").unlink()


def write(path: Path, content: object) -> None:
    """Write a small file with one call."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(content))
    aside.replace(path)


class Supervisor:
    """Reports to the scheduler, which may be unreachable."""

    def __init__(self, rank: int, attempt: int) -> None:
        self._rank, self._attempt = rank, attempt
        job = os.environ["PIPOLLUX_JOB_ID"]
        self._client = httpx.Client(
            base_url=f"{os.environ['PIPOLLUX_SCHEDULER_URL']}/jobs/{job}",
            headers={"Authorization": f"Bearer {os.environ['PIPOLLUX_TOKEN']}"},
            timeout=2,
            trust_env=False,
        )
        threading.Thread(target=self._beat, daemon=True).start()

    def report(self, step: int) -> None:
        """Report a step, from replica 0 alone."""
        if self._rank == 0:
            point = {
                "time": time.time(),
                "step": step,
                "epoch": 0,
                "samples": SAMPLES * step,
                "loss": 1.0 / step,
                "batchSize": SAMPLES,
                "atomicBsz": SAMPLES,
                "accumSteps": 0,
                "numReplicas": int(os.environ["WORLD_SIZE"]),
                "stepTime": 0.1,
                "predictedStepTime": None,
                "goodput": None,
                "efficiency": None,
            }
            self._post("/reports", {"numEpochs": 1, "points": [point], "timeline": None})

    def _beat(self) -> None:
        while True:
            self._post("/heartbeats", {"replica": self._rank})
            time.sleep(1.0)

    def _post(self, path: str, body: dict[str, Any]) -> None:
        with suppress(httpx.HTTPError):
            self._client.post(path, json={"attempt": self._attempt, **body})


if __name__ == "__main__":
    sys.exit(main())
