"""Simulations from names: what can run where, and several at a time."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipollux_perfmodel import GradParams
from pipollux_simulator import (
    Experiment,
    JobArrival,
    Options,
    SimulationError,
    Workload,
    load_applications,
    make_nodes,
    node_events,
    requests_for,
    run_pairs,
)
from tests.simulator.simulator_cases import write_traces


def pipelines(name: str, number: int = 3, application: str = "gpt-1.3b") -> Workload:
    jobs = [JobArrival(f"j{i}", 200.0 * i, application, 2, 32) for i in range(number)]
    return Workload(name, tuple(jobs))


def test_nodes_are_named_in_order() -> None:
    nodes = make_nodes({"": (11, 4), "v100-16g": (1, 8)}, preemptible=True)
    assert [*nodes][:2] == ["node-00", "node-01"]
    assert [*nodes][-2:] == ["node-10", "v100-16g-0"]
    assert nodes["v100-16g-0"].resources == {"slots": 8}
    assert nodes["v100-16g-0"].gpu_type == "v100-16g"
    assert all(node.preemptible for node in nodes.values())


def test_what_fits_on_no_node_is_said_before_anything_runs() -> None:
    workload = pipelines("w", application="gpt-13b")
    message = "application 'gpt-13b' fits on no node: a replica takes 8 GPUs of one node, and the "
    with pytest.raises(ValueError, match=f"{message}largest has 4"):
        Experiment(make_nodes({"": (4, 4)})).run(workload, "fifo")


def test_traces_tell_of_nodes_of_four_gpus(tmp_path: Path) -> None:
    write_traces(tmp_path)
    workload = Workload("w", (JobArrival("j", 0.0, "cifar10", 1, 128),))
    with pytest.raises(ValueError, match="on nodes of 4 GPUs, and nodes have up to 8"):
        Experiment(make_nodes({"": (1, 8)}), traces=tmp_path).run(workload, "fifo")


def test_a_traced_job_takes_as_long_as_its_traces_say(tmp_path: Path) -> None:
    write_traces(tmp_path)
    workload = Workload("w", (JobArrival("j", 0.0, "cifar10", 1, 1024),))
    experiment = Experiment(make_nodes({"": (1, 2)}), Options(restart_seconds=10.0), tmp_path)
    (job,) = experiment.run(workload, "fifo").jobs
    # Batches of 1024 are eight of 128: 250 iterations of 2 s.
    assert job.completed == pytest.approx(60 + 10 + 500)
    # Alone on both GPUs, 512 each: 250 of 1 s.
    assert job.isolated == pytest.approx(10 + 250)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt", "application 'gpt' is not known; choose from bert, cifar10"),
        ("bert", "application 'bert' needs its traces; give the folder"),
    ],
)
def test_applications_are_found_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_applications([name])


def test_only_traces_that_are_asked_for_are_read(tmp_path: Path) -> None:
    write_traces(tmp_path)
    assert [*load_applications(["cifar10", "gpt-1.3b"], traces=tmp_path)] == ["cifar10", "gpt-1.3b"]
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}: holds no folder yolov3"):
        load_applications(["yolov3"], traces=tmp_path)


def test_users_ask_for_what_fits_on_the_nodes() -> None:
    small = requests_for("pipelines", make_nodes({"": (4, 4)}))
    assert [*small] == ["gpt-1.3b", "gpt-2.7b", "gpt-6.7b"]
    assert [*requests_for("pipelines", make_nodes({"v100-16g": (4, 4)}))] == [
        "gpt-1.3b",
        "gpt-2.7b",
    ]
    assert "gpt-13b" in requests_for("pipelines", make_nodes({"": (4, 8)}))


def test_node_events_are_drawn_as_asked() -> None:
    names = [f"n{i}" for i in range(4)]
    assert node_events(names, 2.0, 0, failures=False, spot=False) == ()
    spot = node_events(names, 2.0, 0, failures=False, spot=True)
    assert {event.kind for event in spot} == {"drain", "lost", "back"}
    assert spot == node_events(names, 2.0, 0, failures=False, spot=True)
    both = node_events(names, 200.0, 0, failures=True, spot=True)
    assert [event.time for event in both] == sorted(event.time for event in both)


@pytest.mark.exhaustive
def test_processes_change_nothing_but_wall_clock_times() -> None:
    experiment = Experiment(make_nodes({"": (2, 4)}))
    pairs = [
        (pipelines("w"), "fifo"),
        (pipelines("v", 2), "tiresias"),
        (pipelines("w", 1), "exact"),
    ]
    told: list[tuple[int, float, int]] = []
    one = run_pairs(experiment, pairs, _deaf)
    two = run_pairs(experiment, pairs, lambda *news: told.append(news), processes=2)
    assert [found.jobs for found in one] == [found.jobs for found in two]
    assert [(found.workload, found.policy) for found in two] == [
        *(("w", "fifo"), ("v", "tiresias"), ("w", "exact"))
    ]
    for index, (workload, _) in enumerate(pairs):
        done = [news[2] for news in told if news[0] == index]
        assert done == sorted(done)
        assert done[-1] == len(workload.jobs)


@pytest.mark.exhaustive
def test_an_error_in_a_process_is_raised_here_and_ends_the_others() -> None:
    nodes = make_nodes({"": (1, 4)})
    experiment = Experiment(nodes, Options(most_days=0.01))
    with pytest.raises(SimulationError, match=r"after 0.01 days 3 jobs are not done"):
        run_pairs(
            experiment, [(pipelines("w"), "fifo"), (pipelines("w"), "tiresias")], _deaf, processes=2
        )


def _deaf(pair: int, now: float, done: int) -> None:
    pass


ENDLESS = """
from pipollux_simulator import *
jobs = tuple(JobArrival(f"j{i}", 0.0, "gpt-13b", 1, 48) for i in range(40))
experiment = Experiment(make_nodes({"": (1, 8)}))
watch = lambda pair, now, done: print(pair, flush=True)
if __name__ == "__main__":
    run_pairs(experiment, [(Workload("w", jobs), "fifo")] * 2, watch, processes=2)
"""


def is_deaf_to_ctrl_c(process: psutil.Process) -> bool:
    """Whether SIGINT is blocked or ignored."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    masks = re.findall(r"^Sig(?:Blk|Ign):\t([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (signal.SIGINT - 1) & 1 for mask in masks)


@pytest.mark.exhaustive
def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS, encoding="utf-8")
    command = [sys.executable, str(script)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams, start_new_session=True) as parent:  # type: ignore[call-overload]  # the same for every stream
        seen = set()
        while len(seen) < 2:
            seen.add(parent.stdout.readline())
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2
        assert all(map(is_deaf_to_ctrl_c, children))
        # As a terminal does it: to all of them.
        for process in [*children, parent]:
            process.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=240)
    assert parent.returncode != 0
    # The parent tells of its interrupt, the children say nothing.
    assert errors.count("Traceback") == 1
    _, alive = psutil.wait_procs(children, timeout=240)
    assert alive == []


def test_a_job_may_begin_with_what_its_family_measured(tmp_path: Path) -> None:
    write_traces(tmp_path)
    jobs = tuple(JobArrival(f"j-{n}", 3000.0 * n, "cifar10", 1, 128) for n in range(2))
    restarts = {}
    for inherit in (False, True):
        options = Options(inherit_models=inherit)
        experiment = Experiment(make_nodes({"": (2, 2)}), options, tmp_path)
        first, second = experiment.run(Workload("w", jobs), "exact").jobs
        restarts[inherit] = first.num_restarts, second.num_restarts
    assert restarts[False][0] == restarts[False][1] == restarts[True][0] > restarts[True][1]


def test_it_begins_with_what_jobs_at_work_have_measured_so_far(tmp_path: Path) -> None:
    """The second one comes while the first trains."""
    write_traces(tmp_path)
    jobs = tuple(JobArrival(f"j-{n}", 110.0 * n, "cifar10", 1, 128) for n in range(2))
    known = {}
    for inherit in (False, True):
        experiment = Experiment(make_nodes({"": (2, 2)}), Options(inherit_models=inherit), tmp_path)
        first, second = experiment.run(Workload("w", jobs), "exact").jobs
        assert first.completed is not None
        assert second.started is not None
        assert first.completed > second.started
        known[inherit] = max(len(interval.nodes) for interval in second.history[:1])
    assert known == {False: 1, True: 2}


@pytest.mark.parametrize(
    ("name", "batch_size"), [("cifar10", None), ("cifar10", 1024), ("gpt-1.3b", None)]
)
def test_it_begins_with_gradients_of_the_beginning_or_foresees_the_latest(
    tmp_path: Path, name: str, batch_size: int | None
) -> None:
    write_traces(tmp_path)
    workload = Workload("w", (JobArrival("j", 0.0, name, 1, 128),))
    app = Experiment(make_nodes({"": (2, 2)}), traces=tmp_path).applications(workload)[name]
    before = app.new_model(batch_size)
    running = before.configure(before.shapes()[0], (2,))
    larger = replace(running, atomic_bsz=2 * running.atomic_bsz)
    times, goodputs = app.step_times(running), []
    for noise in (0.1, 100.0):
        before.observe(running, times, GradParams(1.0, noise))
        goodputs.append(before.goodput(larger))
    heirs = [app.new_model(batch_size) for _ in range(2)]
    for heir, latest in zip(heirs, (False, True), strict=True):
        heir.inherit([before], latest=latest)
    assert [heir.goodput(larger) for heir in heirs] == pytest.approx(goodputs)
    assert goodputs[0] < 0.9 * goodputs[1]
