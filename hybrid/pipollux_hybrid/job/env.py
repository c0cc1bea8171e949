"""The environment that a scheduler or torchrun gives to a job.

Every variable is optional: a script started with ``python`` is one pipeline replica without a
scheduler. Under ``torchrun`` each process is a replica, or each group of K processes in a
multi-process pipeline.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipollux_hybrid.errors import ConfigurationError
from pipollux_protocol import environment as protocol
from pipollux_protocol.environment import Variable, Whole

RANK = Variable("RANK", Whole(0), "torchrun", "index of the process", "0")
WORLD_SIZE = Variable("WORLD_SIZE", Whole(1), "torchrun", "number of processes", "1")
LOCAL_RANK = Variable("LOCAL_RANK", Whole(0), "torchrun", "index on its node", "0")
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", Whole(1), "torchrun", "on its node", "all")
VARIABLES: dict[str, Variable[Any]] = {
    "num_nodes": protocol.NUM_NODES,
    "job_id": protocol.JOB_ID,
    "attempt": protocol.ATTEMPT,
    "checkpoint_dir": protocol.CHECKPOINT_DIR,
    "scheduler_url": protocol.SCHEDULER_URL,
    "token": protocol.TOKEN,
    "ca_file": protocol.CA_FILE,
    "num_stages": protocol.NUM_STAGES,
    "devices": protocol.DEVICES,
    "hints_interval": protocol.HINTS_INTERVAL,
    "heartbeat_interval": protocol.HEARTBEAT_INTERVAL,
    "checkpoint_interval": protocol.CHECKPOINT_INTERVAL,
    "checkpoint_background": protocol.CHECKPOINT_BACKGROUND,
    "progress": protocol.PROGRESS,
    "tensorboard_dir": protocol.TENSORBOARD_DIR,
    "trace_dir": protocol.TRACE_DIR,
    "timeout": protocol.TIMEOUT,
    "host_timeout": protocol.HOST_TIMEOUT,
    "frozen_timeout": protocol.FROZEN_TIMEOUT,
    "rendezvous": protocol.RENDEZVOUS,
    "replica": protocol.REPLICA,
    "elastic": protocol.ELASTIC,
    "elastic_nccl": protocol.ELASTIC_NCCL,
    "joins": protocol.JOINS,
    "address": protocol.ADDRESS,
    "check_replicas": protocol.CHECK_REPLICAS,
    "servers": protocol.SERVERS,
    "expected_replicas": protocol.EXPECTED_REPLICAS,
    "node": protocol.NODE,
    "network_level": protocol.NETWORK_LEVEL,
}
"""The variable of each field of :class:`JobEnvironment`, where it is set."""


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """The environment of a job's process.

    Example:
        >>> JobEnvironment.read({"RANK": "1", "WORLD_SIZE": "2"}).rank
        1
    """

    rank: int = 0
    """Index r of this pipeline replica (``RANK``, over the processes of a replica)."""
    num_replicas: int = 1
    """Number R of pipeline replicas (``WORLD_SIZE``, over the processes of a replica)."""
    local_rank: int = 0
    """Index of this replica on its node (``LOCAL_RANK``, over the processes of a replica), which
    selects its devices."""
    processes_per_replica: int = 1
    """Processes per replica (``PIPOLLUX_PROCESSES_PER_REPLICA``): 1 for a single-process pipeline,
    or one per stage."""
    stage: int = 0
    """Index of this process in its replica, and of the stage that it runs."""
    num_nodes: int = 1
    """Number of distinct nodes of the allocation (``PIPOLLUX_NUM_NODES``)."""
    network_level: int = 1
    """Level of the network at which these nodes meet (``PIPOLLUX_NETWORK_LEVEL``): 1 the lowest
    above the node, such as a rack."""
    job_id: str | None = None
    """Name of the job (``PIPOLLUX_JOB_ID``)."""
    attempt: int = 0
    """Number of this attempt of the job (``PIPOLLUX_ATTEMPT``); 0 without a scheduler."""
    checkpoint_dir: Path | None = None
    """Directory of checkpoints (``PIPOLLUX_CHECKPOINT_DIR``), on storage shared by all nodes."""
    scheduler_url: str | None = None
    """URL of the scheduler (``PIPOLLUX_SCHEDULER_URL``)."""
    token: str | None = None
    """Token of the job (``PIPOLLUX_TOKEN``)."""
    ca_file: Path | None = None
    """CA certificates for the scheduler (``PIPOLLUX_CA_FILE``); None: the defaults of httpx."""
    num_stages: int | None = None
    """Number K of stages the scheduler chose (``PIPOLLUX_NUM_STAGES``)."""
    devices: tuple[str, ...] = ()
    """One device per stage (``PIPOLLUX_DEVICES``, separated by commas)."""
    hints_interval: float = 30.0
    """Seconds between two fits of the performance model (``PIPOLLUX_HINTS_INTERVAL``)."""
    heartbeat_interval: float = 10.0
    """Seconds between two heartbeats (``PIPOLLUX_HEARTBEAT_INTERVAL``); 0: none."""
    checkpoint_interval: float = 60.0
    """Seconds between two periodic checkpoints (``PIPOLLUX_CHECKPOINT_INTERVAL``)."""
    checkpoint_background: bool = False
    """Whether a thread writes periodic checkpoints (``PIPOLLUX_CHECKPOINT_BACKGROUND``, 0 or 1)."""
    progress: bool = True
    """Whether to print progress without a scheduler (``PIPOLLUX_PROGRESS``, 0 or 1)."""
    tensorboard_dir: Path | None = None
    """Where scalars for TensorBoard are written (``PIPOLLUX_TENSORBOARD_DIR``)."""
    trace_dir: Path | None = None
    """Where time lines of steps are written (``PIPOLLUX_TRACE_DIR``)."""
    num_threads: int | None = None
    """Threads of a CPU replica (``OMP_NUM_THREADS``, the first of a list); None: torch's choice."""
    timeout: float | None = None
    """Seconds to wait for a slow replica (``PIPOLLUX_TIMEOUT``); None: the script's choice."""
    host_timeout: float = 60.0
    """Seconds after which a host that does not answer is lost (``PIPOLLUX_HOST_TIMEOUT``); 0: it is
    treated as slow."""
    frozen_timeout: float = 60.0
    """Seconds without a sign of life after which a process is lost with its replica
    (``PIPOLLUX_FROZEN_TIMEOUT``); 0: it is treated as slow. Between replicas it applies to elastic
    jobs without a scheduler; under a scheduler, among the processes of a replica."""
    rendezvous: Path | None = None
    """Folder in which later replicas find the job (``PIPOLLUX_RENDEZVOUS``)."""
    replica: int = 0
    """Id of this replica for the scheduler (``PIPOLLUX_REPLICA``); its rank may change."""
    elastic: bool = False
    """Whether the scheduler may resize the job while it trains (``PIPOLLUX_ELASTIC``, 0 or 1)."""
    elastic_nccl: bool = False
    """Whether replicas join and leave also where gradients are sent by NCCL
    (``PIPOLLUX_ELASTIC_NCCL``, 0 or 1)."""
    joins: bool = False
    """Whether this replica joins a job that trains (``PIPOLLUX_JOINS``, 0 or 1)."""
    address: str | None = None
    """Address of this host for the other replicas (``PIPOLLUX_ADDRESS``)."""
    check_replicas: int = 0
    """Optimizer steps between two comparisons of the replicas (``PIPOLLUX_CHECK_REPLICAS``)."""
    servers: tuple[str, ...] | None = None
    """Servers through which replicas push and pull (``PIPOLLUX_SERVERS``). Each replica is then a
    job of one replica for everything else."""
    expected_replicas: int = 1
    """Replicas that push and pull when this one is started (``PIPOLLUX_EXPECTED_REPLICAS``, else
    those that torchrun starts together)."""
    node: str | None = None
    """Node of this replica (``PIPOLLUX_NODE``); None: the host's name."""

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.num_replicas * self.processes_per_replica

    @property
    def world_rank(self) -> int:
        """Index of this process in the job; the processes of a replica are contiguous."""
        return self.rank * self.processes_per_replica + self.stage

    @property
    def leads(self) -> bool:
        """Whether this is the job's leader: the first process of replica 0."""
        return self.world_rank == 0

    @property
    def reports(self) -> bool:
        """Whether this process reports to the scheduler for the whole job. Under a scheduler,
        replica 0 does it for all that push and pull.
        """
        return self.leads and (self.servers is None or self.attempt == 0 or self.replica == 0)

    @property
    def under_torchrun(self) -> bool:
        """Whether torchrun has given an address of peers."""
        return "MASTER_ADDR" in os.environ and "RANK" in os.environ

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        processes_per_replica: int | None = None,
    ) -> JobEnvironment:
        """Read the environment, by default ``os.environ``; a scheduler's number of processes per
        replica takes precedence over the script's. A ConfigurationError names an invalid variable.
        """
        env = os.environ if environ is None else environ
        try:
            return cls._read(env, processes_per_replica)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    @classmethod
    def _read(cls, env: Mapping[str, str], asked_for: int | None) -> JobEnvironment:
        world_size, world_rank = WORLD_SIZE.read(env) or 1, RANK.read(env) or 0
        if world_rank >= world_size:
            raise ConfigurationError(
                f"RANK is {world_rank} but WORLD_SIZE is {world_size}: ranks run from 0 to "
                f"{world_size - 1}; start the script with torchrun, which sets both"
            )
        local_size = LOCAL_WORLD_SIZE.read(env) or world_size
        processes = _processes(env, asked_for)
        if local_size % processes:
            raise ConfigurationError(
                f"environment variable PIPOLLUX_PROCESSES_PER_REPLICA={processes}: torchrun starts "
                f"{local_size} processes on this node, and all of a replica have to be on one "
                f"node; give it --nproc-per-node={processes}, or a multiple of that"
            )
        num_replicas, (rank, stage) = world_size // processes, divmod(world_rank, processes)
        # Without a scheduler the number of nodes follows from torchrun's local world size.
        nodes = -(-world_size // local_size)
        given = {name: variable.read(env) for name, variable in VARIABLES.items()}
        _check_certificates(given["ca_file"])
        own = {name: value for name, value in given.items() if value is not None}
        fields = {
            "rank": rank,
            "num_replicas": num_replicas,
            "local_rank": (LOCAL_RANK.read(env) or 0) // processes,
            "stage": stage,
            "num_nodes": nodes,
            "num_threads": _threads(env),
            "replica": rank,
            **own,
            "processes_per_replica": processes,
        }
        return cls(**(_apart(fields) if "servers" in own else fields))


def _apart(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the environment of a replica that meets the others at servers only."""
    apart = {**fields, "rank": 0, "num_replicas": 1, "num_nodes": 1}
    apart.setdefault("expected_replicas", fields["num_replicas"])
    folder = fields.get("checkpoint_dir")
    if folder is not None:  # each has its own inner optimizer
        apart["checkpoint_dir"] = folder / f"replica-{fields['replica']}"
    if fields["replica"] > 0:
        apart["progress"] = False
    return apart


def _processes(env: Mapping[str, str], asked_for: int | None) -> int:
    default = 1 if asked_for is None else asked_for
    if isinstance(default, bool) or not isinstance(default, int) or default < 1:
        raise ConfigurationError(
            f"processes_per_replica={asked_for!r}: a whole number of at least 1 is needed"
        )
    return protocol.PROCESSES_PER_REPLICA.read(env) or default


def _threads(env: Mapping[str, str]) -> int | None:
    """Read OpenMP's variable: a number, or a list with one for each level of nesting."""
    text = env.get("OMP_NUM_THREADS", "")
    if not text.strip():
        return None
    levels = [level.strip() for level in text.split(",")]
    if not all(level.isascii() and level.isdecimal() and int(level) > 0 for level in levels):
        raise ConfigurationError(
            f"environment variable OMP_NUM_THREADS={text!r}: a whole number of at least 1, or "
            "several separated by commas, of which the first is used, is needed"
        )
    return int(levels[0])


def _check_certificates(path: Path | None) -> None:
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # the base class of ssl.SSLError
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "it holds none"
        raise ConfigurationError(
            f"environment variable {protocol.CA_FILE.name}={str(path)!r}: a file of certificates "
            f"in PEM format is needed, on storage that all nodes see ({reason})"
        ) from None
