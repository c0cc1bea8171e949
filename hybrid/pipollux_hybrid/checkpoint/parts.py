"""A checkpoint that several processes write, each the layers of its stage.

Nothing is gathered: the processes of replica 0 write into one folder, beside each other. Its first
one makes the folder, and makes a checkpoint of it when all have written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job.context import JobContext

from . import storage as files
from .state import State

__all__ = ["save_in_parts"]


def save_in_parts(ctx: JobContext, root: Path, states: Mapping[str, State]) -> Path | None:
    """Write a new checkpoint; all processes of the job call it.

    Args:
        ctx: The job's context.
        root: The folder of checkpoints.
        states: What is saved.

    Returns:
        The checkpoint, on the process that leads.

    Raises:
        CheckpointError: It cannot be written; raised by the process that leads.
    """
    if not ctx.env.leads:
        _write_part(ctx, states)
        return None
    told = False
    try:
        with files.new_checkpoint(root) as aside:
            told = True
            _tell(ctx, {"folder": str(aside)})
            written, failures = {}, []
            try:
                written = files.write_states(aside, {n: s.save for n, s in states.items()})
            finally:  # the others wait, whatever happens here
                answers = _tell(ctx, {})
            for stage, answer in enumerate(answers[1 : ctx.env.processes_per_replica], start=1):
                written |= {name: (x[0], x[1]) for name, x in answer.get("written", {}).items()}
                failures += [f"stage {stage}: {answer['error']}"] if "error" in answer else []
            if failures:
                raise CheckpointError(
                    f"cannot write a checkpoint in {root}: {'; '.join(failures)}; earlier "
                    "checkpoints are untouched"
                )
            return files.commit(aside, written, ctx.env.generation)
    finally:
        if not told:
            _tell(ctx, {"folder": None})


def _write_part(ctx: JobContext, states: Mapping[str, State]) -> None:
    folder = _tell(ctx, {})[0]["folder"]
    if folder is None:
        return
    answer: dict[str, Any] = {}
    if ctx.env.rank == 0:
        parts = {
            files.part_name(name, ctx.env.stage): state.save
            for name, state in states.items()
            if state.in_parts
        }
        try:
            answer = {"written": files.write_states(Path(folder), parts)}
        except (OSError, files.StateError) as error:
            answer = {"error": str(error)}
    _tell(ctx, answer)


def _tell(ctx: JobContext, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange a few words among all processes."""
    return [json.loads(x) for x in ctx.control.gather_bytes(json.dumps(answer).encode())]
