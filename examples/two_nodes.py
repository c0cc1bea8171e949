"""Two nodes on one machine: two torchrun agents that meet over loopback, as on two real nodes.

    python examples/two_nodes.py examples/char_lm.py --epochs 1
    python examples/two_nodes.py --replicas 2 examples/unet.py

On real nodes each runs the command that is printed for it, with the first node's name as
`--master-addr` and a `PIPOLLUX_CHECKPOINT_DIR` that both see. Ctrl-C or SIGTERM here stops all
replicas at the same step, with a checkpoint, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time

NODES = (0, 1)
PATIENCE = 45.0
"""Seconds that agents have to end; they give their own processes 30."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a script on two nodes that are one machine.")
    parser.add_argument("--replicas", type=int, default=1, help="pipeline replicas on each node")
    parser.add_argument("--port", type=int, default=0, help="where they meet; 0 for any free one")
    parser.add_argument("--checkpoints", default="two-nodes-checkpoints", help="of both nodes")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser.parse_args()


def free_port() -> int:
    """One that the kernel gives to no outgoing connection before torchrun listens."""
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def gpus_of(node: int) -> str:
    """Half of the machine's GPUs; none of a single one, as NCCL refuses two replicas on a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    half = len(listed.stdout.splitlines()) // 2
    return ",".join(str(gpu) for gpu in range(node * half, (node + 1) * half))


def start(node: int, port: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """The torchrun agent of a node, in a session of its own: Ctrl-C reaches it through us."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
    meeting = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    script = [f"--nproc-per-node={args.replicas}", args.script, *args.arguments]
    command = [sys.executable, *launcher, *meeting, *script]
    print(f"node {node}: {shlex.join(command)}", file=sys.stderr, flush=True)
    environment = {
        "OMP_NUM_THREADS": "1",
        "PIPOLLUX_CHECKPOINT_DIR": os.path.abspath(args.checkpoints),
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpus_of(node),
    }
    return subprocess.Popen(command, env=environment, start_new_session=True)


def main() -> None:
    args = parse_arguments()
    asked_to_stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked_to_stop.append(number))
    port = args.port or free_port()
    agents = [start(node, port, args) for node in NODES]

    failure, deadline = 0, math.inf
    while any(agent.poll() is None for agent in agents):
        failed = next((agent.returncode for agent in agents if agent.returncode), 0)
        # When one fails the other has nobody to train with; an agent passes SIGTERM on, and waits.
        if (asked_to_stop or failed) and not failure:
            failure = 128 + asked_to_stop[0] if asked_to_stop else failed  # as shells have it
            deadline = time.monotonic() + PATIENCE
            for agent in agents:
                agent.terminate()
        if time.monotonic() > deadline:  # it waits for its peer to leave, and hears nothing
            for agent in agents:
                agent.kill()
        time.sleep(0.1)
    sys.exit(failure or max(agent.returncode for agent in agents))


if __name__ == "__main__":
    main()
