"""Convert the command line of `pipollux simulate` to the simulator's inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .console import USAGE, CommandError

if TYPE_CHECKING:
    from pipollux_sched.policy import NodeInfo
    from pipollux_sched.simulator import Experiment, JobArrival, Workload
    from pipollux_sched.simulator.workload.generate import Mix

_NODE_TYPE = re.compile(r"(?P<type>[^=]+)=(?P<count>[1-9][0-9]*)x(?P<gpus>[1-9][0-9]*)")


@contextmanager
def input_errors() -> Iterator[None]:
    """Exit with one sentence if a file or an option is invalid."""
    try:
        yield
    except ValueError as error:
        raise CommandError(str(error), USAGE) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(
            f"{error.filename}: cannot be read ({reason}); give the path of a file", USAGE
        ) from error


def policy_names(text: str | None) -> list[str]:
    """Return the policies of a comma-separated list, each once; None: the default, "all": all.

    Raises:
        ValueError: one is unknown.
    """
    from pipollux_sched.policy import DEFAULT_POLICY, POLICIES, make_policy

    names = [name.strip() for name in (DEFAULT_POLICY if text is None else text).split(",")]
    names = list(POLICIES) if names == ["all"] else list(dict.fromkeys(names))
    for name in names:
        make_policy(name)
    return names


def cluster_nodes(
    number: int, gpus: int, node_types: Sequence[str], *, preemptible: bool
) -> dict[str, NodeInfo]:
    """Return nodes of one kind, or those given as `TYPE=COUNTxGPUS`.

    Raises:
        ValueError: one of the texts has another form, or a type is given twice.
    """
    from pipollux_sched.simulator import make_nodes

    counts: dict[str, tuple[int, int]] = {}
    for text in node_types:
        found = _NODE_TYPE.fullmatch(text)
        if found is None:
            raise ValueError(f"--node-type: {text!r} must be TYPE=COUNTxGPUS, such as a100-40g=8x4")
        if found["type"] in counts:
            raise ValueError(f"--node-type: {found['type']} comes twice; give each type once")
        counts[found["type"]] = int(found["count"]), int(found["gpus"])
    return make_nodes(counts or {"": (number, gpus)}, preemptible=preemptible)


def read_workloads(paths: Sequence[Path], load: float, first: int | None) -> list[Workload]:
    """Read workloads; each is named by its file, or by its path if file names repeat.

    Raises:
        ValueError: a file is invalid, or has no jobs.
        OSError: a file cannot be read.
    """
    from pipollux_sched.simulator import Workload, read_workload

    stems = [path.stem for path in paths]
    found = []
    for path in paths:
        jobs = read_workload(path)
        if not jobs:
            raise ValueError(f"{path}: holds no job; give a row for each")
        name = path.stem if stems.count(path.stem) == 1 else str(path)
        found.append(Workload(name, _scaled(jobs, load, first)))
    return found


def _scaled(jobs: Sequence[JobArrival], load: float, first: int | None) -> tuple[JobArrival, ...]:
    from pipollux_sched.simulator import scale_load

    return tuple(scale_load(jobs, load)[:first])


def draw_workload(
    mix: Mix, experiment: Experiment, num_jobs: int, hours: float, load: float
) -> Workload:
    """Generate a workload that fits the nodes, with the experiment's seed.

    Raises:
        ValueError: an argument is out of range, or traces are missing or invalid.
    """
    from pipollux_sched.simulator import Workload, generate, requests_for

    requests = requests_for(mix, experiment.nodes, experiment.traces)
    jobs = generate(num_jobs, hours, experiment.seed, mix, requests, load=load)
    return Workload(f"{mix}-{experiment.seed}", jobs)
