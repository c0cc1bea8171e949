"""AdaptDL's published policy, called by `policy_latency.py` through a pipe.

Runs in an interpreter that only needs `adaptdl-sched`: jobs are JSON lines, their speedups tables
of (nodes 1 or more, replicas).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from adaptdl_sched.policy.pollux import PolluxPolicy
from adaptdl_sched.policy.utils import JobInfo, NodeInfo


def main() -> None:
    """Answer one question per line; "fresh" creates a new policy first."""
    policy = PolluxPolicy()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        if question["fresh"]:
            policy = PolluxPolicy()
            np.random.seed(question["seed"])
        jobs = {name: make_job(number, job) for number, (name, job) in enumerate(question["jobs"])}
        nodes = {name: NodeInfo(amounts, False) for name, amounts in question["nodes"]}
        template = next(iter(nodes.values()))
        cpu, wall = time.process_time(), time.perf_counter()
        allocations, _ = policy.optimize(jobs, nodes, question["base"], template)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(json.dumps([allocations, cpu, wall]), file=answers, flush=True)


def make_job(number: int, job: dict[str, Any]) -> JobInfo:
    table = np.array(job["speedups"])

    def speedup(num_nodes: Any, num_replicas: Any) -> Any:
        return table[np.minimum(num_nodes, len(table) - 1), num_replicas]

    return JobInfo(job["resources"], speedup, number, job["min_replicas"], job["max_replicas"])


if __name__ == "__main__":
    main()
