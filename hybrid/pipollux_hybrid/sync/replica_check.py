"""A debugging check that all replicas hold the same parameters and buffers, bit by bit.

They start equal and every step applies the same averages. If they differ, one replica changed them
outside of ``backward()`` and ``step()``, or is not deterministic where it must be, and the replicas
silently diverge.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError, SynchronizationError
from pipollux_hybrid.job.context import JobContext

from .tied_copies import TiedCopies

__all__ = ["ReplicaCheck", "check_interval", "tensor_digest"]

DIGEST = 16
WORD = 8
BLOCK = 1 << 15
"""Words of a block of large tensors, which fits into a core's cache."""
SUMMED = 1 << 16
"""Bytes from which a tensor is hashed by the checksums of its blocks."""


def check_interval(value: bool | int, from_environment: int) -> int:
    """Return the optimizer steps between two comparisons, 0 for never: ``PIPOLLUX_CHECK_REPLICAS``
    if it is not 0, else ``check_replicas``. Raises a ConfigurationError for other values.
    """
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"check_replicas={value!r}: True (after every optimizer step), False, or a number of "
            "steps is needed"
        )
    return from_environment or int(value)


class ReplicaCheck:
    """Compares digests of parameters and buffers every ``interval`` optimizer steps; 0: never."""

    def __init__(
        self,
        module: nn.Module,
        ctx: JobContext,
        interval: int,
        tied: TiedCopies | None = None,
    ) -> None:
        self._module, self._tied = module, tied
        self._control, self._env = ctx.control, ctx.env
        self._interval = interval

    def stepped(self, step: int) -> None:
        """Compare the replicas when due; all of them call it after the same optimizer step.

        Every replica raises a SynchronizationError with the first tensor that differs, the step,
        the ranks and their digests.
        """
        if self._interval and step % self._interval == 0:
            with self._control.losses.noting():
                self._control.check()  # all replicas must be here
                self.compare(step)

    def compare(self, step: int) -> None:
        """Compare the replicas now; see :meth:`stepped`."""
        if self._control.group is None:
            return
        names, digests = self._digests()
        whole = _digest([*(name.encode() for name in names), *digests])
        counted = whole + len(names).to_bytes(8, "little")
        everyones = self._control.gather_bytes(counted)
        processes = self._env.processes_per_replica
        stages = [everyones[stage::processes] for stage in range(processes)]
        if all(len(set(answers)) == 1 for answers in stages):
            if self._tied is not None:
                self._tied.compare(step, tensor_digest)
            return
        answers = stages[self._env.stage]
        counts = [int.from_bytes(answer[DIGEST:], "little") for answer in answers]
        if len(set(counts)) > 1:
            found = ", ".join(f"{count} on replica {rank}" for rank, count in enumerate(counts))
            raise SynchronizationError(
                f"replicas differ after optimizer step {step}: the number of parameters and "
                f"buffers is {found}; every replica needs the same layers"
            )
        tables = self._control.gather_bytes(b"".join(digests))[self._env.stage :: processes]
        for index, name in enumerate(names):
            row = [table[index * DIGEST : (index + 1) * DIGEST].hex() for table in tables]
            if len(set(row)) > 1:
                raise SynchronizationError(self._message(name, step, row))
        if len(set(answers)) == 1:
            raise SynchronizationError(
                f"replicas differ after optimizer step {step} in another stage, whose process says "
                "where"
            )
        raise SynchronizationError(
            f"replicas differ after optimizer step {step}: their parameters and buffers are the "
            "same but have other names or another order; every replica needs the same "
            "layers"
        )

    def _message(self, name: str, step: int, row: Sequence[str]) -> str:
        kind = "parameter" if name in dict(self._module.named_parameters()) else "buffer"
        ranks: dict[str, list[int]] = {}
        for rank, digest in enumerate(row):
            ranks.setdefault(digest[:12], []).append(rank)
        found = "; ".join(
            f"{digest} on replica{'s' if len(where) > 1 else ''} {', '.join(map(str, where))}"
            for digest, where in ranks.items()
        )
        return (
            f"replicas differ after optimizer step {step}: {kind} {name!r} is the first that does "
            f"({found}); change parameters and buffers only in backward() and step(), or alike on "
            "all replicas"
        )

    def _digests(self) -> tuple[list[str], list[bytes]]:
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        return [name for name, _ in tensors], [tensor_digest(*item) for item in tensors]


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """Return a digest of a tensor's name, type, shape, values and whether it is trained."""
    about = f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode()
    # As bytes, so that -0.0 is not 0.0 and a NaN equals itself.
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // WORD * WORD if data.numel() >= SUMMED else 0
    rest = data[whole:].cpu().numpy()
    return _digest([about, *([_sums(data[:whole])] if whole else ()), rest])


def _sums(data: Tensor) -> bytes:
    """Return a checksum of 64 bits per block of uint8 data [a multiple of 8], at memory speed.

    It is the sum of the block's words modulo 2**64, each times another odd number: it detects any
    one word that differs, and misses about one in 2**63 of other differences.
    """
    words = data.view(torch.int64) if data.storage_offset() % WORD == 0 else _aligned(data)
    factors = _factors(words.device)
    scratch = torch.empty_like(factors)
    sums = []
    for block in words.split(BLOCK):
        products = scratch[: len(block)]
        torch.mul(block, factors[: len(block)], out=products)
        sums.append(products.sum())
    content: bytes = torch.stack(sums).cpu().numpy().tobytes()
    return content


def _aligned(data: Tensor) -> Tensor:
    return data.clone().view(torch.int64)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return odd numbers, the same in every process, int64, shape [BLOCK]."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 62), 1 << 62, (BLOCK,), generator=generator)
    return (numbers * 2 + 1).to(device)


def _digest(parts: Sequence[bytes | memoryview | object]) -> bytes:
    state = hashlib.blake2b(digest_size=DIGEST)
    update: Callable[[object], None] = state.update  # type: ignore[assignment]  # arrays are buffers
    for part in parts:
        update(part)
    return state.digest()
