"""Stores as versions 1, 2 and 3 wrote them, before there was alembic: their tables, in SQL."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

_REST = """
CREATE TABLE events (id INTEGER NOT NULL, time DOUBLE NOT NULL, type VARCHAR NOT NULL, job VARCHAR,
    generation INTEGER, data JSON NOT NULL, PRIMARY KEY (id));
CREATE INDEX events_by_job ON events (job, type);
CREATE TABLE meta ("key" VARCHAR NOT NULL, value VARCHAR NOT NULL, PRIMARY KEY ("key"));
CREATE TABLE hints (job VARCHAR NOT NULL, generation INTEGER NOT NULL, time DOUBLE NOT NULL,
    hints JSON NOT NULL, PRIMARY KEY (job), FOREIGN KEY(job) REFERENCES jobs (name));
CREATE TABLE points (event INTEGER NOT NULL, job VARCHAR NOT NULL, time DOUBLE NOT NULL,
    step INTEGER NOT NULL, epoch INTEGER NOT NULL, samples INTEGER NOT NULL, loss DOUBLE,
    batch_size INTEGER NOT NULL, atomic_bsz INTEGER NOT NULL, accum_steps INTEGER NOT NULL,
    num_replicas INTEGER NOT NULL, step_time DOUBLE NOT NULL, predicted_step_time DOUBLE,
    goodput DOUBLE, efficiency DOUBLE, num_epochs INTEGER, PRIMARY KEY (event),
    FOREIGN KEY(event) REFERENCES events (id));
CREATE INDEX points_by_job ON points (job, event);
"""

_JOBS = """
CREATE TABLE jobs (id INTEGER NOT NULL, name VARCHAR NOT NULL, spec JSON NOT NULL,
    token VARCHAR NOT NULL, submitted_at DOUBLE NOT NULL, ended_at DOUBLE, {deadline}
    phase VARCHAR NOT NULL, conditions JSON NOT NULL, generation INTEGER NOT NULL,
    allocation JSON NOT NULL, {stages} launched JSON NOT NULL, {launched}
    settled BOOLEAN NOT NULL, intent VARCHAR, {held} failures INTEGER NOT NULL,
    max_restarts INTEGER NOT NULL, PRIMARY KEY (id), UNIQUE (name));
"""

_GENERATIONS = """
CREATE TABLE generations (id INTEGER NOT NULL, job VARCHAR NOT NULL, generation INTEGER NOT NULL,
    nodes JSON NOT NULL, {stages} launched_at DOUBLE NOT NULL, started_at DOUBLE, port INTEGER,
    first_step_at DOUBLE, first_step INTEGER, restart_seconds DOUBLE, stopping_at DOUBLE,
    ended_at DOUBLE, outcome VARCHAR, intent VARCHAR, PRIMARY KEY (id), UNIQUE (job, generation),
    FOREIGN KEY(job) REFERENCES jobs (name));
"""

_NODES = """
CREATE TABLE nodes (name VARCHAR NOT NULL, slots INTEGER NOT NULL, kind VARCHAR NOT NULL,
    spec JSON NOT NULL, {condition} PRIMARY KEY (name));
"""


def tables(version: int) -> str:
    """Return the SQL that made the tables of a version."""
    staged, conditions = version >= 2, version >= 3
    jobs = _JOBS.format(
        deadline="deadline_at DOUBLE," if conditions else "",
        stages="num_stages INTEGER," if staged else "",
        launched="launched_stages INTEGER," if staged else "",
        held="held BOOLEAN NOT NULL," if conditions else "",
    )
    generations = _GENERATIONS.format(stages="num_stages INTEGER NOT NULL," if staged else "")
    condition = "condition VARCHAR NOT NULL, reason VARCHAR NOT NULL, since DOUBLE NOT NULL,"
    return jobs + generations + _REST + _NODES.format(condition=condition if conditions else "")


def make_old_store(path: Path, version: int) -> None:
    """Make a store with two jobs that run on nodes a and b since 1000, of 4 stages and of one."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(tables(version))
        _insert(connection, "meta", key="schema_version", value=str(version))
        _insert(connection, "meta", key="created_at", value="1000.0")
        for name, stages in (("wide", 4), ("toy", None)):
            _insert_job(connection, version, name, stages)
        node = {"name": "a", "slots": 8, "kind": "cpu", "spec": "{}"}
        known = {"condition": "draining", "reason": "disk", "since": 5.0} if version >= 3 else {}
        _insert(connection, "nodes", **node, **known)


def _insert_job(
    connection: sqlite3.Connection, version: int, name: str, stages: int | None
) -> None:
    nodes = json.dumps(["a", "b"])
    spec = {"name": name} if stages is None else {"name": name, "num_stages": stages}
    condition = {"type": "Queued", "status": True, "reason": "Starting", "message": "on a, b"}
    job = {"name": name, "spec": json.dumps(spec), "token": "secret", "submitted_at": 1000.0}
    state = {"phase": "Queued", "conditions": json.dumps([{**condition, "time": 1000.0}])}
    place = {"generation": 1, "allocation": nodes, "launched": nodes, "settled": 0}
    later = {"held": 0, "deadline_at": 9000.0} if version >= 3 else {}
    _insert(connection, "jobs", **job, **state, **place, **later, failures=0, max_restarts=1)
    launch = {"job": name, "generation": 1, "nodes": nodes, "launched_at": 1000.0}
    staged = {"num_stages": stages or 1} if version >= 2 else {}
    _insert(connection, "generations", **launch, **staged)
    _insert(connection, "hints", job=name, generation=1, time=1001.0, hints='{"numStages": 1}')
    event = {"time": 1001.0, "type": "progress", "job": name, "generation": 1, "data": "{}"}
    row = _insert(connection, "events", **event)
    point = {"event": row, "job": name, "time": 1001.0, "step": 1, "epoch": 0, "samples": 8}
    size = {"batch_size": 8, "atomic_bsz": 8, "accum_steps": 0, "num_replicas": 1}
    _insert(connection, "points", **point, **size, step_time=0.1)


def _insert(connection: sqlite3.Connection, table: str, **values: object) -> int | None:
    names, places = ", ".join(values), ", ".join("?" * len(values))
    statement = f"INSERT INTO {table} ({names}) VALUES ({places})"  # noqa: S608  # names are ours
    return connection.execute(statement, list(values.values())).lastrowid
