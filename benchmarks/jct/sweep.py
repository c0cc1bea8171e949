"""Forty jobs of one family, as from a user who tries forty settings of a script.

    python benchmarks/jct/sweep.py ARTIFACT

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact. The jobs arrive all at
once, or one every 20 s, on 4 nodes of 4 GPUs; a start takes 30 s, and the policy decides as in a
scheduler. Job lengths are known; declared by the jobs once they have trained; estimated from
completed jobs; or unknown. Prints Markdown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jct

from pipollux_simulator import (
    Experiment,
    JobArrival,
    JobTerms,
    KnownLength,
    Options,
    Workload,
    make_nodes,
    measure,
)

NUM_JOBS = 40
TOLD = {
    "exact": "exactly",
    "declared": "by jobs that have trained",
    "learned": "learned",
    "none": "not at all",
}


def main() -> None:
    """Simulate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    artifact = parser.parse_args().artifact
    titles = ("application", "a job every", "told", "average JCT, s", "p99", "makespan, s")
    print("\n".join(jct.head([*titles, "restarts per job"])))
    for application in ("cifar10", "deepspeech2"):
        for gap in (0.0, 20.0):
            for told, words in TOLD.items():
                options = Options(
                    known_length=KnownLength.parse(told), decides_at="changes", inherit_models=True
                )
                experiment = Experiment(make_nodes({"": (4, 4)}), options, artifact / "traces")
                row = measure(experiment.run(sweep(application, gap), "exact")).to_dict()
                cells = [application, f"{gap:g} s", words, f"{row['avg_jct_s']:.0f}"]
                cells += [f"{row['p99_jct_s']:.0f}", f"{row['makespan_s']:.0f}"]
                print("| " + " | ".join([*cells, f"{row['restarts_per_job']:.1f}"]) + " |")


def sweep(application: str, gap: float) -> Workload:
    """Return the jobs, which adapt their batch sizes."""
    terms = JobTerms(declares_length=True)
    jobs = (
        JobArrival(f"{application}-{n}", 1.0 + gap * n, application, 1, 1, terms=terms)
        for n in range(NUM_JOBS)
    )
    return Workload(f"{application}-sweep", tuple(jobs))


if __name__ == "__main__":
    main()
