"""Buckets: gradients of a stage that are sent together, as one flat tensor.

As in PyTorch's DistributedDataParallel (Li et al., VLDB 2020), gradients are sent in buckets of
about 25 MiB: large enough to hide latency, small enough that the first is sent while the last is
being computed. Parameters are taken in reverse order, the order in which gradients become final,
from the last stage to the first::

    parameters          stage 0: a b c d        stage 1: e f
    launch order        (f e)  (d c)  (b a)

A bucket holds a copy. The parameters' gradients stay unchanged until the averages are written back,
so a bucket that was sent too early can be sent again. Gradients that are views of the bucket, as
with DistributedDataParallel's ``gradient_as_bucket_view``, would save two copies per step. But the
sum would then overwrite this replica's share, which a late bucket sends again, and a late gradient
would be added to a bucket under way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.device_groups import in_use
from pipollux_hybrid.job.peers import lost_peers

from .sync_result import GradientTime

BUCKET_BYTES = 25 * 2**20
"""Bytes of a bucket on the wire, DistributedDataParallel's default."""
SMALL = 1 << 14
"""Mean number of elements of a gradient below which a call per gradient costs more than a second
pass over memory."""
WIRE_DTYPES = (torch.float32, torch.bfloat16)


class Bucket:
    """Gradients of one stage, device and type on the wire; ``group``: the processes with them."""

    def __init__(
        self,
        stage: int,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.stage = stage
        self.group = group
        self.parameters = list(parameters)
        self.device = parameters[0].device
        sizes = [_real(p.detach()).numel() for p in parameters]
        # Reused in every step: fresh memory costs a page fault every 4 KiB.
        self._flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        self._views = [
            view.view_as(_real(p.detach()))
            for view, p in zip(self._flat.split(sizes), parameters, strict=True)
        ]
        self._complex = any(p.is_complex() for p in parameters)
        self._small = sum(sizes) < SMALL * len(sizes)
        self._streams: dict[int, torch.cuda.Stream] = {}
        """Streams that have added to its gradients, by CUDA's number."""
        self._work: dist.Work | None = None
        self._failure: RuntimeError | None = None
        """Why the sum could not be launched."""
        self.pending = 0
        """Parameters whose gradients are not final yet."""
        self.launched = False
        self.late = False
        self.times: list[GradientTime] | None = None
        """When it was sent and summed in this backward; None: not timed."""
        self._started = 0.0
        self._ended: float | None = None

    def reset(self, *, timed: bool = False) -> None:
        """Begin a backward."""
        self.launched = self.late = False
        self._work = self._failure = None
        self._streams.clear()
        self.times = [] if timed else None

    def arrived(self) -> None:
        """Record that a gradient was added to, on the current stream of this thread."""
        if self.device.type == "cuda":
            # A Stream is an object of Python: one is made for a bucket, not for each gradient.
            number = torch._C._cuda_getCurrentRawStream(self.device.index)
            if number not in self._streams:
                self._streams[number] = torch.cuda.current_stream(self.device)

    def launch(self, weight: float) -> None:
        """Send the gradients, times ``weight``, to be summed over the replicas."""
        self.launched = True
        with self._on_stream():
            self._pack(weight)
            if self.times is not None:
                self._started, self._ended = time.perf_counter(), None
            # The launch order is the same on all replicas, whichever thread launches.
            try:
                self._work = dist.all_reduce(self._flat, group=self.group, async_op=True)
            except RuntimeError as error:
                if in_use() is None:
                    raise
                # Of an aborted group; this may be a thread of autograd's, so wait() raises it.
                self._failure = error
                return
        if self.times is not None and self.device.type != "cuda":
            self._work.get_future().add_done_callback(self._note_end)

    def relaunch(self, weight: float) -> None:
        """Send a bucket again that was sent too early, and drop the first result."""
        self.wait()
        self._streams.clear()
        self.launch(weight)

    def wait(self) -> None:
        """Wait for the sums; on CUDA only the current stream waits. Raises a SynchronizationError
        if a peer is gone, or takes longer than the group's timeout.
        """
        failure, self._failure = self._failure, None
        if self._work is None and failure is None:
            return
        try:
            if failure is not None:
                raise failure
            assert self._work is not None  # noqa: S101  # checked above
            self._work.wait()
        except RuntimeError as error:
            when = f"while averaging the gradients of stage {self.stage}"
            raise lost_peers(when, error) from error
        self._work = None
        if self.times is not None:
            self.times.append(self._time())

    def _note_end(self, _future: Any) -> None:
        self._ended = time.perf_counter()

    def _time(self) -> GradientTime:
        if self.device.type == "cuda":  # only the device knows the end
            torch.cuda.synchronize(self.device)
        end = time.perf_counter() if self._ended is None else self._ended
        size = self._flat.numel() * self._flat.element_size()
        return GradientTime(self.stage, size, self._started, end)

    def write_back(self, factor: float, present: Sequence[bool]) -> None:
        """Set each gradient to the sum times ``factor``.

        Where ``present`` is False, no replica has a gradient that counts, and the parameter gets
        none, as in the plain model.
        """
        for parameter, anywhere in zip(self.parameters, present, strict=True):
            if not anywhere:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        pairs = zip(self.parameters, self._views, strict=True)
        wanted = [(p.grad, view) for p, view in pairs if p.grad is not None]
        if not wanted:
            return
        gradients, views = self._plain(wanted)
        with torch.no_grad():
            if self._is_narrow(gradients):
                torch._foreach_copy_(gradients, views)
                if factor != 1.0:
                    torch._foreach_mul_(gradients, factor)
                return
            if factor != 1.0 and self._small and self._is_alike(gradients):
                self._flat.mul_(factor)  # the next step overwrites it
                factor = 1.0
            _copy_times(factor, views, gradients)

    def _pack(self, weight: float) -> None:
        if weight == 0.0:  # no multiplication: a gradient that does not count may be infinite
            self._flat.zero_()
            return
        pairs = zip(self.parameters, self._views, strict=True)
        wanted = [(p.grad, view) for p, view in pairs if p.grad is not None]
        if len(wanted) < len(self.parameters):
            self._flat.zero_()
        if not wanted:
            return
        gradients, views = self._plain(wanted)
        with torch.no_grad():
            if self._is_narrow(gradients):
                if weight != 1.0:  # weigh first, round once
                    gradients = list(torch._foreach_mul(gradients, weight))
                torch._foreach_copy_(views, gradients)
            elif weight != 1.0 and self._small and self._is_alike(gradients):
                torch._foreach_copy_(views, gradients)
                self._flat.mul_(weight)
            else:
                _copy_times(weight, gradients, views)

    def _plain(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients as real numbers, and their views."""
        gradients, views = [g for g, _ in pairs], [view for _, view in pairs]
        if self._complex:
            gradients = [_real(gradient.detach()) for gradient in gradients]
        return gradients, views

    def _is_alike(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether gradients have the type they are sent as, so that nothing is rounded."""
        return {g.dtype for g in gradients} == {self._flat.dtype}

    def _is_narrow(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether gradients are more precise than the type they are sent as."""
        kinds = {gradient.dtype for gradient in gradients}
        return self._flat.dtype.itemsize < max([kind.itemsize for kind in kinds])

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run the body on a stream that waits for all gradients, in a thread of any device."""
        if self.device.type != "cuda":
            yield
            return
        stream, *others = self._streams.values() or [torch.cuda.current_stream(self.device)]
        for other in others:
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            yield


def make_buckets(
    stages: Sequence[Sequence[nn.Parameter]],
    bucket_bytes: int,
    dtype: torch.dtype | None,
    group: dist.ProcessGroup | None = None,
) -> list[Bucket]:
    """Return the buckets of all stages, given from first to last, in launch order.

    A parameter larger than ``bucket_bytes`` on the wire has a bucket alone. ``dtype`` is the type
    on the wire; None is float32, and float64 for float64 gradients.
    """
    contents = bucket_contents(stages, bucket_bytes, dtype)
    return [Bucket(index, parameters, wire, group) for index, parameters, wire in contents]


def bucket_contents(
    stages: Sequence[Sequence[nn.Parameter]], bucket_bytes: int, dtype: torch.dtype | None
) -> list[tuple[int, list[nn.Parameter], torch.dtype]]:
    """Return stage, parameters and type of each of :func:`make_buckets`, not allocated."""
    contents = []
    for index in reversed(range(len(stages))):
        open_: dict[torch.dtype, list[nn.Parameter]] = {}
        filled: dict[torch.dtype, int] = {}
        for parameter in reversed(stages[index]):
            wire = dtype or _widest(parameter)
            size = _real(parameter.detach()).numel() * wire.itemsize
            if open_.get(wire) and filled[wire] + size > bucket_bytes:
                contents.append((index, open_.pop(wire), wire))
                filled[wire] = 0
            open_.setdefault(wire, []).append(parameter)
            filled[wire] = filled.get(wire, 0) + size
        contents += [(index, parameters, wire) for wire, parameters in open_.items()]
    return contents


def check_wire(reduce_dtype: torch.dtype | None, bucket_bytes: int, num_replicas: int) -> None:
    """Raise a ConfigurationError for a type or size of buckets that cannot be sent."""
    if reduce_dtype is not None and reduce_dtype not in WIRE_DTYPES:
        raise ConfigurationError(
            f"reduce_dtype={reduce_dtype!r}: None (float32, and float64 for float64 "
            "gradients), torch.float32 and torch.bfloat16 are allowed"
        )
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ConfigurationError(
            f"bucket_bytes={bucket_bytes!r}: a whole number of at least 1 is needed"
        )
    if reduce_dtype is torch.bfloat16 and num_replicas > 1 and dist.get_backend() == "gloo":
        try:
            dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16))
        except RuntimeError as error:
            raise ConfigurationError(
                "reduce_dtype=torch.bfloat16: gloo of this version of PyTorch does not add "
                f"bfloat16; leave reduce_dtype at None, or use NCCL ({error})"
            ) from error


def _copy_times(factor: float, sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy tensors of the same shapes times a factor, rounding once."""
    alike = [x.dtype for x in sources] == [x.dtype for x in targets]
    if factor == 1.0:
        torch._foreach_copy_(targets, sources)
    elif alike and not sources[0].is_cuda:
        # One pass over memory instead of two; on a GPU many small kernels would cost more.
        for source, target in zip(sources, targets, strict=True):
            torch.mul(source, factor, out=target)
    elif sources[0].dtype.itemsize > min([t.dtype.itemsize for t in targets]):
        torch._foreach_copy_(targets, torch._foreach_mul(sources, factor))
    else:
        torch._foreach_copy_(targets, sources)
        torch._foreach_mul_(targets, factor)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _widest(parameter: nn.Parameter) -> torch.dtype:
    double = parameter.dtype in (torch.float64, torch.complex128)
    return torch.float64 if double else torch.float32
