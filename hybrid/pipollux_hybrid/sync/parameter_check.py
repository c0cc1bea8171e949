"""Checks in the first steps that all replicas hold the same parameters, without a collective.

Wrapping gives all replicas rank 0's parameters. If a layer then sets its weights from the first
samples, or a script changes weights on one replica, each replica trains another model. So in the
first steps each replica adds a digest of its parameters to the iteration totals
(:mod:`pipollux_hybrid.sync.iteration_totals`). With R replicas, rank 0 adds R - 1 times its digest
and each other replica its digest times -1: whole numbers whose sums are below 2**53, exact in
float64 in any order. The sum is zero if all digests are equal, else only in one case in 2**32. If
it is not zero, all processes of the job exchange digests and decide alike.

Until the first optimizer step parameters must be equal bit by bit. After it they may differ by
rounding, as between machines of different kinds.
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

CHECKED = 3
"""Synchronizations that compare parameters, at the start and after replicas have joined or left."""
ROUNDING, ROUNDING_OF_DOUBLES = 3e-4, 1e-8
"""Difference due to rounding in the first steps, relative to a tensor's norm."""
CHUNK = 1 << 20
"""Numbers of a parameter that are copied to the CPU at once."""
LOG = logging.getLogger(__name__)


class Held(NamedTuple):
    """A parameter of one replica, to be compared with that of others."""

    digest: str
    projection: float
    """Sum of its numbers, each times a factor that is the same on all replicas."""
    norm: float
    tolerance: float
    """Difference of projections due to rounding, relative to the norm."""


class ParameterCheck:
    """Compares parameters between replicas in the first synchronizations of a membership.

    ``module`` has this process's layers; ``step`` returns the optimizer step, for the message.
    """

    def __init__(self, module: nn.Module, ctx: JobContext, step: Callable[[], int]) -> None:
        self._module, self._context, self._step = module, ctx, step
        self._compared = 0
        self._stepped = self._warned = False

    @property
    def due(self) -> bool:
        """Whether the next synchronization compares parameters."""
        return self._context.env.num_replicas > 1 and self._compared < CHECKED

    def stepped(self) -> None:
        """Record an optimizer step, after which parameters may differ by rounding."""
        self._stepped = True

    def rejoin(self) -> None:
        """Start again with other replicas; the surviving ones have stepped."""
        self._compared, self._stepped = 0, True

    def report(self) -> list[float]:
        """Return whether this replica compares, and its term of a sum that is zero if all agree;
        the same length in every step, empty without parameters.
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
        """Return whether the sum of the reports of this stage's replicas shows a difference."""
        return bool(total) and total[0] == self._context.env.num_replicas and total[1] != 0.0

    def end(self, *, differing: bool) -> None:
        """End a synchronization; raise a SynchronizationError, in all processes, if replicas are
        ``differing`` in any stage by more than rounding.
        """
        if differing:
            self._compare()
        self._compared += 1

    def _compare(self) -> None:
        """Refuse replicas whose parameters differ; all processes of the job call it."""
        mine = {name: held(name, parameter) for name, parameter in self._parameters()}
        content = json.dumps({"stepped": self._stepped, "held": mine}).encode()
        everyone = [json.loads(x) for x in self._context.control.gather_bytes(content)]
        exact = not any(one["stepped"] for one in everyone)
        processes = self._context.env.processes_per_replica
        for stage in range(processes):
            tables = [one["held"] for one in everyone[stage::processes]]
            for name in dict.fromkeys(name for table in tables for name in table):
                row = [Held(*table[name]) if name in table else None for table in tables]
                if not are_alike(row, exact=exact):
                    raise SynchronizationError(self._message(name, row))
        if not self._warned:
            self._warned = True
            LOG.warning(
                "parameters differ by rounding between replicas, as on machines of different kinds"
            )

    def _message(self, name: str, row: Sequence[Held | None]) -> str:
        replicas: dict[str, list[str]] = {}
        for rank, one in enumerate(row):
            replicas.setdefault(one.digest if one else "missing", []).append(str(rank))
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
        """Return detached parameters: ``requires_grad`` is not compared."""
        return ((name, parameter.detach()) for name, parameter in self._module.named_parameters())


def held(name: str, parameter: Tensor) -> Held:
    """Return what replicas compare of a detached parameter; ``name`` is the same on all of them."""
    exact = not (parameter.is_floating_point() or parameter.is_complex())
    tolerance = 0.0
    if not exact:
        double = parameter.dtype in (torch.float64, torch.complex128)
        eps = torch.finfo(parameter.dtype).eps
        tolerance = ROUNDING_OF_DOUBLES if double else max(ROUNDING, 2 * eps)
    projection, square = _project(name, parameter)
    digest = tensor_digest("", parameter).hex()[:12]
    return Held(digest, projection, math.sqrt(square), tolerance)


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


def are_alike(row: Sequence[Held | None], *, exact: bool) -> bool:
    """Return whether replicas hold the same parameter, bit by bit if ``exact``; None: missing."""
    first, *others = row
    return all(
        first is not None
        and other is not None
        and (first.digest == other.digest or (not exact and _is_close(first, other)))
        for other in others
    )


def _is_close(one: Held, other: Held) -> bool:
    a, b = one.projection, other.projection
    if math.isnan(a) and math.isnan(b):
        return True
    return abs(a - b) <= one.tolerance * max(one.norm, other.norm)
