"""Requests of the replicas and joining replicas of many jobs during elastic resizes.

Run by `growth.py`. They act like `pipollux_hybrid.resize`: replica 0 reports that the job can be
resized; a joining replica waits to join; when all know the pending membership, replica 0 announces
a rendezvous, and when all have met there they train together, and report so at once. What they do
among themselves takes no time here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replica_load import Connection, Job, Load, summary  # same folder

LOOK = 0.2
"""Seconds between two checks for started joining replicas."""


@dataclass
class Life:
    """What the replicas of a job know of each other."""

    replicas: list[int]
    number: int = 1
    """Of the training membership."""
    store: int = 0
    """The membership for which replica 0 has announced a rendezvous."""
    formed: set[int] = field(default_factory=set)
    """Replicas that are ready for the next membership."""
    entered: bool = False
    """Whether the present membership came from a resize."""
    told: bool = False
    """Whether the scheduler has acknowledged the resize."""


class ElasticLoad(Load):
    """The replicas of some jobs, and their joining replicas.

    `plan` is that of `Load`, with `started`, the file in which the engine records its starts, and
    `start_seconds`, the duration of a start.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self._lives = {job.name: Life([*range(job.replicas)]) for job in self.jobs}
        self._woken: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self.started: list[float] = []
        """When joining replicas were started."""
        self.changed: list[float] = []
        """When the scheduler received reports of completed resizes."""

    async def live(self) -> None:
        """Act as all replicas of all jobs for a time, including joining ones."""
        joining = asyncio.ensure_future(self._be_joining())
        await super().live()
        await joining

    async def _be_joining(self) -> None:
        jobs = {job.name: job for job in self.jobs}
        beats = []
        with Path(self._plan["started"]).open() as file:
            file.seek(0, 2)
            while time.monotonic() < self._end:
                for line in iter(file.readline, ""):
                    name, attempt, replica = line.split()
                    if int(attempt) == jobs[name].attempt:  # else it was moved
                        self.started.append(time.monotonic())
                        beats.append(asyncio.ensure_future(self._join(jobs[name], int(replica))))
                await asyncio.sleep(LOOK)
        await asyncio.gather(*beats)

    async def _join(self, job: Job, replica: int) -> None:
        await asyncio.sleep(self._plan["start_seconds"] * self._chance.uniform(0.8, 1.2))
        await self._beat(job, replica, within=0.0)

    async def _until(self, job: Job, replica: int, due: float) -> None:
        """Wait until a heartbeat is due, or must be sent at once."""
        woken = self._woken[job.name, replica]
        with suppress(TimeoutError):  # the heartbeat is due
            await asyncio.wait_for(woken.wait(), max(due - time.monotonic(), 0.0))
        woken.clear()

    async def _send_heartbeat(
        self, connection: Connection, job: Job, replica: int, due: float
    ) -> Any:
        life = self._lives[job.name]
        told = self._says(life, replica)
        body = {
            "attempt": job.attempt,
            "replica": replica,
            "step": int(2 * due),
            "elastic": told,
        }
        path = f"/jobs/{job.name}/heartbeats"
        answer = await self._send("heartbeat", connection, "POST", path, body, due)
        if answer is not None:
            if life.entered and not life.told and told.get("membership") == life.number:
                life.told = True
                self.changed.append(time.monotonic())
            self._hear(job, life, replica, answer)
        return answer

    def _says(self, life: Life, replica: int) -> dict[str, Any]:
        place = {"epoch": 3, "loop": 1}
        if replica not in life.replicas:
            return {"membership": 0, "waiting_to_join": True, **place}
        told: dict[str, Any] = {"membership": life.number}
        if life.entered:
            told |= {"replicas": life.replicas, "step": 100, "seconds": 0.1}
        if replica == life.replicas[0]:
            told |= {**place, "balance": [1], "cannot": None, "schedule": "gpipe"}
            if life.store:
                told["store"] = {"number": life.store, "host": "127.0.0.1", "port": 9}
        return told

    def _hear(self, job: Job, life: Life, replica: int, answer: dict[str, Any]) -> None:
        proposal, store = answer.get("proposal"), answer.get("store")
        if not proposal or proposal["number"] <= life.number:
            return
        number, members = proposal["number"], [int(one) for one in proposal["replicas"]]
        if replica == members[0] and life.store != number:
            life.store = number
            self._woken[job.name, replica].set()
        if replica == members[0] or (store and store["number"] == number):
            life.formed.add(replica)
        if life.formed >= set(members):
            life.number, life.replicas = number, members
            life.formed, life.entered, life.told = set(), True, False
            for one in members:
                self._woken[job.name, one].set()


def results(load: ElasticLoad) -> dict[str, Any]:
    """Return what was measured, as JSON can hold it."""
    begin = min(load.started, default=0.0)
    changes = {
        "started": [at - begin for at in load.started],
        "changed": [at - begin for at in load.changed],
    }
    return {**summary(load), **changes}


async def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Carry out a plan."""
    load = ElasticLoad(plan)
    await load.live()
    return results(load)


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
