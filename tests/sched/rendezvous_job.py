"""Replicas that meet as torch's do, say how, and stay until a file tells them to end."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    met = {"args": sys.argv[1:], "environment": dict(os.environ), "total": total.item()}
    print(json.dumps(met), flush=True)
    deadline = time.monotonic() + 240
    while not Path(os.environ["GO"]).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.destroy_process_group()
