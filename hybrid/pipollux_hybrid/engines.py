"""Chooses the engine of a pipeline.

* Single-process pipeline: one process drives the devices of all stages through torchgpipe
  (:class:`~pipollux_hybrid.pipeline.engine.PipelineEngine`).
* Multi-process pipeline: K processes run a stage each, with a schedule of torch
  (:class:`~pipollux_hybrid.pipeline.process_engine.ProcessEngine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn

from pipollux_hybrid.checkpoint.rng_state import draw_alike
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.device_groups import in_use
from pipollux_hybrid.job.groups import carrier_of
from pipollux_hybrid.job.peers import check_peers, passing_on
from pipollux_hybrid.job.pipeline_spec import PipelineSchedule
from pipollux_hybrid.own_stage import keep_stage
from pipollux_hybrid.pipeline.engine import PipelineEngine
from pipollux_perfmodel.timing.params import SCHEDULES, ScheduleKind

if TYPE_CHECKING:
    from pipollux_hybrid.pipeline.process_engine import ProcessEngine

DEFAULT: ScheduleKind = "1f1b"
"""Schedule of a multi-process pipeline, unless the script names one."""
AUTO = "auto"
"""Value of ``schedule`` that chooses the fastest schedule by measurements."""
CHUNKS = 2
"""Default number of chunks of an interleaved stage."""


def choose_chunks(ctx: JobContext, schedule: str | None, chunks_per_stage: int | None) -> int:
    """Return the number V of chunks of layers per stage, 1 unless stages are interleaved.

    Raises:
        ConfigurationError: It is not an integer above 1, or the schedule has no chunks.
    """
    given = chunks_per_stage
    if given is not None and schedule not in ("interleaved", AUTO):
        raise ConfigurationError(
            f"chunks_per_stage={given!r} with schedule={schedule!r}: only schedule='interleaved' "
            "gives a stage several chunks of layers, and 'auto' may; set one of these, or omit "
            "chunks_per_stage"
        )
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 2):
        raise ConfigurationError(
            f"chunks_per_stage={given!r}: a whole number of at least 2 is needed; for one chunk "
            "per stage set schedule='1f1b'"
        )
    if schedule != "interleaved" or ctx.env.processes_per_replica == 1:
        return 1
    return given or CHUNKS


def choose_orders(
    ctx: JobContext, schedule: str | None, chunks_per_stage: int | None, num_stages: int
) -> tuple[PipelineSchedule, ...]:
    """Return the candidate schedules, the default one first.

    These are several for ``"auto"`` in a multi-process pipeline.

    Raises:
        ConfigurationError: See :func:`choose_chunks`; or the schedule is unknown, or the numbers of
            processes and stages differ.
    """
    kind = _choose_schedule(ctx, schedule, num_stages)
    chunks = choose_chunks(ctx, schedule, chunks_per_stage)
    if schedule != AUTO or ctx.env.processes_per_replica == 1:
        return (PipelineSchedule(kind, chunks),)
    several = PipelineSchedule("interleaved", chunks_per_stage or CHUNKS)
    return PipelineSchedule(DEFAULT), several, PipelineSchedule("gpipe")


def _choose_schedule(ctx: JobContext, schedule: str | None, num_stages: int) -> ScheduleKind:
    """Return the schedule of the stages; GPipe's in a single-process pipeline."""
    if schedule is not None and schedule not in (*SCHEDULES, AUTO):
        raise ConfigurationError(
            f"schedule={schedule!r}: {', '.join(map(repr, (*SCHEDULES, AUTO)))} are allowed, each "
            "with a process per stage, or None for one process that drives all stages"
        )
    processes = ctx.env.processes_per_replica
    if processes > 1 and num_stages != processes:
        raise ConfigurationError(
            f"num_stages={num_stages}: a replica of this job has {processes} processes "
            f"(PIPOLLUX_PROCESSES_PER_REPLICA), one for each stage; set num_stages={processes}"
        )
    if processes == 1 and num_stages > 1 and schedule is not None:
        raise ConfigurationError(
            f"schedule={schedule!r}: it runs each of the {num_stages} stages in its own process, "
            f"and a replica of this job has one process; call init_process_group(…, "
            f"processes_per_replica={num_stages}) and start the script with torchrun "
            f"--nproc-per-node={num_stages}, or a multiple of that"
        )
    if processes == 1:
        return "gpipe"
    return next((known for known in SCHEDULES if known == schedule), DEFAULT)


def make_engine(
    ctx: JobContext,
    module: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    checkpoint: str,
    schedule: ScheduleKind,
) -> tuple[PipelineEngine | ProcessEngine, frozenset[str]]:
    """Return the engine, and the names of the parameters and buffers in other processes.

    Args:
        ctx: The job's context.
        module: The layers; those of other processes are removed.
        optimizer: Over the module's parameters; it keeps those of this process.
        balance: Number of layers of each stage, or of each chunk.
        devices: One device per stage.
        checkpoint: Mode of activation checkpointing.
        schedule: Schedule of the stages.
    """
    if ctx.mesh is None:
        return PipelineEngine(module, balance, devices, checkpoint), frozenset()
    # Importing torch's schedules takes a second.
    from pipollux_hybrid.pipeline.process_engine import ProcessEngine

    draw_alike(ctx)
    mesh = ctx.mesh
    device = devices[ctx.env.stage]
    carrier = carrier_of(mesh.stages, device)
    engine = ProcessEngine(
        *(module, balance, device, checkpoint, schedule),
        *(mesh.stages, mesh.row, carrier, check_peers),
    )

    def connect() -> None:
        if in_use() is not None:  # in another job the host waits as long as it takes
            with passing_on():
                engine.connect()

    connect()
    ctx.rejoined += (lambda: engine.rejoin(mesh.stages, mesh.row), connect)
    return engine, keep_stage(module, optimizer, engine.stages, engine.index)


def refuse_plain_loop() -> NoReturn:
    """Refuse a forward with gradients in a multi-process pipeline.

    Raises:
        ConfigurationError: Always; the message has the alternative.
    """
    raise ConfigurationError(
        "the model was called with gradients enabled in a multi-process pipeline, whose forwards "
        "and backwards alternate: write loss = model.train_step(inputs, targets, loss_fn) instead "
        "of loss = loss_fn(model(inputs), targets) and loss.backward(); to evaluate, call the "
        "model under torch.no_grad()"
    )
