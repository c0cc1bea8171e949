"""The supervisor of a real scheduler: what the allocator counts is told, streams end with it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipollux_sched.client.client import Client
from pipollux_sched.scheduler import Scheduler
from pipollux_sched.server.address import ServerAddress
from pipollux_sched.spec.cluster import ClusterSpec
from pipollux_sched.spec.job import JobSpec
from tests.sched.supervised import NODES, SCRIPT


@pytest.mark.exhaustive
def test_from_submission_to_the_last_event(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    listening = threading.Event()

    def listen() -> None:
        with Client.of(scheduler.state_dir) as client:
            for event in client.follow(0):
                heard.append(event)
                listening.set()

    with Scheduler(tmp_path / "state", ClusterSpec(nodes=NODES), interval=0.3) as scheduler:
        listener = threading.Thread(target=listen)
        listener.start()
        assert listening.wait(240)
        with Client.of(scheduler.state_dir) as client:
            client.submit(JobSpec(name="toy", script=SCRIPT, args=("--steps", "3")))
            assert scheduler.wait(lambda jobs: jobs["toy"].phase.ended, 240)
            lines = client.metrics().splitlines()
            shown = client.job("toy")
        all_events = scheduler.store.events()
    listener.join(240)
    assert not listener.is_alive()
    assert [event["id"] for event in heard][: len(all_events)] == [e["id"] for e in all_events]
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(figures["pipollux_policy_seconds_count"]) > 0
    assert float(figures["pipollux_decisions_total"]) == 1
    assert float(figures["pipollux_policy_failures_total"]) == 0
    assert float(figures['pipollux_jobs{phase="Complete"}']) == 1
    assert shown.phase == "Complete"
    assert shown.replicas == []


def test_it_answers_to_the_name_that_it_advertises(tmp_path: Path) -> None:
    url = "https://gpus.example.com"
    address = ServerAddress(advertise_url=f"{url}/", allowed_hosts=["other.example.com"])
    cluster = ClusterSpec(nodes=NODES)
    with Scheduler(tmp_path / "state", cluster, interval=60.0, address=address) as scheduler:
        assert scheduler.url == url
        info = scheduler.state_dir.read_server()
        assert info is not None
        assert (info.url, info.port, info.ca_file) == (
            url,
            httpx.URL(scheduler.listening_url).port,
            None,
        )
        with httpx.Client(base_url=scheduler.listening_url, trust_env=False, timeout=240) as client:
            answered = {
                host: client.get("/healthz", headers={"Host": host}).status_code
                for host in ("gpus.example.com", "other.example.com", "elsewhere.example.com")
            }
    assert answered == {
        "gpus.example.com": 200,
        "other.example.com": 200,
        "elsewhere.example.com": 400,
    }
