"""Duration of a fit, beside AdaptDL's on the same measurements.

    python benchmarks/fit-speed/fit_speed.py [--rounds 15]

100 distinct configurations of a synthetic job on 1 to 4 nodes, with 5 % of noise. Fits run in turn;
prints the median of each and the median and quartiles of the ratio of neighbours.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import adaptdl.goodput
import numpy as np

from pipollux_perfmodel import GoodputFunction, PerfParams, fit_like_adaptdl, fit_perf_params

TRUTH = PerfParams(0.05, 0.002, 0.03, 0.005, 0.01, 0.002, 1.6)
NUM_CONFIGURATIONS = 100
NOISE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    measurements = make_measurements()
    fits: dict[str, Callable[..., Any]] = {
        "AdaptDL 0.2.11": adaptdl.goodput.fit_perf_params,
        "fit_like_adaptdl": fit_like_adaptdl,
        "fit_perf_params": fit_perf_params,
    }
    seconds: dict[str, list[float]] = {name: [] for name in fits}
    warnings.simplefilter("ignore", RuntimeWarning)
    for number in range(rounds + 1):
        for name, fit in fits.items():
            began = time.perf_counter()
            fit(*measurements)
            if number:  # the first of each warms up
                seconds[name].append(time.perf_counter() - began)
    ours = np.array(seconds["fit_perf_params"])
    print("| fit | median | least | times ours: median (quartiles) |\n|---|---|---|---|")
    for name, values in seconds.items():
        low, middle, high = np.quantile(np.array(values) / ours, (0.25, 0.5, 0.75))
        print(
            f"| {name} | {1e3 * np.median(values):.1f} ms | {1e3 * min(values):.1f} ms "
            f"| {middle:.1f} ({low:.1f} to {high:.1f}) |"
        )


def make_measurements() -> list[np.ndarray]:
    """Return nodes, replicas, batch sizes, accumulation and optimizer step times."""
    rng = np.random.default_rng(0)
    every = np.array(
        [(n, n * r, b) for n in range(1, 5) for r in range(1, 5) for b in range(4, 132, 4)]
    )
    nodes, replicas, sizes = rng.permutation(every)[:NUM_CONFIGURATIONS].T
    times = GoodputFunction(TRUTH, (1.0, 1.0), 1).step_time(nodes, replicas, sizes, 0)
    noise = np.exp(NOISE * rng.standard_normal((2, NUM_CONFIGURATIONS)))
    return [nodes, replicas, sizes, times.accum_time * noise[0], times.optim_time * noise[1]]


if __name__ == "__main__":
    main()
