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

from pipollux_hybrid.job.device_groups import reach
from pipollux_hybrid.job.peers import lost_peers

from .backward_plan import BackwardPlan
from .bucket import Bucket, make_buckets
from .parameter_hooks import NOTHING, Trained

MOST_AHEAD = 4 << 30
"""Bytes of gradients up to which buckets are allocated ahead; more would take seconds."""
HOLD = 20
"""Synchronizations in which buckets wait for the end of the backward after one was late."""


class Reducer:
    """Gradients that have arrived in the current backward, and the buckets they fill.

    Parameters are given by number, see :class:`~pipollux_hybrid.sync.parameter_hooks.Trained`: a
    lookup by parameter takes Python calls. Without ``buckets_wanted``, as with one replica, nothing
    is sent; otherwise see :func:`~pipollux_hybrid.sync.bucket.make_buckets`.
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
        self._trained = NOTHING
        self.buckets: list[Bucket] = []
        self._numbers: list[list[int]] = []
        """The parameters of each bucket."""
        self._bucket_of: list[Bucket | None] = []
        self.counts: list[int] = []
        """Number of gradients that each parameter has received in this backward."""
        self._separate = 0
        self._shared = False
        self._passes = 0
        """Expected number of gradients of each parameter."""
        self._unused: list[bool] = []
        self._surprising: list[bool] = []
        self._next = 0
        self._weight: float | None = None
        self._hold = 0
        self.overlap = True
        """Whether buckets are sent during the backward."""

    @property
    def any(self) -> bool:
        """Whether any parameter received a gradient."""
        return any(self.counts)

    @property
    def surplus(self) -> bool:
        """Whether a parameter received gradients that come from no micro-batch."""
        return max(self.counts, default=0) > self._passes

    def successor(self, num_replicas: int, group: dist.ProcessGroup | None) -> Reducer:
        """Return a reducer for other replicas, with the same buckets and no history."""
        several = num_replicas > 1
        successor = Reducer(self._dtype, self._bucket_bytes, buckets_wanted=several, group=group)
        if num_replicas > 1 and self.buckets:  # their memory is allocated
            successor._adopt(self._trained, self.buckets)
            for bucket in self.buckets:
                bucket.group = group
        return successor

    def make_room(self, trained: Trained) -> None:
        """Allocate buckets before the first use, in any thread: the first write to memory costs ten
        times what later ones do.
        """
        parameters = [p for some in trained.stages for _, _, p in some]
        if sum(p.numel() * p.element_size() for p in parameters) <= MOST_AHEAD:
            self._lay_out(trained)

    def prepare_for_backward(
        self, trained: Trained, plan: BackwardPlan, weight: float | None
    ) -> None:
        """Begin a backward; ``weight`` scales gradients on the wire, None: do not synchronize."""
        self._lay_out(trained)
        self.counts = [0] * len(trained.flags)
        self._separate, self._shared = plan.num_separate, plan.shares_a_pass
        self._passes = plan.passes
        self._weight, self._next = weight, 0
        for bucket in self.buckets:
            bucket.reset(timed=plan.timed)
        self._count_pending()

    def join(self, plan: BackwardPlan, weight: float | None) -> None:
        """Add another output to the same backward: the passes of both are awaited."""
        self._separate += plan.num_separate
        # Micro-batches that are not recomputed share a graph and arrive as one sum.
        self._shared = self._shared or plan.shares_a_pass
        self._passes = self._separate + self._shared
        self._weight = weight if self._weight is None else self._weight
        self._count_pending()

    def mark_ready(self, number: int) -> None:
        """Count a gradient of a parameter; send the buckets that are complete."""
        count = self.counts[number] = self.counts[number] + 1
        bucket = self._bucket_of[number]
        if bucket is None or self._weight is None:
            return
        if bucket.device.type == "cuda":
            bucket.arrived()
        if bucket.launched:
            bucket.late = self._surprising[number] = True
            return
        if self._unused[number]:
            self._unused[number] = False
            bucket.pending += 1
        if count == self._passes:
            bucket.pending -= 1
            if bucket.pending == 0 and self.overlap and not self._hold:
                self._launch(complete=True)

    def flush(self) -> None:
        """Send the remaining buckets at the end of a backward."""
        self._launch(complete=False)
        self._hold = HOLD if any(b.late for b in self.buckets) else max(self._hold - 1, 0)
        # Parameters without a gradient are not awaited next time, unless they came late once.
        pairs = zip(self.counts, self._surprising, strict=True)
        self._unused = [count == 0 and not came_late for count, came_late in pairs]

    def relaunch(self, late: Sequence[bool]) -> None:
        """Send the buckets again that were late on some replica."""
        assert self._weight is not None  # noqa: S101  # set where backwards synchronize
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
        assert self._weight is not None  # noqa: S101  # set where backwards synchronize
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if complete and bucket.pending > 0:
                return
            self._next += 1
            bucket.launch(self._weight)

    def _count_pending(self) -> None:
        counts, passes, unused = self.counts, self._passes, self._unused
        for bucket, numbers in zip(self.buckets, self._numbers, strict=True):
            bucket.pending = len([1 for k in numbers if counts[k] < passes and not unused[k]])

    def _lay_out(self, trained: Trained) -> None:
        if trained.flags == self._trained.flags:
            return
        buckets = []
        if self._buckets_wanted:
            stages = [[parameter for _, _, parameter in some] for some in trained.stages]
            buckets = make_buckets(stages, self._bucket_bytes, self._dtype, self._group)
        self._adopt(trained, buckets)

    def _adopt(self, trained: Trained, buckets: list[Bucket]) -> None:
        before, size = self._trained.flags, len(trained.flags)
        self._trained, self.buckets = trained, buckets
        if not before:
            self._unused, self._surprising = [False] * size, [False] * size
        else:  # a parameter that was frozen has not been unused
            self._unused = [a and b for a, b in zip(self._unused, before, strict=True)]
        number_of = {id(p): number for some in trained.stages for number, _, p in some}
        self._numbers = [[number_of[id(p)] for p in bucket.parameters] for bucket in buckets]
        self._bucket_of = [None] * size
        for bucket, numbers in zip(buckets, self._numbers, strict=True):
            for number in numbers:
                self._bucket_of[number] = bucket
