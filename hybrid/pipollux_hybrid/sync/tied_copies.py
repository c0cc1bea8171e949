"""Parameters that layers of several stages share, where each stage has a process of its own.

Every process that runs such a layer holds a copy. All copies begin with the same value, and every
step gives them the same gradient, so that the optimizer keeps them equal bit by bit:

* A copy's gradient is of its own stage's layers until the iteration is complete. Then it has been
  averaged over the replicas, as any other, and is added up over the stages of each replica. Each of
  these adds the same numbers in the order of stages, so all get the same bits.
* The exchange takes its time, for nothing else is left to do meanwhile. So it is measured.
* Norms count one copy: the first stage's.
* For the gradient's noise the contributions of each micro-batch have to be added up before their
  squares are taken. Where it is measured they are kept until the end of the backward.
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
from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.job.peers import broken_replica

from .comm_timer import CommTimer
from .grad_norms import NormSum
from .sync_result import GradientTime, SyncResult

__all__ = ["TiedCopies", "counted"]


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """A parameter of which several stages hold a copy."""

    names: tuple[str, ...]
    """All that the whole module has for it, in its order; it lists it by the first."""
    holders: tuple[int, ...]
    """The stages, from first to last."""
    parameter: nn.Parameter | None
    """This process's copy; None: it has none."""

    @property
    def name(self) -> str:
        """The one under which the whole module lists it."""
        return self.names[0]


class TiedCopies:
    """What this process holds of parameters that several stages share.

    Args:
        mesh: The groups of this process.
        stage: Index of its stage.
        shared: Those parameters, the same in all processes of the job.
    """

    def __init__(self, mesh: ProcessMesh, stage: int, shared: Sequence[_Shared]) -> None:
        self._mesh, self._stage, self._shared = mesh, stage, list(shared)
        self._mine = {x.parameter: x for x in shared if x.parameter is not None}
        self._counted_elsewhere = {p for p, x in self._mine.items() if x.holders[0] != stage}
        self._contributions: dict[nn.Parameter, dict[int, Tensor]] = {}
        self._added_up = False
        self._timer = CommTimer([parameter.device for parameter in self._mine])
        self._seconds = self._slowest = 0.0  # of the last exchange: this stage's, any stage's

    @classmethod
    def of(
        cls, ctx: JobContext, module: nn.Sequential, balance: Sequence[int]
    ) -> TiedCopies | None:
        """Return what stages share; None: nothing, or one process has all of them.

        All processes of the job call it at the same place, while they still have all layers.

        Args:
            ctx: The job's context.
            module: The layers.
            balance: Number of layers of each stage, or of each chunk.
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
            ctx.mesh.among(stages)  # which all make at this place
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
        """Return those parameters of this process that norms over all stages count here."""
        return [x for x in parameters if x not in self._counted_elsewhere]

    def copies(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those parameters of which other stages hold a copy."""
        return [x for x in parameters if x in self._mine]

    def names(self) -> list[tuple[str, ...]]:
        """Return the names of each shared parameter, in the whole module's order."""
        return [shared.names for shared in self._shared]

    def listed_names(self) -> dict[nn.Parameter, str]:
        """Return under what name the whole module lists each of this process's copies."""
        return {parameter: shared.name for parameter, shared in self._mine.items()}

    def rejoin(self) -> None:
        """Go on with other replicas, as if anew, between two iterations."""
        self._contributions.clear()
        self._added_up = False

    # --- gradients ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a backward: a sum that gradients are added to is to be counted once."""
        self._contributions.clear()  # of one that failed
        if not self._added_up:
            return
        self._added_up = False
        for parameter in self._counted_elsewhere:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def add_up(self, result: SyncResult, *, timed: bool) -> SyncResult:
        """Add the gradients of all copies up; they are averages over the replicas by now.

        Args:
            result: What was measured so far.
            timed: Whether each parameter's exchange is to be noted.

        Returns:
            The same, with what was measured here. What the exchange takes is known of the one
            before: the slowest stage's, so that all stages have the same.

        Raises:
            ReplicaBrokenError: A process is gone.
            SynchronizationError: A parameter is frozen in one stage and trained in another.
        """
        self._added_up = True
        have = {parameter for parameter in self._mine if parameter.grad is not None}
        in_use, times = self._in_use(have), list(result.times)
        self._timer.start()  # no stage waits for another one's averages any more
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
        """Keep what a micro-batch contributes until :meth:`measure`.

        Args:
            parameter: Of this process.
            arrival: Number of the micro-batch, in the order of backwards.
            gradient: The contribution of this stage.

        Returns:
            Whether it was kept; else no other stage has a copy of the parameter.
        """
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
        """Add the squares of what micro-batches contribute, each once; at the end of a backward.

        Args:
            norms: What they are added to.
            factors: What the square of each micro-batch is multiplied by.
            weights: Of a parameter's squares, or None.

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
        """Return those of this process's copies for which any stage has something to add.

        Args:
            here: For which this one has.
        """
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
        """Return the sum over the stages that share a parameter, all of which call it."""
        if mine is None:
            mine = torch.zeros_like(parameter)
        mine = mine.detach().contiguous()
        everyone = [torch.empty_like(mine) for _ in shared.holders]
        with _reaching_peers():
            dist.all_gather(everyone, mine, group=self._mesh.among(shared.holders))
        total = everyone[0]
        for other in everyone[1:]:
            total += other
        return total

    def _time(self, total: Tensor, started: float) -> GradientTime:
        if total.is_cuda:  # where only the device knows
            torch.cuda.synchronize(total.device)
        size = total.numel() * total.element_size()
        return GradientTime(self._stage, size, started, time.perf_counter(), tied=True)

    # --- a check for debugging -----------------------------------------------------------------

    def compare(self, step: int, digest: Callable[[str, Tensor], bytes]) -> None:
        """Compare the copies of each parameter; all processes of the replica call it.

        Args:
            step: Number of the optimizer step, for the message.
            digest: Of a name and its tensor.

        Raises:
            SynchronizationError: They differ; it names the parameter.
        """
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
    """Return those parameters of this process that norms over all stages count here."""
    return list(parameters) if tied is None else tied.counted(parameters)


@contextmanager
def _reaching_peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise broken_replica("while adding up gradients that stages share", error) from error
