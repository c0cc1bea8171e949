"""One decision of `ExactPolicy` for 10 000 GPUs and 4000 jobs, by the number of new jobs.

    OPENBLAS_NUM_THREADS=1 python benchmarks/policy-latency/largest.py [--stages 1,2,4] [--pollux]
        [--jobs 400] [--domains 16,160]

Prints seconds and CPU time in all threads of each decision: without known speedups, first in the
process and later; with all speedups known, and nothing allocated; with the cluster running and a
twentieth of the jobs new; with no new jobs. Then the peak of the memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

from questions import Allocations, Question, Size, make_jobs, replace_some

from pipollux_policies import ExactPolicy, FairSpeedup

SIZE = Size(1250, 8, 4000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", default="1", help="numbers of stages of every job, by commas")
    parser.add_argument("--pollux", action="store_true", help="by Pollux's objective")
    parser.add_argument("--jobs", type=int, default=SIZE.num_jobs, help="number of jobs")
    parser.add_argument("--domains", help="nodes per rack, per zone, …, by commas; none: one level")
    options = parser.parse_args()
    stages = tuple(int(number) for number in options.stages.split(","))
    domains = tuple(int(number) for number in (options.domains or "").split(",") if number)
    size = replace(SIZE, num_jobs=options.jobs, domains=domains)
    policy = ExactPolicy(FairSpeedup() if options.pollux else None)
    ask("all new, first decision", policy, Question(make_jobs(size, stages, 1), size.nodes, {}))
    jobs = make_jobs(size, stages, 0)
    empty = Question(jobs, size.nodes, {})
    first = ask("all new", policy, empty)
    ask("known, nothing held", policy, empty)
    some, held = replace_some(jobs, first, size, stages, 0)
    second = ask("a twentieth new", policy, Question(some, size.nodes, held))
    ask("nothing new", policy, Question(some, size.nodes, second))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MiB")


def ask(label: str, policy: ExactPolicy, question: Question) -> Allocations:
    """Print and return the duration of a decision."""
    begin, computed = time.perf_counter(), time.process_time()
    answer = question.ask(policy)
    took, computed = time.perf_counter() - begin, time.process_time() - computed
    print(f"{label}: {took:.2f} s, CPU {computed:.2f} s", flush=True)
    return answer


if __name__ == "__main__":
    main()
