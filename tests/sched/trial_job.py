"""A trial of a sweep that trains nothing: it reports a metric which depends on its parameters.

    trial_job.py --lr LR [--steps N] [--hold FILE] [--fail]

The metric `error` falls with each step, and is smallest for a learning rate of 0.01. With `--hold`,
a trial whose learning rate is above 0.5 goes on until there is that file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
import urllib.request
from pathlib import Path

ARGS = argparse.ArgumentParser()
ARGS.add_argument("--lr", type=float, default=0.01)
ARGS.add_argument("--width", type=int, default=8)
ARGS.add_argument("--steps", type=int, default=2)
ARGS.add_argument("--hold", type=Path)
ARGS.add_argument("--fail", default="no")


def main() -> int:
    options = ARGS.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only a kill ends it early
    told = {name: text for name, text in os.environ.items() if name.startswith("PIPOLLUX_TRIAL")}
    print(json.dumps({**told, "sweep": os.environ["PIPOLLUX_SWEEP"]}, sort_keys=True), flush=True)
    for step in range(1, options.steps + 1):
        report(step, (math.log10(options.lr) + 2) ** 2 + 1 / step)
    while options.hold is not None and options.lr > 0.5 and not options.hold.exists():
        time.sleep(0.05)
    return int(options.fail == "true")


def report(step: int, error: float) -> None:
    point = {
        "time": time.time(),
        "step": step,
        "epoch": step - 1,
        "samples": 8 * step,
        "loss": error,
        "batchSize": 8,
        "atomicBsz": 8,
        "accumSteps": 0,
        "numReplicas": 1,
        "stepTime": 0.1,
    }
    metric = {"name": "error", "step": step, "value": error}
    body = {"attempt": int(os.environ["PIPOLLUX_ATTEMPT"]), "points": [point], "metrics": [metric]}
    url = f"{os.environ['PIPOLLUX_SCHEDULER_URL']}/jobs/{os.environ['PIPOLLUX_JOB_ID']}/reports"
    head = {"Authorization": f"Bearer {os.environ['PIPOLLUX_TOKEN']}"}
    request = urllib.request.Request(  # noqa: S310  # the scheduler's
        url, json.dumps(body).encode(), {**head, "Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  # as above
        answer.read()


if __name__ == "__main__":
    raise SystemExit(main())
