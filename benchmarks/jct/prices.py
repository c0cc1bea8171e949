"""Average completion times with one cost of changes, and with two: a restart, an elastic resize.

    python benchmarks/jct/prices.py ARTIFACT --results DIR [--workloads 1] [--loads 1]
        [--as-scheduler] [--restart-seconds 30] [--found]

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact. Every workload is
simulated with every change at `--restart-seconds`, and with elastic resizes at `--rescale-seconds`
where a replica survives; with known, unknown and estimated job lengths, and with `--told 2` with
lengths known within a factor of two. With --as-scheduler the policy also decides when a job arrives
or completes, and jobs start with the measurements of their family, as under a scheduler. Results
are kept in DIR, one file each, and not simulated again; with --found nothing is simulated. Prints
Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jct

from pipollux_simulator import Experiment, KnownLength, Options, make_nodes, measure

TOLD = {"exact": "exactly", "none": "not at all", "learned": "learned"}
COLUMNS = (
    ("avg_jct_s", "average JCT, s", "{:.0f}"),
    ("median_jct_s", "median", "{:.0f}"),
    ("p99_jct_s", "p99", "{:.0f}"),
    ("makespan_s", "makespan, s", "{:.0f}"),
    ("restarts_per_job", "restarts per job", "{:.2f}"),
    ("rescales_per_job", "elastic resizes per job", "{:.2f}"),
    ("finish_time_fairness", "fairness rho", "{:.2f}"),
)


def main() -> None:
    """Simulate missing results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--workloads", default=",".join(map(str, jct.WORKLOADS)))
    parser.add_argument("--loads", default="1.0")
    parser.add_argument("--policies", default="exact")
    parser.add_argument("--told", default=",".join(TOLD))
    parser.add_argument("--as-scheduler", action="store_true")
    parser.add_argument("--restart-seconds", type=float, default=30.0)
    parser.add_argument("--rescale-seconds", type=float, default=1.0)
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    titles = [title for _, title, _ in COLUMNS]
    lines = jct.head(
        ["workload", "load", "policy", "told", "an elastic resize costs", "against Pollux", *titles]
    )
    numbers, loads = options.workloads.split(","), options.loads.split(",")
    restart = f"a restart: {options.restart_seconds:g} s"
    for which in itertools.product(map(float, loads), map(int, numbers)):
        published = jct.published_jct(options.artifact, "pollux", which)["avg_jct_s"]
        for policy in options.policies.split(","):
            for told in options.told.split(","):
                base: float | None = None
                for price in (None, options.rescale_seconds):
                    row = case(options, which, policy, told, price)
                    if row is None:
                        continue
                    shown = [form.format(row[key]) for key, _, form in COLUMNS]
                    if base is not None:
                        shown[0] += f" ({row['avg_jct_s'] / base - 1:+.1%})"
                    base = row["avg_jct_s"] if price is None else base
                    costs = restart if price is None else f"{price:g} s; {restart}"
                    against = f"{row['avg_jct_s'] / published - 1:+.1%}"
                    knows = TOLD.get(told, f"within a factor of {told}")
                    cells = [f"{which[1]}", f"{which[0]:g}", policy, knows, costs, against, *shown]
                    lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))


def case(
    options: argparse.Namespace, which: jct.Case, policy: str, told: str, price: float | None
) -> dict[str, Any] | None:
    """Return the metrics of one case, simulated or found; None: missing with --found."""
    cost = "restart" if price is None else f"{price:g}"
    kind = "scheduler" if options.as_scheduler else "prices"
    load, number = which
    at = "" if load == 1.0 else f"-load-{load:g}"
    if options.restart_seconds != Options().restart_seconds:
        at += f"-restart-{options.restart_seconds:g}"
    target = options.results / f"{kind}-{policy}-{told}-{cost}-{number}{at}.json"
    if not target.exists():
        if options.found:
            return None
        settings = Options(
            restart_seconds=options.restart_seconds,
            rescale_seconds=price,
            known_length=KnownLength.parse(told),
        )
        if options.as_scheduler:
            settings = replace(settings, decides_at="changes", inherit_models=True)
        jct.save(target, simulate(options.artifact, which, policy, settings))
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def simulate(artifact: Path, which: jct.Case, policy: str, settings: Options) -> dict[str, Any]:
    experiment = Experiment(make_nodes({"": (16, 4)}), settings, artifact / "traces")
    return measure(experiment.run(jct.workload(artifact, which), policy)).to_dict()


if __name__ == "__main__":
    main()
