"""A checkpoint that several processes write, each the layers of its stage.

They write into one folder, in parallel; the first one creates it, and commits it at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job.context import JobContext

from . import storage as files
from .async_save import AsyncSaver
from .state import State

__all__ = ["check_answers", "save_in_parts", "tell"]


def save_in_parts(
    ctx: JobContext, root: Path, states: Mapping[str, State], saver: AsyncSaver
) -> Path | None:
    """Write a new checkpoint, returned on the leader; all processes of the job call it. The leader
    raises a CheckpointError if it cannot be written.
    """
    if not ctx.env.leads:
        _write_part(ctx, states, saver)
        return None
    sent = False
    try:
        saver.wait()
        with files.new_checkpoint(root) as aside:
            sent = True
            tell(ctx, {"folder": str(aside)})
            try:
                written = files.write_states(aside, {n: s.save for n, s in states.items()})
            finally:  # the others wait for it, also after an error
                answers = tell(ctx, {})[1 : ctx.env.processes_per_replica]
            return files.commit(aside, written | check_answers(root, answers), ctx.env.attempt)
    finally:
        if not sent:
            tell(ctx, {"folder": None})


def _write_part(ctx: JobContext, states: Mapping[str, State], saver: AsyncSaver) -> None:
    folder = tell(ctx, {})[0]["folder"]
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
            saver.wait()
            answer = {"written": files.write_states(Path(folder), parts)}
        except (CheckpointError, OSError, files.StateError) as error:
            answer = {"error": str(error)}
    tell(ctx, answer)


def check_answers(root: Path, answers: Sequence[Mapping[str, Any]]) -> dict[str, files.Written]:
    """Return the manifest's entries of later stages; CheckpointError if an answer has an error."""
    failures = [f"stage {k}: {x['error']}" for k, x in enumerate(answers, 1) if "error" in x]
    if failures:
        raise CheckpointError(
            f"cannot write a checkpoint in {root}: {'; '.join(failures)}; earlier checkpoints are "
            "untouched"
        )
    written = [entry for answer in answers for entry in answer.get("written", {}).items()]
    return {name: (checksum, size) for name, (checksum, size) in written}


def tell(ctx: JobContext, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange a JSON object among all processes."""
    return [json.loads(x) for x in ctx.control.gather_bytes(json.dumps(answer).encode())]
