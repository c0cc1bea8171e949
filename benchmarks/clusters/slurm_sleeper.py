"""A replica that prints its start time, sends heartbeats to the scheduler, and sleeps.

It replaces torchrun's agent, which needs seconds and 150 MB: hundreds fit on a machine.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

BEAT_SECONDS = 10.0


def main() -> None:
    """Send heartbeats until SIGTERM."""
    begun = time.time()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    replica = int(os.environ["PIPOLLUX_REPLICA"])
    folder = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"began-{replica}").write_text(str(begun))
    step = 0
    while True:
        step += 1
        beat("/heartbeats", {"replica": replica})
        if replica == 0:
            beat("/reports", {"numEpochs": 1, "points": [point(step)], "timeline": None})
        time.sleep(BEAT_SECONDS)


def point(step: int) -> dict[str, object]:
    """Return the progress of a training job."""
    unknown = dict.fromkeys(("predictedStepTime", "goodput", "efficiency"))
    sizes = {"batchSize": 1, "atomicBsz": 1, "accumSteps": 0, "numReplicas": 1}
    done = {"time": time.time(), "step": step, "epoch": 0, "samples": step}
    return {**done, **sizes, **unknown, "loss": 1.0, "stepTime": 1.0}


def beat(path: str, body: dict[str, object]) -> None:
    """Send a request to the scheduler, which may be unreachable."""
    where = urlsplit(os.environ["PIPOLLUX_SCHEDULER_URL"])
    connection = http.client.HTTPConnection(where.netloc, timeout=20)
    content = {"attempt": int(os.environ["PIPOLLUX_ATTEMPT"]), **body}
    headers = {
        "Authorization": f"Bearer {os.environ['PIPOLLUX_TOKEN']}",
        "Content-Type": "application/json",
    }
    try:
        job = f"{where.path}/jobs/{os.environ['PIPOLLUX_JOB_ID']}"
        connection.request("POST", job + path, json.dumps(content), headers)
        connection.getresponse().read()
    except OSError as error:
        print(error, flush=True)
    finally:
        connection.close()


if __name__ == "__main__":
    main()
