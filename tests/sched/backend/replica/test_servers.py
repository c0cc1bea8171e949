"""Replicas of a job with servers for push and pull: each starts alone, and knows of the servers."""

from __future__ import annotations

from pathlib import Path

from pipollux_sched.backend.base import Launch, ReplicaProgram
from pipollux_sched.backend.replica.command import agent_command, agent_in_container
from pipollux_sched.backend.replica.variables import replica_variables
from tests.sched.backends import assignments

PROGRAM = ReplicaProgram(job="job", script=Path("/a.py"), servers=2)


def launch(num_servers: int) -> Launch:
    return Launch(
        job="job",
        attempt=1,
        assignments=assignments(["n1", "n1", "n2"]),
        num_first=2,
        scheduler_url="http://127.0.0.1:1",
        checkpoints="/checkpoints",
        num_servers=num_servers,
    )


def test_each_replica_starts_alone() -> None:
    for replica in range(3):
        command = agent_command(PROGRAM, launch(2), replica, endpoint="127.0.0.1:4000")
        assert "--nnodes=1" in command
        assert "--rdzv-conf=rank=0" in command
        assert "--rdzv-endpoint=127.0.0.1:0" in command
        assert "--nnodes=1" in agent_in_container(PROGRAM, launch(2), replica)
    together = agent_command(PROGRAM, launch(0), 1, endpoint="127.0.0.1:4000")
    assert {"--nnodes=2", "--rdzv-conf=rank=1", "--rdzv-endpoint=127.0.0.1:4000"} <= {*together}


def test_what_a_replica_is_told() -> None:
    first, joining = (replica_variables(PROGRAM, launch(2), replica) for replica in (1, 2))
    assert (first["PIPOLLUX_NUM_SERVERS"], first["PIPOLLUX_EXPECTED_REPLICAS"]) == ("2", "3")
    assert (first["PIPOLLUX_NODE"], joining["PIPOLLUX_NODE"]) == ("n1", "n2")
    assert joining["PIPOLLUX_NUM_SERVERS"] == "2"
    assert joining["PIPOLLUX_EXPECTED_REPLICAS"] == "3"  # the present size, for `num_replicas()`
    assert "PIPOLLUX_NUM_SERVERS" not in replica_variables(PROGRAM, launch(0), 0)


def test_a_launch_survives_the_store_and_earlier_versions_of_it() -> None:
    content = launch(2).to_json_object()
    assert Launch.from_json_object("job", 1, content) == launch(2)
    del content["num_servers"]
    assert Launch.from_json_object("job", 1, content) == launch(0)
