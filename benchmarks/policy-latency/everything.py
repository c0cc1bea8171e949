"""Decisions of a scheduler with everything enabled, in turn with those of a plain one.

    OPENBLAS_NUM_THREADS=1 python benchmarks/policy-latency/everything.py [--rounds 7] [--jobs 4000]
        [--teams] [--running] [--without levels,sweeps,forecasts,notifications,server]

Two processes each hold a store with the same jobs on 1250 nodes of 8 GPUs, and decide with the
scheduler's own allocator. One has only that. The other has racks and zones, 400 jobs that are
trials of sweeps with quotas, forecasts in the background, notifications to a receiver on the
loopback interface, and the server with three open pages. In every round a twentieth of the jobs
ends and as many come, then each process decides while the other one is stopped; with `--running`,
both run on between their decisions. With `--teams`, both have quotas of two teams. Prints Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import numpy as np

from pipollux_policies import DEFAULT_POLICY, make_policy
from pipollux_sched.allocator.allocator import Allocator
from pipollux_sched.allocator.job_infos import node_info
from pipollux_sched.allocator.snapshot import SnapshotReader
from pipollux_sched.allocator.strategy import PolicyStrategy
from pipollux_sched.backend import ReplicaGroupManager
from pipollux_sched.backend.local.engine import LocalEngine
from pipollux_sched.controller.admission import program
from pipollux_sched.controller.commands import JobService
from pipollux_sched.controller.deletion import JobDeletion
from pipollux_sched.controller.executor import Executor
from pipollux_sched.controller.sweeps import SweepLoop
from pipollux_sched.forecasting.loop import ForecastLoop
from pipollux_sched.forecasting.process import ForecastProcess
from pipollux_sched.lifecycle import Allocate, Event, Exited, FirstStep, Outcome, Started
from pipollux_sched.metrics import SchedulerMetrics
from pipollux_sched.notifications.notifier import Notifier, NotifyOptions
from pipollux_sched.planning.explain import explanation
from pipollux_sched.server import create_app, end_waiting
from pipollux_sched.server.http_server import HttpServer
from pipollux_sched.spec.cluster import ClusterSpec, NodeSpec
from pipollux_sched.spec.job import JobSpec, parse_job
from pipollux_sched.spec.teams import TeamsSpec
from pipollux_sched.store import Point, StateDir, Store

NODES, SLOTS = 1250, 8
RACK, ZONE = 16, 160
"""Nodes in each."""
SWEEPS, TRIALS = 5, 80
FEATURES = ("levels", "sweeps", "forecasts", "notifications", "server")
TOKEN = "admin-token"  # noqa: S105  # of this benchmark's own server
KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TEAMS = {"teams": [{"name": name, "quota": NODES * SLOTS // 2} for name in ("text", "vision")]}


class Took(NamedTuple):
    """Seconds of one decision."""

    deciding: float
    """In the policy, as `pipollux_policy_seconds` counts it."""
    whole: float
    """With reading the store and storing the result."""
    computed: float
    """Of `whole`, CPU time of the thread that decides."""
    changed: int
    """Number of changed allocations."""


class World:
    """A store with jobs, and an allocator; changes are carried out at once, without processes."""

    def __init__(
        self, folder: Path, num_jobs: int, features: Sequence[str], *, teams: bool
    ) -> None:
        self.features, self.teams = features, teams
        self.state_dir = StateDir(folder)
        self.state_dir.create()
        self.store = Store(self.state_dir.database, create=True)
        self.script = folder / "train.py"
        self.script.touch()
        self.cluster = ClusterSpec(
            nodes=tuple(_node(n, levels="levels" in features) for n in range(NODES)),
            levels=("zone", "rack") if "levels" in features else (),
        )
        entries = ((n.name, n.slots, n.kind, n.model_dump(mode="json")) for n in self.cluster.nodes)
        self.store.set_nodes(entries)
        served = {"policy": "ExactPolicy", "interval": 60.0, "restart_seconds": 30.0}
        self.store.add_event("cluster", {"nodes": {}, **served})
        if teams:
            self.store.teams.set_spec(TeamsSpec.model_validate(TEAMS).model_dump(mode="json"))
        self.metrics = SchedulerMetrics()
        self.allocator = Allocator(
            SnapshotReader(self.store, restart_seconds=30.0),
            PolicyStrategy(make_policy(DEFAULT_POLICY)),
            carry_out=self._carry_out,
            keep_notices=self.store.teams.set_notices,
            metrics=self.metrics,
        )
        self.num_submitted = 0
        self._todo: list[str] = []
        self._reported: set[str] = set()
        self._resources = ExitStack()
        self._start_features()
        self.submit(num_jobs - (SWEEPS * TRIALS if "sweeps" in features else 0))

    # Jobs

    def submit(self, count: int) -> None:
        """Submit jobs of one kind each."""
        for number in range(self.num_submitted, self.num_submitted + count):
            notify = [{"webhook": self._receiver, "secret": KEY}] if self._receiver else []
            spec = parse_job(
                {
                    "name": f"job-{number}",
                    "script": str(self.script),
                    "max_replicas": 64,
                    "notify": notify,
                    **({"team": ("text", "vision")[number % 2]} if self.teams else {}),
                }
            )
            revealed = [entry.revealed() for entry in spec.notify]
            data = spec.model_dump(mode="json") | ({"notify": revealed} if revealed else {})
            self.store.submit(spec.name, data, "token", 3)
        self.num_submitted += count

    def replace(self, count: int) -> None:
        """End the oldest jobs that run, and submit as many."""
        running = [x for x in self.store.jobs(unfinished=True) if x.state.running_on]
        events = [
            (job.name, Exited(job.state.attempt, Outcome.COMPLETE)) for job in running[:count]
        ]
        self.store.transition_all(events)
        self.submit(count)

    def decide(self) -> Took:
        """Decide once, and carry the decision out."""
        before, began, computed = self._policy_seconds(), time.perf_counter(), time.thread_time()
        decisions = self.allocator.run_once()
        whole, computed = time.perf_counter() - began, time.thread_time() - computed
        deciding = self._policy_seconds() - before
        self._start_all()
        return Took(deciding, whole, computed, len(decisions))

    def _policy_seconds(self) -> float:
        samples = (s for m in self.metrics.policy_seconds.collect() for s in m.samples)
        return next(s.value for s in samples if s.name.endswith("_sum"))

    def _carry_out(self, events: Sequence[tuple[str, Event]]) -> None:
        self.store.transition_all(events)
        self._todo += [name for name, event in events if isinstance(event, Allocate)]

    def _start_all(self) -> None:
        """Let the processes of changed jobs end, start, and take their first step."""
        names, self._todo = list(dict.fromkeys(self._todo)), []
        stopped = [(n, self.store.job(n).state) for n in names]
        self.store.transition_all(
            [
                (name, Exited(state.attempt, Outcome.STOPPED, step=1))
                for name, state in stopped
                if state.running_on
            ]
        )
        started = [(n, self.store.job(n).state) for n in names]
        started = [(name, state) for name, state in started if state.assigned]
        events: list[tuple[str, Event]] = []
        for name, state in started:
            replicas = tuple(str(number) for number in range(len(state.assigned)))
            events += [(name, Started(state.attempt, replicas))]
        self.store.transition_all(events)
        self.store.transition_all([(n, FirstStep(s.attempt, 1, 30.0)) for n, s in started])
        for name, state in started:
            if name in self._reported:
                continue
            self._reported.add(name)
            self.store.add_report(name, state.attempt, [_point(len(state.assigned))])
            hints = _hints(name, len(state.assigned), levels="levels" in self.features)
            self.store.put_hints(name, state.attempt, hints)

    # What the full one has besides

    def _start_features(self) -> None:
        self._ending = threading.Event()
        engine = LocalEngine(self.cluster, self.state_dir)
        backend = ReplicaGroupManager(engine, self.store.launches, self.state_dir, grace=1.0)
        executor = Executor(self.store, backend, lambda job: program(job, {}), grace=1.0)
        control = JobService(
            self.store,
            executor,
            backend,
            lambda: {node.name: node_info(node) for node in self.cluster.nodes},
            reconsider=lambda: None,
            stopping=lambda: False,
            state_dir=self.state_dir.path,
            deletion=JobDeletion(self.store, self.state_dir),
        )
        self._receiver = self._start_notifier() if "notifications" in self.features else ""
        if "sweeps" in self.features:
            sweeps = SweepLoop(self.store, control.submit_trials, self._handle)
            for number in range(SWEEPS):
                control.submit(self._sweep(number))
            sweeps.step()
            self._run(lambda: sweeps.run(self._ending))
        if "forecasts" in self.features:
            process = self._resources.enter_context(ForecastProcess(self.state_dir.store))
            loop = ForecastLoop(self.store, process, ending=self._ending)
            self._run(loop.run)
        if "server" in self.features:
            app = create_app(self.store, control, state_dir=self.state_dir, admin_token=TOKEN)
            server = HttpServer(app, "127.0.0.1", 0)
            server.start()
            self._resources.callback(server.stop)
            self._resources.callback(end_waiting, app)
            viewer = multiprocessing.get_context("spawn").Process(target=view, args=(server.url,))
            viewer.start()
            self._resources.callback(viewer.join)
            self._resources.callback(viewer.terminate)

    def _run(self, target: Any) -> None:
        thread = threading.Thread(target=target)
        thread.start()
        self._resources.callback(thread.join)
        self._resources.callback(self._ending.set)

    def _handle(self, name: str, event: Event) -> None:
        self.store.transition_all([(name, event)])

    def _sweep(self, number: int) -> JobSpec:
        return parse_job(
            {
                "name": f"sweep-{number}",
                "script": str(self.script),
                "max_replicas": 8,
                "sweep": {"grid": {"lr": [n / 100 for n in range(1, TRIALS + 1)]},
                          "max_parallel": TRIALS, "max_replicas": 2 * TRIALS},
                **({"team": "text"} if self.teams else {}),
            }
        )  # fmt: skip

    def _start_notifier(self) -> str:
        receiver = HTTPServer(("127.0.0.1", 0), Receiver)
        self._run(receiver.serve_forever)
        self._resources.callback(receiver.shutdown)
        options = NotifyOptions(hosts=("127.0.0.1",))
        notifier = Notifier(
            self.store,
            options,
            lambda job: explanation(self.store, job).waits_for,
            self._ending,
        )
        self._run(notifier.run)
        self._resources.callback(notifier.wake)
        return f"http://127.0.0.1:{receiver.server_port}/"

    def close(self) -> None:
        """End everything."""
        self._ending.set()
        self._resources.close()
        self.store.close()


class Receiver(BaseHTTPRequestHandler):
    """Accepts notifications."""

    def do_POST(self) -> None:
        """Accept one."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def view(url: str) -> None:
    """Do what three open pages do: follow events, and read the overview every two seconds."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client:

        def follow() -> None:
            with client.stream("GET", "/events/stream?summary=true", timeout=None) as answer:
                for _ in answer.iter_bytes():
                    pass

        for _ in range(3):
            threading.Thread(target=follow, daemon=True).start()
        while True:
            for _ in range(3):
                client.get("/overview?limit=50&events=0")
            time.sleep(2.0)


def serve(pipe: Connection, folder: str, num_jobs: int, features: str, teams: bool) -> None:
    """Decide whenever the parent says so."""
    os.setpgrp()
    world = World(Path(folder), num_jobs, features.split(","), teams=teams)
    try:
        pipe.send(None)
        while (replaced := pipe.recv()) is not None:
            world.replace(replaced)
            pipe.send(world.decide())
    finally:
        world.close()


class Side:
    """One of the two processes; with ``stopped``, it runs only while it is asked."""

    def __init__(
        self, folder: Path, num_jobs: int, features: Sequence[str], teams: bool, stopped: bool
    ) -> None:
        folder.mkdir()
        self._stopped = stopped
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        told = (theirs, str(folder), num_jobs, ",".join(features), teams)
        self._process = context.Process(target=serve, args=told)
        self._process.start()
        theirs.close()  # so that the end of the process is seen
        self._pipe.recv()
        self._signal(signal.SIGSTOP)

    def decide(self, replaced: int, head_start: float) -> Took:
        """Let it run for a while, and decide."""
        self._signal(signal.SIGCONT)
        time.sleep(head_start)
        self._pipe.send(replaced)
        took: Took = self._pipe.recv()
        self._signal(signal.SIGSTOP)
        return took

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        self._pipe.send(None)
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        if self._stopped and self._process.pid is not None:
            os.killpg(self._process.pid, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--teams", action="store_true", help="quotas of two teams in both")
    parser.add_argument(
        "--without", default="", help=f"features to leave out: {','.join(FEATURES)}"
    )
    parser.add_argument(
        "--running", action="store_true", help="let both run between decisions, as schedulers do"
    )
    parser.add_argument(
        "--head-start", type=float, default=3.0, help="seconds before each decision"
    )
    options = parser.parse_args()
    features = [name for name in FEATURES if name not in options.without.split(",")]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as sides:
        plain, full = (
            Side(Path(folder) / name, options.jobs, enabled, options.teams, not options.running)
            for name, enabled in (("plain", ()), ("full", features))
        )
        for side in (plain, full):
            sides.callback(side.close)
        print("| round | deciding, s | ratio | with the store, s | its CPU, s | ratio | changed |")
        print("|---|---|---|---|---|---|---|")
        pairs = []
        for number in range(-2, options.rounds):
            replaced = 0 if number < 0 else options.jobs // 20
            order = (plain, full) if number % 2 else (full, plain)
            took = {side: side.decide(replaced, options.head_start) for side in order}
            pairs.append((took[plain], took[full]))
            print(_row(str(number), *pairs[-1]), flush=True)
        # Before the first round, nothing was known of the jobs.
        print(_row("median", *(_median(each) for each in zip(*pairs[2:], strict=True))))
        ratios = [full.deciding / plain.deciding for plain, full in pairs[2:]]
        print(f"\nRatio of a round: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def _row(label: str, one: Took, other: Took) -> str:
    return (
        f"| {label} | {one.deciding:.2f}, {other.deciding:.2f} "
        f"| {other.deciding / one.deciding:.2f} | {one.whole:.2f}, {other.whole:.2f} "
        f"| {one.computed:.2f}, {other.computed:.2f} | {other.computed / one.computed:.2f} "
        f"| {one.changed}, {other.changed} |"
    )


def _median(all_took: Sequence[Took]) -> Took:
    return Took(*(median(values) for values in zip(*all_took, strict=True)))


def _node(number: int, *, levels: bool) -> NodeSpec:
    topology = {"zone": f"z{number // ZONE}", "rack": f"r{number // RACK}"} if levels else {}
    return NodeSpec(name=f"n{number:04}", slots=SLOTS, kind="cpu", topology=topology)


def _point(num_replicas: int) -> Point:
    return Point(
        time=time.time(), step=1, epoch=0, samples=32, loss=2.0, batch_size=32, atomic_bsz=32,
        accum_steps=0, num_replicas=num_replicas, step_time=0.1, predicted_step_time=0.1,
        goodput=300.0, efficiency=1.0,
    )  # fmt: skip


def _hints(name: str, num_replicas: int, *, levels: bool) -> dict[str, Any]:
    """Return what a job reports, equal for equal names; each level costs four times as much."""
    rng = np.random.default_rng(list(name.encode()))
    seconds = float(rng.uniform(0.02, 0.4))
    params: dict[str, Any] = {
        "alpha_c": seconds,
        "beta_c": seconds / 40,
        "alpha_n": seconds / 3,
        "beta_n": seconds / 50,
        "alpha_r": seconds / 5,
        "beta_r": seconds / 80,
        "gamma": 1.3,
    }
    if levels:
        params["alpha_levels"] = [4 * params["alpha_n"], 16 * params["alpha_n"]]
        params["beta_levels"] = [4 * params["beta_n"], 16 * params["beta_n"]]
    return {
        "initBatchSize": 128,
        "maxBatchSize": 4096,
        "localBszBounds": [16, 256],
        "maxProfiledReplicas": max(num_replicas, 16),
        "gradientAccumulation": True,
        "gradParams": {"norm": 1.0, "var": float(rng.uniform(1, 50))},
        "perfParams": params,
        "trainedSamples": 1000.0,
        "remainingSamples": float(rng.uniform(1e5, 1e8)),
    }


if __name__ == "__main__":
    main()
