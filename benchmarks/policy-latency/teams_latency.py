"""Cost of quotas of two teams around a policy, in time of a decision.

    OPENBLAS_NUM_THREADS=1 python benchmarks/policy-latency/teams_latency.py [--rounds 5]

Every round draws a cluster's jobs, every second one of each team, each team with half of the slots
as its quota, and asks `ExactPolicy` alone and within quotas in turn; speedups are known:

    cold     nothing is allocated
    steady   the answer of the same policy, with a twentieth of the jobs replaced
    notice   one team's jobs hold all, the other's arrive: jobs get notice
    given    the same when the notice is over

Prints medians of CPU time, and of the ratio to the policy alone in the same round. Alone, the last
two have the same jobs and allocations.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from questions import Allocations, Question, Size, make_jobs, replace_some

from pipollux_policies import ExactPolicy, JobInfo
from pipollux_policies.teams.team import Team, Teams
from pipollux_policies.teams.team_policy import TeamPolicy

SIZES = [Size(16, 4, 40), Size(128, 8, 256)]
CASES = ("cold", "steady", "notice", "given")
NAMES = ("text", "vision")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("| GPUs, jobs | case | alone | two teams | times |\n|---|---|---|---|---|")
    for size in SIZES:
        found: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
        for seed in range(rounds):
            for case, times in measure(size, seed).items():
                found[case].append(times)
        for case, times in found.items():
            alone, within = (median(column) for column in zip(*times, strict=True))
            ratios = [b / a for a, b in times]
            print(
                f"| {size} | {case} | {1000 * alone:.1f} ms | {1000 * within:.1f} ms | "
                f"{median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}) |",
                flush=True,
            )


def measure(size: Size, seed: int) -> dict[str, tuple[float, float]]:
    """Return CPU seconds of the policy alone and within quotas, by case."""
    quota = size.num_nodes * size.gpus // 2
    teams = Teams({name: Team(name, quota=quota) for name in NAMES}, notice=60.0)
    jobs, template = of_teams(make_jobs(size, (1,), seed)), next(iter(size.nodes.values()))
    alone = ExactPolicy()

    def within(now: float = 0.0, notices: Mapping[str, float] | None = None) -> TeamPolicy:
        return TeamPolicy(ExactPolicy(), teams, now, notices or {})

    def timed(policy: Any, question: Question) -> tuple[float, Allocations]:
        begin = time.process_time()
        answer = question.ask(policy)
        return time.process_time() - begin, answer

    empty = Question(jobs, size.nodes, {})
    timed(alone, empty)  # from here on speedups are known
    timed(within(), empty)
    found: dict[str, tuple[float, float]] = {}
    first, held = timed(alone, empty)
    second, shared = timed(within(), empty)
    found["cold"] = first, second

    def next_round(before: Allocations) -> Question:
        some, kept = replace_some(jobs, before, size, (1,), seed)
        return Question(of_teams(some), size.nodes, kept)

    plain, other = next_round(held), next_round(shared)
    for question in (plain, other):
        timed(alone, question)
    found["steady"] = timed(alone, plain)[0], timed(within(), other)[0]

    text = {name: job for name, job in jobs.items() if job.team == "text"}
    lent = Question(jobs, size.nodes, Question(text, size.nodes, {}).ask(within()))
    found["notice"] = timed(alone, lent)[0], timed(within(), lent)[0]
    notices = within().solve(lent.jobs, lent.nodes, lent.base, template).notices
    over = within(60.0, notices)
    found["given"] = timed(alone, lent)[0], timed(over, lent)[0]
    return found


def of_teams(jobs: Mapping[str, JobInfo]) -> dict[str, JobInfo]:
    """Return the jobs, every second one of each team."""
    return {name: replace(job, team=NAMES[int(name[1:]) % 2]) for name, job in jobs.items()}


if __name__ == "__main__":
    main()
