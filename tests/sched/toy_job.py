"""A script that keeps the contract of a job without training anything, and without torch.

It counts steps, goes on from where its checkpoint ended, reports every step to the supervisor if
there is one, and on SIGTERM saves, writes the marker and ends with status 143. Flags make it
misbehave.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

ARGS = argparse.ArgumentParser()
ARGS.add_argument("--steps", type=int, default=1_000_000)
ARGS.add_argument("--step-seconds", type=float, default=0.05)
ARGS.add_argument("--fail-at", type=int)
ARGS.add_argument("--fail-rank", type=int, default=0)
ARGS.add_argument("--fail-status", type=int, help="end so at FAIL_AT; negative: by this signal")
ARGS.add_argument("--prints", action="store_true", help="tell each step")
ARGS.add_argument("--stubborn", action="store_true", help="ignore SIGTERM, and so do the children")
ARGS.add_argument("--daemonise", action="store_true", help="go on in a process of its own")
ARGS.add_argument("--beats", action="store_true", help="a thread gives signs of life")
ARGS.add_argument(
    "--hang-at", type=int, help="save at this step, and hang if it is the 1st attempt"
)
ARGS.add_argument("--ends-on", type=int, help="go on until there are so many replicas, then STEPS")
ARGS.add_argument("--hints", help="JSON file with hints to send once")

stop_requested = False


def main() -> int:
    options = ARGS.parse_args()
    if options.daemonise:
        if os.fork():
            return 0
        os.setsid()
        time.sleep(300)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.stubborn else request_stop)
    rank = int(os.environ["RANK"])
    attempt = int(os.environ["PIPOLLUX_ATTEMPT"])
    directory = Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"])
    names = [name for name in os.environ if name.startswith(("PIPOLLUX_", "OMP_", "CUDA_"))]
    say(json.dumps({name: os.environ[name] for name in sorted(names)}))
    if options.stubborn:
        # One child in a session of its own, one that is orphaned: both must be found.
        nap = [sys.executable, "-c", "import time; time.sleep(300)"]
        subprocess.Popen(nap, start_new_session=True)
        subprocess.Popen(["/bin/sh", "-c", "sleep 300 &"])
    step = load(directory)
    say(f"replica {rank} of attempt {attempt} goes on from step {step}")
    supervisor = Supervisor(attempt) if rank == 0 else None
    reached = [step]
    if options.beats and supervisor is not None:
        threading.Thread(target=supervisor.beat, args=(reached,), daemon=True).start()
    last = options.steps
    if options.ends_on is not None:
        last = step + last if int(os.environ["WORLD_SIZE"]) == options.ends_on else sys.maxsize
    while step < last:
        step += 1
        reached[0] = step
        time.sleep(options.step_seconds)
        if options.prints:
            say(f"step {step}")
        if step == options.fail_at and rank == options.fail_rank:
            if options.fail_status is not None:
                return end(options.fail_status)
            raise RuntimeError(f"step {step} went wrong on replica {rank}")
        if supervisor is not None:
            supervisor.report(step)
            if options.hints:
                supervisor.hint(Path(options.hints).read_text(encoding="utf-8"))
        if step == options.hang_at:
            write(directory / "checkpoint.json", {"step": step})
            while attempt == 1:
                time.sleep(60)
        if stop_requested:
            if rank == 0:
                write(directory / "checkpoint.json", {"step": step})
                marker = {"attempt": attempt, "step": step, "reason": "signal"}
                write(directory / "stopped.json", marker)
            return 143
    return 0


def say(line: str) -> None:
    """Print a line at one go; unbuffered, `print` tears it, and others write between."""
    sys.stdout.write(line + "\n")


def end(status: int) -> int:
    """Return an exit status; a negative one is that of a signal, which ends this process."""
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def request_stop(number: int, frame: FrameType | None) -> None:
    global stop_requested
    stop_requested = True


def load(directory: Path) -> int:
    try:
        return int(json.loads((directory / "checkpoint.json").read_text())["step"])
    except FileNotFoundError:
        return 0


def write(path: Path, content: object) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(content))
    aside.replace(path)


class Supervisor:
    """Sends reports, when there is somebody to send them to."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.url = os.environ.get("PIPOLLUX_SCHEDULER_URL")
        self.job = os.environ["PIPOLLUX_JOB_ID"]
        self.hinted = False
        self.unsent: list[dict[str, Any]] = []
        self.connections = threading.local()
        self.headers = {
            "Authorization": f"Bearer {os.environ.get('PIPOLLUX_TOKEN')}",
            "Content-Type": "application/json",
        }
        # Reading the authorities of the machine takes longer than all that is sent.
        self.verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if authority := os.environ.get("PIPOLLUX_CA_FILE"):
            self.verify.load_verify_locations(authority)

    def report(self, step: int) -> None:
        if not self.url:
            return
        point = {
            "time": time.time(),
            "step": step,
            "epoch": 0,
            "samples": 32 * step,
            "loss": 1.0 / step,
            "batchSize": 32,
            "atomicBsz": 32,
            "accumSteps": 0,
            "numReplicas": int(os.environ["WORLD_SIZE"]),
            "stepTime": 0.05,
            "predictedStepTime": None,
            "goodput": None,
            "efficiency": None,
        }
        body = {"attempt": self.attempt, "numEpochs": 1, "points": [point], "timeline": None}
        if self.send("POST", f"/jobs/{self.job}/reports", json=body):
            self.unsent.clear()
        else:
            self.unsent.append(point)
            body["points"] = self.unsent
            write(Path(os.environ["PIPOLLUX_CHECKPOINT_DIR"]) / "unsent_report.json", body)

    def beat(self, reached: list[int]) -> None:
        while True:
            body = {"attempt": self.attempt, "replica": 0, "step": reached[0]}
            self.send("POST", f"/jobs/{self.job}/heartbeats", json=body)
            time.sleep(0.1)

    def hint(self, hints: str) -> None:
        if self.url and not self.hinted:
            url = f"/jobs/{self.job}/hints?attempt={self.attempt}"
            self.send("PUT", url, content=hints)
            self.hinted = True

    def send(self, method: str, url: str, **content: Any) -> bool:
        """Whether somebody took it; a refusal ends the job, and the test."""
        body = content["content"] if "content" in content else json.dumps(content["json"])
        path = urlsplit(str(self.url)).path + url
        kept = getattr(self.connections, "kept", None)
        self.connections.kept = None
        for connection in filter(None, (kept, self.connect())):  # the server may have closed it
            try:
                connection.request(method, path, body.encode(), self.headers)
                answer = connection.getresponse()
                said = answer.read()
            except TimeoutError:  # it may have arrived
                connection.close()
                break
            except (OSError, HTTPException):
                connection.close()
                continue
            if answer.status >= 400:
                raise RuntimeError(f"{method} {url}: {answer.status} {said.decode()}")
            self.connections.kept = connection
            return True
        say(f"nobody answers {method} {url}")
        return False

    def connect(self) -> HTTPConnection:
        """Return a connection, which is made with the first request. httpx takes long to import."""
        parts = urlsplit(str(self.url))
        where, timeout = (str(parts.hostname), parts.port), 5.0
        if parts.scheme == "https":
            return HTTPSConnection(*where, timeout=timeout, context=self.verify)
        return HTTPConnection(*where, timeout=timeout)


if __name__ == "__main__":
    sys.exit(main())
