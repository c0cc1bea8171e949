"""The devices of slots in answers and in tables: their use, by job, and their problems."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipollux_sched.cli.devices import device_table, spell_use
from pipollux_sched.cli.nodes import node_table
from pipollux_sched.cli.top.table import JOB_COLUMNS, job_row, node_row
from pipollux_sched.store import JobQuery, Store
from pipollux_sched.store.devices import FRESH
from pipollux_sched.views.cluster import cluster_view, list_nodes
from pipollux_sched.views.devices import devices_of_job
from pipollux_sched.views.models import ClusterView
from tests.sched.store.stores import Clock, serve_nodes

GIB = 2**30


def device(slot: int, job: str | None, **more: Any) -> dict[str, Any]:
    known = {"index": slot, "name": "NVIDIA H200", "problem": "", "job": job, "slot": slot}
    use = {"utilization": None, "memory_used": None, "memory_total": None}
    return {"id": f"GPU-{slot}abcdef0-1", **known, **use, **more}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store(tmp_path / "store.db", create=True, clock=clock) as store:
        serve_nodes(store, a=3, b=1)
        store.submit("toy", {"name": "toy", "script": "x"}, "token", 0)
        store.devices.keep(
            {
                "a": [
                    device(0, "toy", utilization=0.5, memory_used=10 * GIB, memory_total=80 * GIB),
                    device(1, "toy", memory_used=30 * GIB, memory_total=80 * GIB),
                    device(2, None, problem="it is lost"),
                ],
                "b": [device(0, "toy")],
            }
        )
        yield store


def view_of(store: Store) -> ClusterView:
    return cluster_view(store, JobQuery(limit=10), 0)


def printed(what: object) -> str:
    console = Console(width=200, file=StringIO())
    with console.capture() as text:
        console.print(what)
    return " ".join(text.get().split())


def test_the_use_of_a_job_is_that_of_all_its_devices(store: Store) -> None:
    view = view_of(store)
    (job,) = view.jobs
    assert job.device_use is not None
    assert job.device_use.model_dump() == {
        "num_devices": 3,
        "utilization": 0.5,
        "memory_used": 40 * GIB,
        "memory_total": 160 * GIB,
    }
    assert [one.node for one in devices_of_job(store, "toy")] == ["a", "a", "b"]
    cells = dict(zip((column.title for column in JOB_COLUMNS), job_row(job, 0.0), strict=True))
    assert (str(cells["GPU"]), str(cells["GPU memory"])) == ("50 %", "40 of 160 GiB")
    assert spell_use(None) == ("–", "–")


def test_problems_are_shown_with_their_devices(store: Store) -> None:
    a, b = list_nodes(store)
    assert (a.full_reason, b.full_reason) == ("GPU 2 (GPU-2abcdef0): it is lost", "")
    assert "GPU 2 (GPU-2abcdef0): it is lost" in printed(node_table([a, b]))
    assert str(node_row(a, [])[-1]) == a.full_reason
    table = printed(device_table(a.devices))
    assert "2 GPU 2 (GPU-2abcdef0) NVIDIA H200 – – – it is lost" in table
    assert "0 GPU 0 (GPU-0abcdef0) NVIDIA H200 50 % 10 of 80 GiB toy –" in table
    assert device_table([]) is None


def test_use_that_nobody_reads_any_more_is_not_shown(store: Store, clock: Clock) -> None:
    clock.now += FRESH + 1
    (job,) = view_of(store).jobs
    assert job.device_use is None
    assert view_of(store).nodes["a"].full_reason == "GPU 2 (GPU-2abcdef0): it is lost"
