"""Checkpoint modes: the same in all stages, or one per stage as its memory allows."""

from __future__ import annotations

from collections.abc import Sequence

from pipollux_hybrid.errors import ConfigurationError
from pipollux_perfmodel.timing.params import CHECKPOINTS, Checkpoint

__all__ = ["choose_modes"]


def choose_modes(
    asked: str | Sequence[str], num_stages: int, *, stages_have_processes: bool
) -> tuple[Checkpoint, ...]:
    """Return the mode of each stage, given one mode for all or one per stage. Raises a
    ConfigurationError if their number is wrong, or a multi-process pipeline has different ones.
    """
    if isinstance(asked, str):
        return (_known(asked),) * num_stages
    words = list(asked)
    if not stages_have_processes and num_stages > 1:
        raise ConfigurationError(
            f"activation_checkpoint={words}: one process drives all {num_stages} stages of this "
            "job, which have one mode together: give 'always', 'except_last' or 'never', or use a "
            "multi-process pipeline (schedule=)"
        )
    if len(words) != num_stages:
        raise ConfigurationError(
            f"activation_checkpoint={words} has {len(words)} modes, and the number of stages is "
            f"{num_stages} (num_stages, or PIPOLLUX_NUM_STAGES from the scheduler): give one mode "
            "for each stage, or one for all"
        )
    return tuple(map(_known, words))


def _known(word: str) -> Checkpoint:
    return next(mode for mode in CHECKPOINTS if mode == word)
