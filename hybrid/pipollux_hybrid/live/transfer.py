"""The states of a job on their way from one replica to those that join."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipollux_hybrid.checkpoint.state import State
from pipollux_hybrid.errors import CheckpointError, SynchronizationError
from pipollux_hybrid.job.groups import ReplicaGroup

__all__ = ["header_of", "receive_states", "save_states", "send_states"]


def save_states(states: Mapping[str, State]) -> dict[str, Tensor]:
    """Return what the states save, by their names: bytes, uint8, shape [length].

    Raises:
        CheckpointError: One cannot be saved.
    """
    contents = {}
    for name, state in states.items():
        content = io.BytesIO()
        try:
            state.save(content)
        except Exception as error:  # a state's save is the script's own code
            raise CheckpointError(f"the state {name} cannot be saved: {error}") from error
        buffer = content.getbuffer()  # which is not copied
        empty = torch.empty(0, dtype=torch.uint8)
        contents[name] = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else empty
    return contents


def header_of(contents: Mapping[str, Tensor]) -> Tensor:
    """Return the sizes and names of saved states as bytes; every replica of a job has some."""
    lines = [f"{len(content)} {name}" for name, content in contents.items()]
    return torch.frombuffer(bytearray("\n".join(lines).encode()), dtype=torch.uint8)


def send_states(
    control: ReplicaGroup, contents: Mapping[str, Tensor], ranks: Sequence[int]
) -> None:
    """Send saved states to replicas that call :func:`receive_states`.

    Raises:
        SynchronizationError: One of them is gone.
    """
    try:
        for content in (header_of(contents), *contents.values()):
            for rank in ranks if len(content) else ():
                control.send(content, rank)
    except RuntimeError as error:
        raise SynchronizationError(f"a replica was lost while it joined ({error})") from error


def receive_states(control: ReplicaGroup, length: int, states: Mapping[str, State]) -> None:
    """Take over the states of replica 0.

    Args:
        control: All replicas.
        length: Of :func:`header_of`.
        states: This replica's own.

    Raises:
        SynchronizationError: A state does not take what was sent.
    """
    header = torch.zeros(length, dtype=torch.uint8)
    control.receive(header, 0)
    for line in header.numpy().tobytes().decode().splitlines():
        size, _, name = line.partition(" ")
        content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            control.receive(content, 0)
        try:
            states[name].load(io.BytesIO(content.numpy().tobytes()))
        except CheckpointError as error:
            raise SynchronizationError(f"this replica cannot join: {name}: {error}") from error
