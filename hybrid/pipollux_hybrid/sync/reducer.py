"""Counting the gradients of one backward, and sending each bucket when its last one is in.

A bucket is complete when each of its parameters has received a gradient once a pass. Buckets go in
a fixed order, each when all before it have gone, so all replicas send the same ones in the same
order whatever their timing. Counts only decide *when* a bucket goes. Should a gradient come after
its bucket has gone (two losses of one model in one backward, a layer that was not used in the step
before), the bucket is late, all replicas hear of it at the end of the backward, and it goes
again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .backward_plan import BackwardPlan
from .bucket import Bucket, make_buckets

__all__ = ["Reducer"]

MOST_AHEAD = 4 << 30
"""Bytes of gradients for which buckets are made ahead: others wait for it, for some seconds."""
HOLD = 20
"""Synchronisations for which buckets wait for the end of the backward after one was late."""


class Reducer:
    """Gradients that have arrived in the backward under way, and the buckets they fill.

    Args:
        dtype: What gradients travel as; None: :func:`~pipollux_hybrid.sync.bucket.make_buckets`
            chooses.
        bucket_bytes: Bytes of a bucket on the wire.
        buckets_wanted: Whether anything will travel; with one replica nothing does.
        group: Whose processes have the same parameters; None: all.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        bucket_bytes: int,
        *,
        buckets_wanted: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._group = group
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._buckets_wanted = buckets_wanted
        self.parameters: list[nn.Parameter] = []
        """Trainable parameters in this backward."""
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._counts: dict[nn.Parameter, int] = {}
        self._separate = 0
        self._shared = False
        self._unused: set[nn.Parameter] = set()
        self._surprising: set[nn.Parameter] = set()
        self._next = 0
        self._weight: float | None = None
        self._hold = 0
        self.overlap = True
        """Whether buckets go while the backward is still under way."""

    @property
    def passes(self) -> int:
        """How often each parameter is expected to receive a gradient."""
        return self._separate + self._shared

    @property
    def any(self) -> bool:
        """Whether any parameter received a gradient."""
        return bool(self._counts)

    @property
    def surplus(self) -> bool:
        """Whether a parameter received gradients that do not come from a micro-batch."""
        return any(count > self.passes for count in self._counts.values())

    def count(self, parameter: nn.Parameter) -> int:
        """Return the number of gradients that the parameter has received."""
        return self._counts.get(parameter, 0)

    def successor(self, num_replicas: int, group: dist.ProcessGroup | None) -> Reducer:
        """Return one for another number of replicas, with the same buckets, as far as it has any.

        What was learnt of backwards is forgotten, as after a restart.

        Args:
            num_replicas: Number R of replicas.
            group: Whose processes have the same parameters now; None: all.
        """
        several = num_replicas > 1
        successor = Reducer(self._dtype, self._bucket_bytes, buckets_wanted=several, group=group)
        if num_replicas > 1 and self.buckets:  # whose memory is there
            successor.parameters, successor.buckets = self.parameters, self.buckets
            successor._bucket_of = self._bucket_of
            for bucket in self.buckets:
                bucket.group = group
        return successor

    def make_room(self, stages: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make the buckets of these parameters ahead; in any thread, before it is used.

        The first write to memory costs ten times what the next ones do.
        """
        if sum(p.numel() * p.element_size() for stage in stages for p in stage) <= MOST_AHEAD:
            self._lay_out(stages)

    def prepare_for_backward(
        self, stages: Sequence[Sequence[nn.Parameter]], plan: BackwardPlan, weight: float | None
    ) -> None:
        """Prepare for a backward that starts.

        Args:
            stages: Trainable parameters of each stage.
            plan: What is expected of it.
            weight: What this replica's gradients are multiplied by when they are sent; None if this
                backward does not synchronise.
        """
        self._lay_out(stages)
        self._counts = {}
        self._separate, self._shared = plan.num_separate, plan.shares_a_pass
        self._weight, self._next = weight, 0
        for bucket in self.buckets:
            bucket.reset(timed=plan.timed)
        self._count_pending()

    def join(self, plan: BackwardPlan, weight: float | None) -> None:
        """Join another output to the same backward: the passes of both are awaited."""
        self._separate += plan.num_separate
        # What is not recomputed meets in one graph, and arrives as one sum.
        self._shared = self._shared or plan.shares_a_pass
        self._weight = weight if self._weight is None else self._weight
        self._count_pending()

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Mark a gradient of a parameter as received."""
        count = self._counts[parameter] = self._counts.get(parameter, 0) + 1
        bucket = self._bucket_of.get(parameter)
        if bucket is None or self._weight is None:
            return
        bucket.arrived()
        if bucket.launched:
            bucket.late = True
            self._surprising.add(parameter)
            return
        if parameter in self._unused:
            self._unused.discard(parameter)
            bucket.pending += 1
        if count == self.passes:
            bucket.pending -= 1
            if self.overlap and not self._hold:
                self._launch(complete=True)

    def flush(self) -> None:
        """Send what has not been sent at the end of a backward."""
        self._launch(complete=False)
        self._hold = HOLD if any(b.late for b in self.buckets) else max(self._hold - 1, 0)
        # Parameters without a gradient are not waited for next time, unless that went wrong once.
        self._unused = {
            p for p in self.parameters if p not in self._counts and p not in self._surprising
        }

    def relaunch(self, late: Sequence[bool]) -> None:
        """Send the buckets again that were late on some replica."""
        assert self._weight is not None  # noqa: S101  # set where backwards synchronise
        for bucket, again in zip(self.buckets, late, strict=True):
            if again:
                bucket.relaunch(self._weight)

    def wait(self) -> None:
        """Wait for the sums of all buckets.

        Raises:
            PeerLostError: A replica is gone.
        """
        for bucket in self.buckets:
            bucket.wait()

    def report(self, *, counts: bool) -> tuple[list[bool], list[bool]]:
        """Return which buckets are late, and which parameters have a gradient.

        Args:
            counts: Whether this replica has samples that count.
        """
        present = [counts and p.grad is not None for b in self.buckets for p in b.parameters]
        return [bucket.late for bucket in self.buckets], present

    def write_back(self, factor: float, present: Sequence[float]) -> None:
        """Make each gradient its sum, which is there, times ``factor``.

        Args:
            factor: One over the weight of all replicas together.
            present: For each parameter, in the order of buckets, replicas with a gradient.
        """
        offset = 0
        for bucket in self.buckets:
            here = present[offset : offset + len(bucket.parameters)]
            offset += len(bucket.parameters)
            bucket.write_back(factor, [count > 0.0 for count in here])

    def _launch(self, *, complete: bool) -> None:
        assert self._weight is not None  # noqa: S101  # set where backwards synchronise
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if complete and bucket.pending > 0:
                return
            self._next += 1
            bucket.launch(self._weight)

    def _count_pending(self) -> None:
        for bucket in self.buckets:
            bucket.pending = sum(
                self.count(p) < self.passes for p in bucket.parameters if p not in self._unused
            )

    def _lay_out(self, stages: Sequence[Sequence[nn.Parameter]]) -> None:
        """Make the buckets of these parameters, if they are not there already."""
        parameters = [parameter for stage in stages for parameter in stage]
        if len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        ):
            return
        self.parameters = parameters
        self._unused &= set(parameters)
        if self._buckets_wanted:
            self.buckets = make_buckets(stages, self._bucket_bytes, self._dtype, self._group)
            self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
