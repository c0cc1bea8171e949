"""Parameters shared by layers of several stages, in a multi-process pipeline.

Every process that runs such a layer holds a copy. Copies start equal and receive the same gradient
in every step, so that the optimizer keeps them equal bit by bit:

* Until the iteration is complete, a copy's gradient is that of its own stage's layers. It is then
  averaged over the replicas and summed over the stages of each replica. Each stage adds the same
  numbers in stage order, so that all get the same bits.
* The exchange overlaps with nothing, so it is timed.
* Norms count one copy: the first stage's.
* For gradient noise, the contributions of a micro-batch must be summed before they are squared.
  Measured steps keep them until the end of the backward.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipollux_hybrid.errors import SynchronizationError
from pipollux_hybrid.job.context import JobContext
from pipollux_hybrid.job.device_groups import reach
from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.job.peers import broken_replica

from .comm_timer import CommTimer
from .grad_norms import NormSum
from .sync_result import GradientTime, SyncResult


@dataclass(frozen=True, kw_only=True)
class _Shared:
    names: tuple[str, ...]
    """All of the parameter's names in the whole module, in module order."""
    holders: tuple[int, ...]
    parameter: nn.Parameter | None

    @property
    def name(self) -> str:
        """The name under which the whole module lists it."""
        return self.names[0]


class TiedCopies:
    """Parameters of this process that other stages share; ``shared`` is equal in all processes."""

    def __init__(self, mesh: ProcessMesh, stage: int, shared: Sequence[_Shared]) -> None:
        self._mesh, self._stage, self._shared = mesh, stage, list(shared)
        self._mine = {x.parameter: x for x in shared if x.parameter is not None}
        self._counted_elsewhere = {p for p, x in self._mine.items() if x.holders[0] != stage}
        self._contributions: dict[nn.Parameter, dict[int, Tensor]] = {}
        self._added_up = False
        self._timer = CommTimer([parameter.device for parameter in self._mine])
        self._seconds = self._slowest = 0.0  # last exchange: here, in the slowest stage

    @classmethod
    def of(
        cls, ctx: JobContext, module: nn.Sequential, balance: Sequence[int]
    ) -> TiedCopies | None:
        """Return the shared parameters; None without any, or if one process has all stages.

        Collective over the job, while every process still has all layers. ``balance`` is the number
        of layers of each stage, or of each chunk.
        """
        if ctx.mesh is None:
            return None
        layers = list(module.children())
        held: dict[nn.Parameter, list[int]] = {}
        ends = itertools.accumulate(balance)
        for part, (end, count) in enumerate(zip(ends, balance, strict=True)):
            stage = part % ctx.env.processes_per_replica
            here = {p: None for layer in layers[end - count : end] for p in layer.parameters()}
            for parameter in here:
                held.setdefault(parameter, []).append(stage)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        holders = {p: tuple(sorted(stages)) for p, stages in held.items() if len(stages) > 1}
        for stages in sorted(set(holders.values())):
            ctx.mesh.among(stages)  # creating a group is collective
        shared = [
            _Shared(
                names=tuple(names[parameter]),
                holders=stages,
                parameter=parameter if ctx.env.stage in stages else None,
            )
            for parameter, stages in holders.items()
        ]
        return cls(ctx.mesh, ctx.env.stage, shared) if shared else None

    def counted(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that this process counts in norms over all stages."""
        return [x for x in parameters if x not in self._counted_elsewhere]

    def copies(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that other stages hold a copy of."""
        return [x for x in parameters if x in self._mine]

    def names(self) -> list[tuple[str, ...]]:
        """Return the names of each shared parameter, in module order."""
        return [shared.names for shared in self._shared]

    def listed_names(self) -> dict[nn.Parameter, str]:
        """Return the name under which the whole module lists each of this process's copies."""
        return {parameter: shared.name for parameter, shared in self._mine.items()}

    def rejoin(self) -> None:
        """Reset for other replicas, between two iterations."""
        self._contributions.clear()
        self._added_up = False

    # --- gradients ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a backward; a sum that gradients are added to is kept in one stage only."""
        self._contributions.clear()  # of a backward that failed
        if not self._added_up:
            return
        self._added_up = False
        for parameter in self._counted_elsewhere:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def add_up(self, result: SyncResult, *, timed: bool) -> SyncResult:
        """Sum the gradients of all copies, which are averages over the replicas already.

        Returns ``result`` with the exchanges, if ``timed``, and the time of the previous exchange
        on the slowest stage, the same number in all stages. Errors are those of :meth:`measure`.
        """
        self._added_up = True
        have = {parameter for parameter in self._mine if parameter.grad is not None}
        in_use, times = self._in_use(have), list(result.times)
        self._timer.start()  # all stages have their averages by now
        for parameter, shared in in_use:
            started = time.perf_counter()
            total = self._sum(parameter, shared, parameter.grad)
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.detach().copy_(total)
            if timed:
                times.append(self._time(total, started))
        self._seconds = self._timer.stop()
        return replace(result, exchange_time=self._slowest, times=tuple(times))

    def keep(self, parameter: nn.Parameter, arrival: int, gradient: Tensor) -> bool:
        """Keep a micro-batch's contribution until :meth:`measure`; return False if not shared."""
        if parameter not in self._mine:
            return False
        self._contributions.setdefault(parameter, {})[arrival] = gradient.detach().clone()
        return True

    def measure(
        self,
        norms: NormSum,
        factors: Sequence[float],
        weights: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        """Add the micro-batches' squared contributions, each times its factor, to ``norms`` at the
        end of a backward; ``weights`` returns those of a parameter's squares.

        Raises:
            ReplicaBrokenError: A process is gone.
            SynchronizationError: A parameter is frozen in one stage and trained in another.
        """
        kept, self._contributions = self._contributions, {}
        for parameter, shared in self._in_use(kept):
            mine = kept.get(parameter, {})
            for arrival, factor in enumerate(factors):
                total = self._sum(parameter, shared, mine.pop(arrival, None))
                if shared.holders[0] == self._stage:
                    norms.add(total, weights(parameter), factor)

    def _in_use(self, here: Collection[nn.Parameter]) -> list[tuple[nn.Parameter, _Shared]]:
        """Return the copies to which any stage contributes; this one does to ``here``."""
        copies = [shared.parameter for shared in self._shared]
        told = [float(p is not None and p in here) for p in copies]
        told += [float(p is not None and p.requires_grad) for p in copies]
        told += [self._seconds * (stage == self._stage) for stage in range(self._mesh.num_stages)]
        sums = self._mesh.sum_over_stages(told)
        found, trains = sums[: len(copies)], sums[len(copies) : 2 * len(copies)]
        self._slowest = max(sums[2 * len(copies) :])
        for shared, trained in zip(self._shared, trains, strict=True):
            if trained not in (0.0, len(shared.holders)):
                raise SynchronizationError(
                    f"parameter {shared.name!r} is frozen in some of the stages "
                    f"{', '.join(map(str, shared.holders))} that share it and trained in others: "
                    "set requires_grad before HybridParallel(…), or for all of "
                    "module.parameters() in all processes"
                )
        anywhere = {
            x.name for x, *sums in zip(self._shared, found, trains, strict=True) if all(sums)
        }
        return [(p, shared) for p, shared in self._mine.items() if shared.name in anywhere]

    def _sum(self, parameter: nn.Parameter, shared: _Shared, mine: Tensor | None) -> Tensor:
        """Return the sum over the stages that share a parameter; all of them call it."""
        if mine is None:
            mine = torch.zeros_like(parameter)
        mine = mine.detach().contiguous()
        everyone = [torch.empty_like(mine) for _ in shared.holders]
        with _reaching_peers():
            group = self._mesh.among(shared.holders)
            dist.all_gather(everyone, mine, group=group)
            reach(mine.device, group)
        total = everyone[0]
        for other in everyone[1:]:
            total += other
        return total

    def _time(self, total: Tensor, started: float) -> GradientTime:
        if total.is_cuda:  # only the device knows the end
            torch.cuda.synchronize(total.device)
        size = total.numel() * total.element_size()
        return GradientTime(self._stage, size, started, time.perf_counter(), tied=True)

    # --- a check for debugging -----------------------------------------------------------------

    def compare(self, step: int, digest: Callable[[str, Tensor], bytes]) -> None:
        """Raise a SynchronizationError if copies differ; all processes call it."""
        told = {x.name: digest(x.name, p).hex() for p, x in self._mine.items()}
        row = [json.loads(x) for x in self._mesh.gather_from_stages(json.dumps(told).encode())]
        for shared in self._shared:
            found = {stage: row[stage][shared.name] for stage in shared.holders}
            if len(set(found.values())) > 1:
                values = ", ".join(f"{x[:12]} on stage {stage}" for stage, x in found.items())
                raise SynchronizationError(
                    f"the copies of parameter {shared.name!r} differ after optimizer step {step} "
                    f"({values}): several stages share it, so change it only in train_step() and "
                    "step(), by model.clip_grad_norm_, or alike in all processes"
                )


def counted(tied: TiedCopies | None, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that this process counts in norms over all stages."""
    return list(parameters) if tied is None else tied.counted(parameters)


@contextmanager
def _reaching_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise broken_replica("while adding up gradients that stages share", error) from error
