"""Whether all replicas hold the same parameters in the first steps, at no extra collective.

Wrapping gives all replicas rank 0's parameters. A layer that sets its weights from the first
samples that it sees gives each replica others, and so does a script that changes weights on one
replica; from there on each replica trains another model. So in the first steps each replica adds a
digest of its parameters to the numbers that are summed with the gradients
(:mod:`pipollux_hybrid.sync.iteration_totals`). With R replicas, rank 0 adds R - 1 times its own,
and each other replica its own times -1: whole numbers whose sums are below 2**53, which float64
holds exactly in any order. The sum is zero if all digests are equal. Otherwise it is not, but for
one case in 2**32. Then all processes of the job exchange what they hold, and decide alike.

Until the first optimizer step parameters must be equal bit by bit. After it they may differ by
rounding, as machines of different kinds do not round an optimizer's step alike.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job.context import JobContext

from .replica_check import tensor_digest

__all__ = ["CHECKED", "ParameterCheck"]

CHECKED = 3
"""Synchronisations in which parameters are compared, at the start and after replicas have joined or
left."""
ROUNDING, ROUNDING_OF_DOUBLES = 3e-4, 1e-8
"""Difference, by a tensor's norm, that rounding may make in the first steps."""
CHUNK = 1 << 20
"""Numbers of a parameter that are copied to the CPU at once."""
LOG = logging.getLogger(__name__)


class _Held(NamedTuple):
    """What a replica holds of a parameter."""

    digest: str
    projection: float
    """Sum of its numbers, each times a factor that is the same on all replicas."""
    norm: float
    tolerance: float
    """Difference of projections, by the norm, that rounding may make."""


class ParameterCheck:
    """Compares parameters between replicas in the first synchronisations of a membership.

    Args:
        module: The layers; of this process's stage where each has one.
        ctx: The job's context.
        step: Returns the number of optimizer steps taken, for the message.
    """

    def __init__(self, module: nn.Module, ctx: JobContext, step: Callable[[], int]) -> None:
        self._module, self._context, self._step = module, ctx, step
        self._compared = 0
        self._stepped = self._warned = False

    @property
    def due(self) -> bool:
        """Whether the coming synchronisation compares them."""
        return self._context.env.num_replicas > 1 and self._compared < CHECKED

    def stepped(self) -> None:
        """Note a step of the optimizer, after which parameters may differ by rounding."""
        self._stepped = True

    def rejoin(self) -> None:
        """Begin again with other replicas, the surviving ones of which have stepped."""
        self._compared, self._stepped = 0, True

    def report(self) -> list[float]:
        """Return whether this replica compares, and its share of a sum that is zero if all agree.

        As many numbers in every step, whether it compares or not; none without parameters.
        """
        env = self._context.env
        if env.num_replicas == 1 or next(self._module.parameters(), None) is None:
            return []
        if not self.due:
            return [0.0, 0.0]
        digests = b"".join(tensor_digest("", parameter) for _, parameter in self._parameters())
        content = torch.frombuffer(bytearray(digests), dtype=torch.uint8)
        digest = int.from_bytes(tensor_digest("", content)[:4], "little")
        share = digest * (env.num_replicas - 1) if env.rank == 0 else -digest
        return [1.0, float(share)]

    def differs(self, total: Sequence[float]) -> bool:
        """Return whether the sum of all reports says that replicas differ.

        Args:
            total: Of this stage's replicas.
        """
        return bool(total) and total[0] == self._context.env.num_replicas and total[1] != 0.0

    def end(self, *, differing: bool) -> None:
        """End a synchronisation; all processes of the job do.

        Args:
            differing: Whether replicas differ in any stage, the same in all processes.

        Raises:
            SynchronizationError: They do, by more than rounding; in all processes.
        """
        if differing:
            self._compare()
        self._compared += 1

    def _compare(self) -> None:
        """Refuse replicas whose parameters differ; all processes of the job call it."""
        held = {name: _held(name, parameter) for name, parameter in self._parameters()}
        content = json.dumps({"stepped": self._stepped, "held": held}).encode()
        everyone = [json.loads(x) for x in self._context.control.gather_bytes(content)]
        exact = not any(one["stepped"] for one in everyone)
        processes = self._context.env.processes_per_replica
        for stage in range(processes):
            tables = [one["held"] for one in everyone[stage::processes]]
            for name in dict.fromkeys(name for table in tables for name in table):
                row = [_Held(*table[name]) if name in table else None for table in tables]
                if not _is_alike(row, exact=exact):
                    raise SynchronizationError(self._message(name, row))
        if not self._warned:
            self._warned = True
            LOG.warning(
                "parameters differ by rounding between replicas, as on machines of different kinds"
            )

    def _message(self, name: str, row: Sequence[_Held | None]) -> str:
        replicas: dict[str, list[str]] = {}
        for rank, held in enumerate(row):
            replicas.setdefault(held.digest if held else "missing", []).append(str(rank))
        found = "; ".join(
            f"{digest} on replica{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
            for digest, ranks in replicas.items()
        )
        return (
            f"replicas differ before optimizer step {self._step() + 1}: parameter {name!r} is the "
            f"first that does ({found}), as after a forward that sets weights from its samples, or "
            "a change on some replicas only: set weights before HybridParallel(…), which gives all "
            "replicas rank 0's (run a batch through the layers, or load a checkpoint of one "
            "replica), and change them alike on all replicas"
        )

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Return the parameters as values: whether one is trained does not belong to them."""
        return ((name, parameter.detach()) for name, parameter in self._module.named_parameters())


def _held(name: str, parameter: Tensor) -> _Held:
    exact = not (parameter.is_floating_point() or parameter.is_complex())
    tolerance = 0.0
    if not exact:
        double = parameter.dtype in (torch.float64, torch.complex128)
        eps = torch.finfo(parameter.dtype).eps
        tolerance = ROUNDING_OF_DOUBLES if double else max(ROUNDING, 2 * eps)
    projection, square = _project(name, parameter)
    digest = tensor_digest("", parameter).hex()[:12]
    return _Held(digest, projection, math.sqrt(square), tolerance)


def _project(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return a sum of a tensor's numbers, each times a random factor, and the sum of squares."""
    numbers = torch.view_as_real(parameter.resolve_conj()) if parameter.is_complex() else parameter
    generator = torch.Generator().manual_seed(len(name))
    projection = square = 0.0
    for chunk in numbers.reshape(-1).split(CHUNK):
        here = chunk.cpu().double()
        factors = torch.rand(len(here), generator=generator, dtype=torch.float64).mul_(2).sub_(1)
        projection += float(here @ factors)
        square += float(here @ here)
    return projection, square


def _is_alike(row: Sequence[_Held | None], *, exact: bool) -> bool:
    """Return whether replicas hold the same of a parameter.

    Args:
        row: What each has; None: no such parameter.
        exact: Bit by bit, or but for rounding.
    """
    first, *others = row
    return all(
        first is not None
        and other is not None
        and (first.digest == other.digest or (not exact and _is_close(first, other)))
        for other in others
    )


def _is_close(one: _Held, other: _Held) -> bool:
    a, b = one.projection, other.projection
    if math.isnan(a) and math.isnan(b):
        return True
    return abs(a - b) <= one.tolerance * max(one.norm, other.norm)
