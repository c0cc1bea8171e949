"""Convert the command line of `pipollux simulate` to the simulator's inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipollux_sched.errors import PipolluxError
from pipollux_utils.paths import expanded

from .console import USAGE, CommandError
from .simulate_history import PastRun, past_nodes, read_past
from .simulate_options import FitName, SimulatedClusterFlags, SimulatedJobFlags

if TYPE_CHECKING:
    from pipollux_policies import NodeInfo
    from pipollux_sched.history.records import SchedulerHistory
    from pipollux_sched.spec.teams import TeamsSpec
    from pipollux_simulator import (
        DecidesAt,
        Experiment,
        JobArrival,
        Options,
        SimulationOutcome,
        Workload,
    )
    from pipollux_simulator.applications.trace_model import Fit
    from pipollux_simulator.workload.generate import Mix

_LEVEL = re.compile(r"(?P<name>[^=]+)=(?P<nodes>[0-9]{1,6})x(?P<slower>[0-9]{1,6}(\.[0-9]{1,6})?)")
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


@dataclass(frozen=True)
class SimulationInputs:
    """The inputs of a set of simulations."""

    experiment: Experiment
    pairs: list[tuple[Workload, str]]
    past: PastRun | None
    """The replayed history; None: there is none."""

    @property
    def actual(self) -> list[SimulationOutcome]:
        """The outcome of the real run, if a history is replayed."""
        return [] if self.past is None else [self.past.actual]

    @classmethod
    def read(
        cls,
        paths: Sequence[Path],
        policy: str | None,
        seed: int,
        cluster: SimulatedClusterFlags,
        jobs: SimulatedJobFlags,
    ) -> SimulationInputs:
        """Read the files and options of the command line.

        Raises:
            CommandError: options contradict each other, or a history cannot be read.
            ValueError: a file or an option is invalid.
            OSError: a file cannot be read.
        """
        from pipollux_policies import DEFAULT_POLICY
        from pipollux_simulator import Experiment

        _check_source(paths, jobs)
        history = None if jobs.from_state is None else read_past(jobs.from_state)
        own = DEFAULT_POLICY if history is None else history.policy or DEFAULT_POLICY
        names = policy_names(own if policy is None else policy)
        there = _nodes(cluster, history)
        teams = _teams(cluster, history)
        options = _options(cluster, jobs, seed, history, [*there], teams)
        experiment = Experiment(there, options, jobs.traces, seed, _fit(jobs.fit))
        chosen, past = _workloads(paths, experiment, cluster, jobs, history, teams)
        for workload in chosen:
            experiment.applications(workload)
        return cls(experiment, [(workload, name) for workload in chosen for name in names], past)


def _check_source(paths: Sequence[Path], jobs: SimulatedJobFlags) -> None:
    given = [str(paths[0])] if paths else []
    given += [f"--generate {jobs.generate.value}"] if jobs.generate is not None else []
    given += ["--from-state"] if jobs.from_state is not None else []
    if len(given) > 1:
        last, first = given[0], given[1]
        raise CommandError(f"{first} and {last} both define the jobs; leave one of them out", USAGE)
    if not given:
        raise CommandError(
            "there are no jobs; give a WORKLOAD.csv, --generate MIX or --from-state DIR", USAGE
        )
    if jobs.from_state is not None and jobs.traces is not None:
        raise CommandError(
            "--traces: jobs of a history use their own measurements; leave it out", USAGE
        )


def _nodes(cluster: SimulatedClusterFlags, history: SchedulerHistory | None) -> dict[str, NodeInfo]:
    said = cluster.nodes is not None or cluster.gpus is not None or bool(cluster.node_type)
    if history is None or said:
        if cluster.add_nodes:
            raise ValueError(
                "--add-nodes: adds to the nodes of a history; give --from-state, and neither "
                "--nodes nor --gpus nor --node-type"
            )
        number, gpus = cluster.nodes or 16, cluster.gpus or 4
        domains = [domain for domain, _ in parse_levels(cluster.level or ())]
        types, spot = cluster.node_type or (), cluster.spot
        return cluster_nodes(number, gpus, types, preemptible=spot, domains=domains)
    if cluster.level:
        raise ValueError(
            "--level: the nodes of a history have the levels of their cluster; leave it out, or "
            "give --nodes"
        )
    nodes = past_nodes(history, cluster.add_nodes)
    if not cluster.spot:
        return nodes
    return {name: replace(node, preemptible=True) for name, node in nodes.items()}


def _options(
    cluster: SimulatedClusterFlags,
    jobs: SimulatedJobFlags,
    seed: int,
    history: SchedulerHistory | None,
    nodes: Sequence[str],
    teams: TeamsSpec | None,
) -> Options:
    from pipollux_simulator import KnownLength, Options, node_events

    known, inherits = jobs.known_length, jobs.inherit_models
    usual = (
        _UsualOptions()
        if history is None
        else _UsualOptions(history.interval, history.restart_seconds, "declared", inherits=True)
    )
    most_days = Options.most_days
    events = node_events(nodes, most_days, seed, failures=cluster.failures, spot=cluster.spot)
    return Options(
        usual.interval if cluster.interval is None else cluster.interval,
        usual.restart_seconds if cluster.restart_seconds is None else cluster.restart_seconds,
        cluster.rescale_seconds,
        cluster.interference,
        node_events=events,
        known_length=KnownLength.parse(usual.known_length if known is None else known, seed),
        inherit_models=usual.inherits if inherits is None else inherits,
        decides_at=_decides_at(cluster, history),
        teams=teams,
        slowdowns=tuple(slower for _, slower in parse_levels(cluster.level or ())),
    )


def _decides_at(cluster: SimulatedClusterFlags, history: SchedulerHistory | None) -> DecidesAt:
    if history is not None:
        return "changes"
    return "arrivals" if cluster.on_arrival else "rounds"


class _UsualOptions(NamedTuple):
    interval: float = 60.0
    restart_seconds: float = 30.0
    known_length: str = "exact"
    inherits: bool = False


def _teams(cluster: SimulatedClusterFlags, history: SchedulerHistory | None) -> TeamsSpec | None:
    if cluster.teams is None:
        return None if history is None else history.teams
    from pipollux_sched.spec.teams import load_teams

    return load_teams(cluster.teams)


def _workloads(
    paths: Sequence[Path],
    experiment: Experiment,
    cluster: SimulatedClusterFlags,
    jobs: SimulatedJobFlags,
    history: SchedulerHistory | None,
    teams: TeamsSpec | None,
) -> tuple[list[Workload], PastRun | None]:
    if history is not None:
        past = _past_run(history, experiment, cluster, jobs, teams)
        return [past.workload(jobs.load)], past
    if jobs.generate is not None:
        drawn = draw_workload(jobs.generate.value, experiment, jobs.num_jobs, jobs.hours, jobs.load)
        return [replace(drawn, jobs=drawn.jobs[: jobs.jobs])], None
    found = read_workloads(paths, jobs.load, jobs.jobs)
    for workload in found:
        if teams is not None:
            _check_owners(workload, teams)
    return found, None


def _check_owners(workload: Workload, teams: TeamsSpec) -> None:
    try:
        for job in workload.jobs:
            teams.check_names(job)
    except PipolluxError as error:
        raise ValueError(f"{workload.name}: {error}") from error


def _past_run(
    history: SchedulerHistory,
    experiment: Experiment,
    cluster: SimulatedClusterFlags,
    jobs: SimulatedJobFlags,
    teams: TeamsSpec | None,
) -> PastRun:
    from pipollux_sched.history.workload import replay

    made = replay(
        history,
        experiment.nodes,
        name=expanded(jobs.from_state or Path()).resolve().name,
        first=jobs.jobs,
        restart_seconds=cluster.restart_seconds,
        rescale_seconds=cluster.rescale_seconds,
    )
    changed = cluster.failures or cluster.spot or jobs.load != 1 or cluster.interference > 0
    unchanged = dict(experiment.nodes) == dict(history.nodes) and not changed
    unchanged &= teams == history.teams
    return PastRun(history, made, unchanged=unchanged, teams=teams)


def _fit(name: FitName) -> Fit:
    from pipollux_perfmodel import fit_like_adaptdl, fit_perf_params

    return fit_like_adaptdl if name is FitName.adaptdl else fit_perf_params


def policy_names(text: str) -> list[str]:
    """Return the policies of a comma-separated list; "all": all. ValueError: one is unknown."""
    from pipollux_policies import POLICIES, parse_policy, split_policies

    names = [*POLICIES] if text.strip() == "all" else [*dict.fromkeys(split_policies(text))]
    for name in names:
        parse_policy(name)
    return names


def cluster_nodes(
    number: int,
    gpus: int,
    node_types: Sequence[str],
    *,
    preemptible: bool,
    domains: Sequence[int] = (),
) -> dict[str, NodeInfo]:
    """Return nodes of one kind, or those of `TYPE=COUNTxGPUS`; raise ValueError if invalid."""
    from pipollux_simulator import make_nodes

    counts: dict[str, tuple[int, int]] = {}
    for text in node_types:
        found = _NODE_TYPE.fullmatch(text)
        if found is None:
            raise ValueError(f"--node-type: {text!r} must be TYPE=COUNTxGPUS, such as a100-40g=8x4")
        if found["type"] in counts:
            raise ValueError(f"--node-type: {found['type']} comes twice; give each type once")
        counts[found["type"]] = int(found["count"]), int(found["gpus"])
    kinds = counts or {"": (number, gpus)}
    return make_nodes(kinds, preemptible=preemptible, domains=domains)


def parse_levels(texts: Sequence[str]) -> list[tuple[int, float]]:
    """Return nodes per domain and slowdown of `NAME=NODESxSLOWER`; raise ValueError if invalid."""
    found: list[tuple[int, float]] = []
    for text in texts:
        level = _LEVEL.fullmatch(text)
        if level is None:
            raise ValueError(f"--level: {text!r} must be NAME=NODESxSLOWER, such as rack=4x3")
        nodes, slower = int(level["nodes"]), float(level["slower"])
        below, less = found[-1] if found else (1, 1.0)
        if nodes < 1:
            raise ValueError(f"--level: {text!r} must have domains of at least 1 node")
        if nodes % below:
            raise ValueError(
                f"--level: {text!r} must have whole domains of the level before, so a multiple of "
                f"{below} nodes"
            )
        if slower < less:
            raise ValueError(
                f"--level: {text!r} must not be faster than the level before; give at least "
                f"{less:g}"
            )
        found.append((nodes, slower))
    return found


def read_workloads(paths: Sequence[Path], load: float, first: int | None) -> list[Workload]:
    """Read workloads, named by their files, or by their paths if file names repeat.

    Raises:
        ValueError: a file is invalid, or has no jobs.
        OSError: a file cannot be read.
    """
    from pipollux_simulator import Workload, read_workload

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
    from pipollux_simulator import scale_load

    return tuple(scale_load(jobs, load)[:first])


def draw_workload(
    mix: Mix, experiment: Experiment, num_jobs: int, hours: float, load: float
) -> Workload:
    """Generate a workload that fits the nodes, with the experiment's seed, or raise ValueError."""
    from pipollux_simulator import Workload, generate, requests_for

    requests = requests_for(mix, experiment.nodes, experiment.traces)
    jobs = generate(num_jobs, hours, experiment.seed, mix, requests, load=load)
    return Workload(f"{mix}-{experiment.seed}", jobs)
