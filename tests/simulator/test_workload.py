"""Workloads read, written and drawn; failures and preemptions of nodes."""

from __future__ import annotations

import collections
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipollux_simulator import (
    FAILURES,
    SPOT,
    JobArrival,
    NodeEvent,
    Outages,
    generate,
    merge_events,
    outages,
    read_workload,
    write_workload,
)
from pipollux_simulator.workload.generate import CATEGORIES, HOURLY, Request
from tests.extent import examples

HEADER = "name,time,application,num_replicas,batch_size\n"
POLLUX = ("cifar10", "ncf", "deepspeech2", "bert", "yolov3", "imagenet")
PIPELINES = ("gpt-1.3b", "gpt-2.7b", "gpt-6.7b", "gpt-13b")


def _request(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(1, 5)), 64


REQUESTS: dict[str, Request] = dict.fromkeys((*POLLUX, *PIPELINES), _request)


def _file(tmp_path: Path, text: str, name: str = "workload.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_workload_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = _file(tmp_path, HEADER + "b,110,deepspeech2,6,320\na,107.5,cifar10,6,2048\n\n")
    first, second = read_workload(path)
    assert first == JobArrival("a", 107.5, "cifar10", 6, 2048)
    assert second == JobArrival("b", 110.0, "deepspeech2", 6, 320)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,time,application,num_replicas\n", "row 1: there is no column batch_size"),
        ("", "row 1: there is no column name"),
        (HEADER + "a,0,x,1,2\nb,soon,x,1,2\n", "row 3, column time: 'soon' must be seconds"),
        (HEADER + "a,-1,x,1,2\n", "row 2, column time: -1.0 must be finite seconds"),
        (HEADER + "a,nan,x,1,2\n", "row 2, column time: nan must be finite seconds"),
        (HEADER + "a,0,x,0,2\n", "row 2, column num_replicas: 0 must be at least 1"),
        (HEADER + "a,0,x,1.5,2\n", "row 2, column num_replicas: '1.5' must be a whole number"),
        (HEADER + "a,0,x,1,\n", "row 2, column batch_size: '' must be a whole number"),
        (HEADER + "a,0,x,1\n", "row 2, column batch_size: nothing is there"),
        (HEADER + "a,0,,1,2\n", "row 2, column application: '' must not be empty"),
        (HEADER + "a,0,x,1,2\na,1,x,1,2\n", "row 3, column name: 'a' is the name of row 2"),
    ],
)
def test_a_wrong_file_is_refused_by_row_and_column(tmp_path: Path, text: str, message: str) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ValueError, match=message) as error:
        read_workload(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a CSV file in UTF-8"):
        read_workload(path)


arrivals = st.builds(
    JobArrival,
    name=st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1).filter(
        lambda text: text == text.strip() and not text.startswith("\ufeff")
    ),
    time=st.floats(0, 1e6),
    application=st.sampled_from(POLLUX),
    num_replicas=st.integers(1, 64),
    batch_size=st.integers(1, 2**20),
)


@examples(100)
@given(st.lists(arrivals, unique_by=lambda job: job.name))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[JobArrival]
) -> None:
    path = tmp_path_factory.mktemp("workload") / "workload.csv"
    write_workload(path, jobs)
    assert list(read_workload(path)) == sorted(jobs, key=lambda job: job.time)


@pytest.mark.parametrize("mix", ["pollux", "pipelines", "mixed"])
def test_the_same_seed_draws_the_same_workload(mix: str) -> None:
    def draw(seed: int) -> tuple[JobArrival, ...]:
        return generate(160, 8, seed, mix, REQUESTS)  # type: ignore[arg-type]  # mypy cannot see that the parameters are Mix

    assert draw(1) == draw(1) != draw(2)
    jobs = draw(1)
    assert len(jobs) == 160 == len({job.name for job in jobs})
    assert [job.time for job in jobs] == sorted(job.time for job in jobs)
    assert jobs[0].time >= 0
    assert jobs[-1].time < 8 * 3600
    names = {"pollux": POLLUX, "pipelines": PIPELINES, "mixed": (*POLLUX, *PIPELINES)}[mix]
    assert {job.application for job in jobs} <= set(names)


def test_the_mapping_of_requests_has_no_order() -> None:
    turned = dict(reversed(REQUESTS.items()))
    assert generate(50, 8, 3, "mixed", REQUESTS) == generate(50, 8, 3, "mixed", turned)


def test_shares_are_those_of_the_categories() -> None:
    count = 20_000
    jobs = generate(count, 24, 0, "pollux", REQUESTS)
    counts = collections.Counter(job.application for job in jobs)
    total = sum(category.share for category in CATEGORIES)
    for category in CATEGORIES:
        names = category.applications["pollux"]
        expected = category.share / total
        sigma = math.sqrt(expected * (1 - expected) / count)
        assert sum(counts[name] for name in names) / count == pytest.approx(expected, abs=5 * sigma)
        for name in names:
            assert counts[name] / count == pytest.approx(expected / len(names), abs=5 * sigma)


def test_arrivals_follow_the_hours_of_the_day() -> None:
    count = 20_000
    jobs = generate(count, 8, 0, "pollux", REQUESTS, start_hour=1.5)
    hours = collections.Counter(int(job.time / 3600 + 1.5) for job in jobs)
    weights = {hour: HOURLY[hour] * (0.5 if hour in (1, 9) else 1.0) for hour in range(1, 10)}
    total = sum(weights.values())
    assert set(hours) == set(weights)
    for hour, weight in weights.items():
        assert hours[hour] / count == pytest.approx(weight / total, abs=0.015)


def test_load_brings_more_jobs_in_the_same_time() -> None:
    jobs = generate(100, 4, 0, "pollux", REQUESTS, load=2.0)
    assert len(jobs) == 200
    assert max(job.time for job in jobs) < 4 * 3600


def test_applications_that_are_not_there_do_not_come() -> None:
    requests = {name: REQUESTS[name] for name in ("ncf", "gpt-6.7b")}
    jobs = generate(300, 8, 0, "mixed", requests)
    assert {job.application for job in jobs} == {"ncf", "gpt-6.7b"}
    # 0.746 against 0.048 of the jobs.
    assert sum(job.application == "ncf" for job in jobs) > 250


def _philly(tmp_path: Path) -> Path:
    rows = ["timestamp,duration,num_gpus,gpu_time,cluster"]
    rows += [f"2017-10-09 03:{minute:02}:05,600,1,600,x" for minute in range(30)]
    rows += ["2017-10-09 04:00:00,59,1,59,x", "2017-10-09 04:00:00,9e6,8,3600000,x"]
    rows += ["2017-10-10 09:59:59,9000,8,72000,x", "2017-10-10 10:00:00,9000,8,72000,x"]
    return _file(tmp_path, "\n".join(rows) + "\n", "philly.csv")


def test_a_philly_trace_gives_hours_and_categories(tmp_path: Path) -> None:
    path = _philly(tmp_path)
    jobs = generate(31, 8, 5, "pollux", REQUESTS, philly=path)
    assert jobs == generate(31, 8, 5, "pollux", REQUESTS, philly=path)
    # All that are long and small enough and come from 2 to 10 o'clock, each once.
    assert [job.time for job in jobs[:30]] == [3600.0 + 60 * minute + 5 for minute in range(30)]
    assert jobs[30].time == 8 * 3600 - 1
    assert jobs[30].application == "yolov3"
    assert {job.application for job in jobs[:30]} == {"cifar10", "ncf"}
    assert len(generate(31, 8, 5, "pollux", REQUESTS, load=2, philly=path)) == 62


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timestamp,duration\n", "row 1: there is no column gpu_time"),
        ("timestamp,duration,gpu_time\n2017,1e9,long\n", "row 2, column gpu_time: 'long' must be"),
        ("timestamp,duration,gpu_time\nnow,99,99\n", "row 2, column timestamp: 'now' must be"),
        ("timestamp,duration,gpu_time\n", "has no job of a minute or more"),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(1, 8, 0, "pollux", REQUESTS, philly=_file(tmp_path, text))


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_jobs: 0 must be at least 1"):
        generate(0, 8, 0, "pollux", REQUESTS)
    with pytest.raises(ValueError, match="hours: 0 must be a finite number > 0"):
        generate(1, 0, 0, "pollux", REQUESTS)
    with pytest.raises(ValueError, match="load: nan must be a finite number > 0"):
        generate(1, 8, 0, "pollux", REQUESTS, load=math.nan)
    with pytest.raises(ValueError, match="start_hour: 24 must be from 0 to below 24"):
        generate(1, 8, 0, "pollux", REQUESTS, start_hour=24)
    with pytest.raises(ValueError, match="mix: 'gpt' must be one of pollux, pipelines, mixed"):
        generate(1, 8, 0, "gpt", REQUESTS)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match=r"no application of the mix 'pollux'; give .* cifar10"):
        generate(1, 8, 0, "pollux", {"gpt-13b": _request})
    with pytest.raises(ValueError, match="hours: 25 must be at most 24 with a Philly trace"):
        generate(1, 25, 0, "pollux", REQUESTS, philly=_philly(tmp_path))
    with pytest.raises(ValueError, match="no job of the mix arrives in 1 hours from hour 20"):
        generate(1, 1, 0, "pollux", REQUESTS, start_hour=20, philly=_philly(tmp_path))


NODES = [f"node-{index}" for index in range(16)]
STORM = Outages(mean_uptime=1000.0, mean_downtime=300.0, notice=50.0, least_downtime=60.0)


def test_outages_are_the_same_for_a_seed_and_apart_by_node() -> None:
    events = outages(NODES, 86400.0, SPOT, seed=4)
    assert events == outages(NODES[::-1], 86400.0, SPOT, seed=4)
    assert events != outages(NODES, 86400.0, SPOT, seed=5)
    few = outages(NODES[:3], 86400.0, SPOT, seed=4)
    assert few == [event for event in events if event.node in NODES[:3]]
    assert events == sorted(events)
    assert all(event.time < 86400 for event in events)
    longer = outages(NODES, 2 * 86400.0, SPOT, seed=4)
    assert longer[: len(events)] == events
    assert outages(NODES, 0.0, SPOT, seed=4) == []


def test_a_spot_node_drains_goes_and_comes_back() -> None:
    events = outages(["n"], 1e6, STORM, seed=0)
    assert [event.kind for event in events[:7]] == [*("drain", "lost", "back") * 2, "drain"]
    for drain, lost, back in zip(*(events[start::3] for start in range(3)), strict=False):
        assert lost.time == drain.time + 50.0
        assert back.time >= lost.time + 60.0


def test_times_are_exponential_with_the_stated_means() -> None:
    outage = Outages(mean_uptime=1000.0, mean_downtime=300.0, least_downtime=60.0)
    events = outages(["n"], 4e6, outage, seed=0)
    assert {event.kind for event in events} == {"lost", "back"}
    times = np.array([0.0, *(event.time for event in events)])
    gaps = np.diff(times)
    up, down = gaps[0::2], gaps[1::2]
    error = 5 / math.sqrt(len(up))
    assert up.mean() == pytest.approx(1000.0, rel=error)
    assert up.std() == pytest.approx(1000.0, rel=2 * error)
    assert down.mean() == pytest.approx(300.0, rel=error)
    assert down.min() >= 60.0


def test_a_node_tells_one_story_whatever_happens_to_it() -> None:
    failures = Outages(mean_uptime=700.0, mean_downtime=400.0)
    streams = [outages(NODES, 2e4, outage, seed=2) for outage in (STORM, failures)]
    merged = merge_events(*streams)
    assert merged == sorted(merged, key=lambda event: event.time)
    gone: dict[str, list[bool]] = {}
    for event in merged:
        state = gone.setdefault(event.node, [False])
        # What is there drains or goes, and what is gone comes back; never anything else.
        assert state[-1] == (event.kind == "back")
        state.append(event.kind == "lost")
    for node in NODES:
        for moment in np.linspace(0.0, 2e4, 57):
            away = [_is_away(stream, node, moment) for stream in streams]
            assert _is_away(merged, node, moment) == any(away)


def _is_away(events: list[NodeEvent], node: str, moment: float) -> bool:
    past = [e.kind for e in events if e.node == node and e.time <= moment and e.kind != "drain"]
    return bool(past) and past[-1] == "lost"


def test_a_node_that_comes_back_while_it_is_called_in_drains_again() -> None:
    failure = [NodeEvent(5.0, "n", "lost"), NodeEvent(9.0, "n", "back")]
    spot = [NodeEvent(4.0, "n", "drain"), NodeEvent(12.0, "n", "lost")]
    assert [(event.time, event.kind) for event in merge_events(failure, spot)] == [
        (4.0, "drain"),
        (5.0, "lost"),
        (9.0, "back"),
        (9.0, "drain"),
        (12.0, "lost"),
    ]


def test_failures_are_rare() -> None:
    assert len(outages(NODES, 86400.0, FAILURES, seed=0)) < 6
    hundred = [f"host-{index}" for index in range(124)]
    two_months = outages(hundred, 60 * 86400.0, FAILURES, seed=0)
    lost = sum(event.kind == "lost" for event in two_months)
    assert lost == pytest.approx(100, abs=30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "mean_uptime: 0.0 must be finite seconds > 0"),
        ((1.0, math.inf), "mean_downtime: inf must be finite seconds > 0"),
        ((1.0, 1.0, -1.0), "notice: -1.0 must be finite seconds >= 0"),
        ((1.0, 1.0, 0.0, 2.0), "least_downtime: 2.0 must be between 0 and mean_downtime = 1.0"),
    ],
)
def test_wrong_outages_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outages(*arguments)


def test_wrong_nodes_and_durations_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes: 'a' comes twice"):
        outages(["a", "b", "a"], 1.0, SPOT, seed=0)
    with pytest.raises(ValueError, match=r"duration: -1\.0 must be finite seconds >= 0"):
        outages(["a"], -1.0, SPOT, seed=0)
