"""Run Pollux's own simulation of a workload with another seed of its search.

    PYTHONPATH=PYMOO python benchmarks/jct/pollux_again.py ARTIFACT 1 2 --results DIR

ARTIFACT is the folder `simulator` of petuum/adaptdl, branch osdi21-artifact, which runs unchanged;
then come the workload and the seed. It needs pandas and the folder of pymoo 0.4.2.2; functions that
numpy and pandas have dropped since are restored. Takes half an hour to an hour of CPU time. Keeps
the completion times of all jobs in DIR, for `spread.py`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import runpy
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]  # not in the project's environment


def main() -> None:
    """Simulate, and save the completion times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("workload", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    target = options.results.resolve() / f"{options.workload}-{options.seed}.json"
    put_back()
    np.random.seed(options.seed)  # pymoo's generator
    random.seed(options.seed)
    os.chdir(options.artifact)
    sys.path.insert(0, ".")
    with tempfile.TemporaryDirectory() as scratch:
        said = Path(scratch) / "said"
        workload = f"workloads/workload-{options.workload}.csv"
        output = f"{scratch}/log.json"
        sys.argv = ["simulator.py", workload, "--policy", "pollux", "--output", output]
        with said.open("w") as file, redirect_stdout(file):
            runpy.run_path("simulator.py", run_name="__main__")
        # The end of its output has the completion times of all jobs.
        jcts = ast.literal_eval([x for x in said.read_text().splitlines() if x[:1] == "{"][-1])
    beside = target.with_suffix(".part")
    beside.write_text(json.dumps({"jcts": jcts}))
    beside.replace(target)


def put_back() -> None:
    """Restore functions of numpy and pandas that the artifact calls and they have dropped."""
    warnings.filterwarnings("ignore")
    for kind in (int, float, bool, object):
        if kind.__name__ not in np.__dict__:
            setattr(np, kind.__name__, kind)
    if not hasattr(pd.DataFrame, "append"):
        pd.DataFrame.append = _append


def _append(self: Any, other: Any, ignore_index: bool = False) -> Any:  # pandas'
    rows = other if isinstance(other, pd.DataFrame) else pd.DataFrame([other])
    return pd.concat([self, rows], ignore_index=ignore_index)


if __name__ == "__main__":
    main()
