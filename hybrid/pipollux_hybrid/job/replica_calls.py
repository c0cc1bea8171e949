"""Calls that all processes of a replica make together in a multi-process pipeline.

If one process evaluates, saves or ends while another one trains, each would receive messages meant
for another call, or wait until a timeout. So every joint call begins with a message of fixed size
on the replica's group: the name of the call, and a digest of its samples. In a training step it
travels alongside the micro-batches, and is checked before gradients are used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pipollux_hybrid.errors import PeerLostError, SynchronizationError

from .groups import ReplicaGroup
from .peers import broken_replica

NAME_BYTES = 160
_CALL = struct.Struct(f"<{NAME_BYTES}sqqqqd")


class BatchDigest(NamedTuple):
    """Digest of a call's arguments; 0 for an unknown number."""

    samples: int = 0
    microbatches: int = 0
    inputs: int = 0
    targets: int = 0


@dataclass(frozen=True)
class _Call:
    name: str
    batch: BatchDigest
    number: float

    def pack(self) -> torch.Tensor:
        content = _CALL.pack(self.name.encode(), *self.batch, self.number)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    @classmethod
    def unpack(cls, message: torch.Tensor) -> _Call:
        name, *batch, number = _CALL.unpack(message.numpy().tobytes())
        return cls(name.rstrip(b"\0").decode(), BatchDigest(*batch), number)


class ReplicaCalls:
    """Announces this process's calls to the other processes of its replica."""

    def __init__(self, group: ReplicaGroup, stage: int, replica: int) -> None:
        self._group, self._stage, self._replica = group, stage, replica

    def meet(self, name: str, batch: BatchDigest | None = None, number: float = 0.0) -> list[float]:
        """Wait until all processes of the replica make this call; return the number of each.
        ``name`` is the call as written in a script, ``batch`` a digest of its arguments.

        Raises:
            SynchronizationError: Another process makes another call, or with another batch.
            ReplicaBrokenError: A process is gone.
        """
        call = _Call(_short(name), batch or BatchDigest(), number)
        return self._check(call, *self._send(call))

    def gather(self, name: str, content: bytes, batch: BatchDigest | None = None) -> list[bytes]:
        """Return bytes of each process of the replica, all of which make this call; arguments and
        errors as in :meth:`meet`.
        """
        lengths = self.meet(name, batch, len(content))
        try:
            return self._group.all_gather_sized(content, [int(length) for length in lengths])
        except RuntimeError as error:
            raise self._missing(name, error) from error

    @contextmanager
    def meeting(self, name: str, batch: BatchDigest) -> Iterator[None]:
        """Check at the end of a call that all processes of the replica make it; errors as in
        :meth:`meet`. A SynchronizationError replaces an error in the body that follows from it.
        """
        call = _Call(_short(name), batch, 0.0)
        work, everyone = self._send(call)
        try:
            yield
        except PeerLostError:  # the lost process may have ended because of this very call
            self._check(call, work, everyone)
            raise
        except Exception:  # layers and losses may raise anything
            if _has_arrived(work):
                self._compare(call, everyone)
            raise
        self._check(call, work, everyone)

    def _send(self, call: _Call) -> tuple[Any, list[torch.Tensor]]:
        try:
            return self._group.start_all_gather(call.pack())
        except RuntimeError as error:
            raise self._missing(call.name, error) from error

    def _check(self, call: _Call, work: Any, everyone: Sequence[torch.Tensor]) -> list[float]:
        try:
            self._group.wait(work)
        except RuntimeError as error:
            raise self._missing(call.name, error) from error
        return self._compare(call, everyone)

    def _missing(self, name: str, error: RuntimeError) -> SynchronizationError:
        return broken_replica(
            f"in {name}, which every process of the replica must call (if another one has "
            "come to the end of its script, it did not)",
            error,
        )

    def _compare(self, call: _Call, everyone: Sequence[torch.Tensor]) -> list[float]:
        calls = [_Call.unpack(message) for message in everyone]
        if any(other.name != call.name for other in calls):
            raise SynchronizationError(self._other_calls(calls))
        given = [other.batch for other in calls]
        counts = {(batch.samples, batch.microbatches) for batch in given}
        differing = [
            argument
            for argument in ("inputs", "targets")
            if len({getattr(batch, argument) for batch in given} - {0}) > 1
        ]
        if len(counts) > 1 or differing:
            raise SynchronizationError(self._other_batches(call, given, differing))
        return [other.number for other in calls]

    def _other_calls(self, calls: Sequence[_Call]) -> str:
        first = self._replica * len(calls)
        places = ", and ".join(f"rank {first + k} is in {x.name}" for k, x in enumerate(calls))
        return (
            f"{places}: the processes of a replica must make the same calls in the same order, so "
            "make these in every process; where one is to print or write a file, only that belongs "
            "under `if pipollux.process_rank() == 0`"
        )

    def _other_batches(
        self, call: _Call, given: Sequence[BatchDigest], differing: Sequence[str]
    ) -> str:
        names = ", ".join(differing) or "numbers of samples"
        sizes = [
            f"{batch.samples} samples in {batch.microbatches} micro-batches" for batch in given
        ]
        found = ""
        if len(set(sizes)) > 1:
            found = " (" + ", ".join(f"stage {k}: {size}" for k, size in enumerate(sizes)) + ")"
        changed = ""
        if "targets" in differing and call.name.startswith("model."):
            changed = "; a loss_fn that changes targets in place has to clone them first"
        return (
            f"the processes of replica {self._replica} were given different {names} in "
            f"{call.name}{found}: the first stage reads the inputs and the last one the targets, "
            "so every process of a replica must load the same batches: use "
            "pipollux.AdaptiveDataLoader, or shard and seed by pipollux.replica_rank() and not by "
            "the process's rank, as in DistributedSampler(dataset, pipollux.num_replicas(), "
            "pipollux.replica_rank()), and list samples in the same order in every process, as by "
            f"sorted(os.listdir(…)){changed}"
        )


def _short(name: str) -> str:
    content = name.encode()
    if len(content) <= NAME_BYTES:
        return name
    return content[: NAME_BYTES - 3].decode(errors="ignore") + "..."


def _has_arrived(work: Any) -> bool:
    """Return whether a collective has completed without an error."""
    future = work.get_future()
    if not future.done():
        return False
    try:
        future.wait()
    except RuntimeError:
        return False
    return True
