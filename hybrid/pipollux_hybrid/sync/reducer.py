"""Counts the gradients of a backward and sends each bucket when it is complete.

A bucket is complete when each of its parameters has received one gradient per pass. Buckets are
sent in a fixed order, the same on all replicas whatever their timing. Counts only decide *when* a
bucket is sent. If a gradient arrives later (two losses of one model in one backward, a layer that
was not used in the step before), the bucket is late: all replicas learn this at the end of the
backward and send it again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipollux_hybrid.job.device_groups import reach
from pipollux_hybrid.job.peers import lost_peers

from .backward_plan import BackwardPlan
from .bucket import Bucket, make_buckets

MOST_AHEAD = 4 << 30
"""Bytes of gradients up to which buckets are allocated ahead; more would take seconds."""
HOLD = 20
"""Synchronisations in which buckets wait for the end of the backward after one was late."""


class Reducer:
    """Gradients that have arrived in the current backward, and the buckets they fill.

    Without ``buckets_wanted``, as with one replica, nothing is sent; otherwise see
    :func:`~pipollux_hybrid.sync.bucket.make_buckets`.
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
        """Whether buckets are sent during the backward."""

    @property
    def passes(self) -> int:
        """Expected number of gradients of each parameter."""
        return self._separate + self._shared

    @property
    def any(self) -> bool:
        """Whether any parameter received a gradient."""
        return bool(self._counts)

    @property
    def surplus(self) -> bool:
        """Whether a parameter received gradients that come from no micro-batch."""
        return any(count > self.passes for count in self._counts.values())

    def count(self, parameter: nn.Parameter) -> int:
        """Return the number of gradients that the parameter has received."""
        return self._counts.get(parameter, 0)

    def successor(self, num_replicas: int, group: dist.ProcessGroup | None) -> Reducer:
        """Return a reducer for other replicas, with the same buckets and no history."""
        several = num_replicas > 1
        successor = Reducer(self._dtype, self._bucket_bytes, buckets_wanted=several, group=group)
        if num_replicas > 1 and self.buckets:  # their memory is allocated
            successor.parameters, successor.buckets = self.parameters, self.buckets
            successor._bucket_of = self._bucket_of
            for bucket in self.buckets:
                bucket.group = group
        return successor

    def make_room(self, stages: Sequence[Sequence[nn.Parameter]]) -> None:
        """Allocate buckets before the first use, in any thread: the first write to memory costs ten
        times what later ones do.
        """
        if sum(p.numel() * p.element_size() for stage in stages for p in stage) <= MOST_AHEAD:
            self._lay_out(stages)

    def prepare_for_backward(
        self, stages: Sequence[Sequence[nn.Parameter]], plan: BackwardPlan, weight: float | None
    ) -> None:
        """Begin a backward; ``weight`` scales gradients on the wire, None: do not synchronise."""
        self._lay_out(stages)
        self._counts = {}
        self._separate, self._shared = plan.num_separate, plan.shares_a_pass
        self._weight, self._next = weight, 0
        for bucket in self.buckets:
            bucket.reset(timed=plan.timed)
        self._count_pending()

    def join(self, plan: BackwardPlan, weight: float | None) -> None:
        """Add another output to the same backward: the passes of both are awaited."""
        self._separate += plan.num_separate
        # Micro-batches that are not recomputed share a graph and arrive as one sum.
        self._shared = self._shared or plan.shares_a_pass
        self._weight = weight if self._weight is None else self._weight
        self._count_pending()

    def mark_ready(self, parameter: nn.Parameter) -> None:
        """Count a gradient of a parameter; send the buckets that are complete."""
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
        """Send the remaining buckets at the end of a backward."""
        self._launch(complete=False)
        self._hold = HOLD if any(b.late for b in self.buckets) else max(self._hold - 1, 0)
        # Parameters without a gradient are not awaited next time, unless they came late once.
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
        """Wait for the sums of all buckets; raise a PeerLostError if a replica is gone."""
        for bucket in self.buckets:
            bucket.wait()
        try:
            for device in {bucket.device for bucket in self.buckets}:
                reach(device, self._group)
        except RuntimeError as error:
            raise lost_peers("while averaging gradients", error) from error

    def report(self, *, counts: bool) -> tuple[list[bool], list[bool]]:
        """Return which buckets are late, and which parameters have a gradient that ``counts``."""
        present = [counts and p.grad is not None for b in self.buckets for p in b.parameters]
        return [bucket.late for bucket in self.buckets], present

    def write_back(self, factor: float, present: Sequence[float]) -> None:
        """Set each gradient to its sum times ``factor``; ``present`` has, for each parameter in
        bucket order, the number of replicas with a gradient.
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
