"""A data loader with an adaptive batch size, and a position that survives restarts.

Names are AdaptDL's. :class:`ElasticSampler` divides map-style data sets; of iterable ones every
replica reads the same stream (:mod:`~pipollux_hybrid.elastic.stream`).
"""

from __future__ import annotations

import ctypes
import itertools
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from pipollux_hybrid.errors import Allowed, ConfigurationError, check_values, is_whole, switch
from pipollux_hybrid.job.batch import BatchShape, BatchSlice, num_parts

from .loop import ElasticLoop
from .sampler import ElasticSampler, parts_of_iteration
from .stage_loading import PairCollate, StageLoading
from .stream import PartCollate, SampleStream
from .stream_check import StreamCheck, content_of

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: the signal that a process gets when the thread that forked it ends."""
AT_EXIT = 10
"""Priority of what multiprocessing runs at the end of a process before it ends children."""
FIXED = {
    "batch_size": "call autoscale_batch_size to have it adapt, or make another loader",
    "drop_last": "every sample is taken exactly once an epoch",
    "sampler": "use shuffle=True or a torch.utils.data.Subset",
    "batch_sampler": "use shuffle=True or a torch.utils.data.Subset",
}
"""Attributes that the loader manages itself, with the alternative for the user."""
LOADER = {
    "dataset": Allowed(
        lambda value: (
            not (
                isinstance(value, (DataLoader, str, type))
                or (isinstance(value, dict) and 0 not in value)
            )
        ),
        "a data set is needed, map-style or a torch.utils.data.IterableDataset: of a DataLoader "
        "its .dataset (give options such as collate_fn here again), of a dict of splits one split",
    ),
    # torch.utils.data.DataLoader's default is None, for False.
    "shuffle": Allowed(
        lambda value: value is None or isinstance(value, bool), "True or False is needed"
    ),
    "seed": Allowed(is_whole, "a whole number, the same on all replicas, is needed"),
    "load_per_stage": switch(),
}


class AdaptiveDataLoader(DataLoader[T], ElasticLoop[T]):
    """A :class:`torch.utils.data.DataLoader` over the replicas of a job.

    Every sample is taken exactly once an epoch, over any stops, restarts and changes of replicas or
    batch size. Each pass of the loop body works on one atomic batch; gradients are accumulated on
    accumulation steps and synchronized on the last one, without a change to the loop.

    Example::

        loader = AdaptiveDataLoader(dataset, batch_size=64, shuffle=True)
        loader.autoscale_batch_size(1024, local_bsz_bounds=(16, 128), gradient_accumulation=True)
        for epoch in remaining_epochs_until(30):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss_function(model(inputs), targets).backward()
                optimizer.step()

    Args:
        dataset: A map-style data set (with ``__len__`` and ``__getitem__``), or an
            :class:`~torch.utils.data.IterableDataset` that yields the same samples in the same
            order on every replica and in every attempt. If the latter has ``set_epoch(epoch)``, it
            is called before each epoch. Its ``skip(num_samples)``, called after a restart, must
            return the data set without its first samples, which are else read again and skipped.
        batch_size: Samples of one optimizer step over ALL replicas; with autoscaling the initial
            one; with push and pull that of each replica.
        shuffle: Whether each epoch has its own order; an iterable data set shuffles itself.
        seed: Seed of these orders; the same on all replicas.
        load_per_stage: Whether each process of a multi-process pipeline loads only what its stage
            needs: the first one the inputs, the last one the targets if the data set is a
            ``StackDataset(inputs, targets)``, else both of them whole batches. Other tensors of the
            batch have no values there, only their shape and dtype. Without effect elsewhere.
        **options: Passed to :class:`torch.utils.data.DataLoader` (``num_workers``, ``collate_fn``,
            ``pin_memory``, …); ``sampler``, ``batch_sampler`` and ``drop_last`` are refused. An
            iterable data set is read by at most one worker process. ``collate_fn`` may be a tuple
            of two functions, for the inputs and the targets of samples that are pairs.

    Raises:
        ConfigurationError: An argument is out of range or does not suit the data set.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        load_per_stage: bool = False,
        **options: Any,
    ) -> None:
        given = {"dataset": dataset, "shuffle": shuffle, "seed": seed}
        check_values(LOADER, {**given, "load_per_stage": load_per_stage})
        if isinstance(options.get("collate_fn"), tuple):
            options["collate_fn"] = PairCollate(options["collate_fn"])
        self._per_stage = load_per_stage
        shuffle = bool(shuffle)
        _check_options(options)
        streams = isinstance(dataset, IterableDataset)
        self._sampler: ElasticSampler | None = None
        if streams:
            _check_stream_options(shuffle, options)
            identity: dict[str, Any] = {"samples": "a stream"}
        elif isinstance(dataset, Sized):
            self._sampler = ElasticSampler(len(dataset), shuffle=shuffle, seed=seed)
            identity = {"samples": len(dataset), "shuffle": shuffle, "seed": seed}
        else:
            raise ConfigurationError(
                f"{type(dataset).__name__} has no length: AdaptiveDataLoader needs a map-style "
                "data set or a torch.utils.data.IterableDataset"
            )
        self._prepare(batch_size, identity)
        if streams:  # on all replicas before their first exchange, which compares all checks
            self._context.component(StreamCheck)
        # For users that read its attributes; _batches fetches the samples.
        super().__init__(dataset, batch_size=batch_size, shuffle=False, **options)
        self._seed = seed
        self._lists = _Lists()
        self._stream = SampleStream(cast("IterableDataset[Any]", dataset)) if streams else None
        generator = ElasticSampler(1, shuffle=False, seed=seed).generator(0)
        options = {"generator": generator, **options}
        self._worker_start = WorkerStart(options.get("worker_init_fn"))
        options["worker_init_fn"] = self._worker_start
        self._stages: StageLoading | None = None
        if load_per_stage and self._context.mesh is not None:
            self._stages = StageLoading(self._context.mesh, dataset, options.get("collate_fn"))
        source: Any = dataset
        if self._stages is not None and self._stages.part is not None:
            source, options["collate_fn"] = self._stages.part, _unchanged
        if self._stream is not None:
            options["collate_fn"] = PartCollate(options.get("collate_fn") or default_collate)
            self._batches: DataLoader[Any] = DataLoader(self._stream, batch_size=None, **options)
        else:
            self._batches = DataLoader(source, batch_sampler=cast("Any", self._lists), **options)
        if options.get("persistent_workers"):
            ending = (weakref.ref(self._batches),)
            Finalize(None, _end_workers, args=ending, exitpriority=AT_EXIT)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and self.__dict__.get("_batches") is not None:
            raise ConfigurationError(
                f"{name} of an AdaptiveDataLoader cannot be changed: {FIXED[name]}"
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """Return this replica's number of batches in a whole epoch at the current batch size; a
        TypeError for iterable data sets without length.
        """
        num_samples = len(cast("Sized", self.dataset))
        # Replicas that push and pull have other numbers of steps; those that start together share.
        return -(-num_parts(num_samples, self._shape()) // self._context.env.expected_replicas)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # base: a private type
        """Iterate over this replica's atomic batches, from the position of the last attempt."""
        return ElasticLoop.__iter__(self)

    def _segment(self) -> Iterator[tuple[BatchSlice, T]]:
        """Yield parts and batches from the current position on, prefetched by the workers."""
        self._seed_workers()
        if self._stream is not None:
            rank = self._context.env.rank
            self._stream.begin(self._epochs.epoch, self._state.index, self._shape(), rank)
            return self._read()
        return self._fetch()

    def _read(self) -> Iterator[tuple[BatchSlice, T]]:
        check = self._context.component(StreamCheck)
        for part, marks, batch in self._loaded():
            check.note(marks)
            yield part, batch

    def _description(self) -> str:
        """Return the loop's description, equal on all replicas, with a digest of data in memory."""
        made = self.__dict__.get("_batches") is not None
        content = content_of(self.dataset) if made and self._stream is None else None
        known = "" if content is None else f", of content {content:08x}"
        loads = ", load_per_stage=True" if self._per_stage else ""
        return f"{super()._description()}{known}{loads}"

    def _fetch(self) -> Iterator[tuple[BatchSlice, T]]:
        fetching: deque[BatchSlice] = deque()

        def lists() -> Iterator[Sequence[int]]:
            for part in self._parts():
                fetching.append(part)  # workers prefetch some batches, which arrive in order
                yield part.indices

        self._lists.source = lists() if self._stages is None else self._stages.requests(lists())
        for batch in self._loaded():
            yield fetching.popleft(), batch

    def _loaded(self) -> Iterable[Any]:
        """Return what the workers fetch; with values for this stage only, if it is so wanted."""
        if self._stages is None:
            return self._batches
        if self._stages.loads:
            return self._stages.shared(self._batches)
        return self._stages.shared(self._lists if self._stream is None else itertools.repeat(None))

    def _order(self) -> torch.Tensor | None:
        return None if self._sampler is None else self._sampler.order(self._epochs.epoch)

    def _parts(self) -> Iterator[BatchSlice]:
        assert self._sampler is not None  # noqa: S101  # only streams have none
        if self._learner is not None:
            return self._learner.parts(self._sampler.order(self._epochs.epoch), self._shape(), _cut)
        return self._sampler.parts(
            epoch=self._epochs.epoch,
            index=self._state.index,
            shape=self._shape(),
            rank=self._context.env.rank,
        )

    def _seed_workers(self) -> None:
        """Seed the workers: random transforms differ between replicas, epochs and segments."""
        self._worker_start.ends_along = threading.current_thread() is threading.main_thread()
        env = self._context.env
        number = env.rank if env.servers is None else env.replica
        place = self._epochs.epoch, number, self._state.index
        # The hash of a tuple of integers is equal in every process.
        seed = hash((self._seed, *place)) % (1 << 63)
        cast("Any", self._batches.generator).manual_seed(seed)


def _cut(index: int, count: int, shape: BatchShape) -> Iterator[tuple[range, BatchSlice]]:
    """Return the parts of an iteration whose positions servers have leased."""
    return parts_of_iteration(index, count, shape, 0, is_last=False)


def _check_options(options: dict[str, Any]) -> None:
    for name in ("sampler", "batch_sampler", "drop_last"):
        if options.pop(name, None):
            raise ConfigurationError(
                f"AdaptiveDataLoader takes no {name}: it divides the samples among the replicas "
                "itself, each exactly once an epoch; leave out a DistributedSampler, and for other "
                "samplers use shuffle=True or a torch.utils.data.Subset"
            )
    if not options.get("in_order", True):
        raise ConfigurationError(
            "in_order=False: batches belong to places in an iteration, so they must come in order; "
            "leave the option out"
        )


def _check_stream_options(shuffle: bool, options: dict[str, Any]) -> None:
    if shuffle:
        raise ConfigurationError(
            "shuffle=True with an iterable data set: it decides on its own order; shuffle inside "
            "it, by the epoch given to its set_epoch(epoch)"
        )
    if options.get("num_workers", 0) > 1:
        raise ConfigurationError(
            f"num_workers={options['num_workers']} with an iterable data set: several workers' "
            "streams would mix in an order that changes with the batch size; use 0 or 1"
        )
    if options.get("persistent_workers"):
        raise ConfigurationError(
            "persistent_workers=True with an iterable data set: its worker restarts with each "
            "epoch and batch size; leave the option out"
        )


def _unchanged(batch: Any) -> Any:
    return batch


class _Lists:
    """A batch sampler over lists of indices that change with every segment."""

    source: Iterator[Sequence[int]] = iter(())

    def __iter__(self) -> Iterator[Sequence[int]]:
        return self.source


class WorkerStart:
    """Initialises a worker process of a loader, which then survives a stop request.

    torchrun's agent and terminals signal a whole process group, so a stop on which the replicas
    have not agreed yet also reaches the workers, and torch's handlers would end them in the middle
    of a step. But a worker ends with its replica, at once: it has inherited the connections with
    other replicas, which would wait for a killed replica while they are open. ``then`` is the
    user's own ``worker_init_fn``.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self.ends_along = False
        """Whether the thread that forks the worker lives as long as the replica."""

    def __call__(self, worker_id: int) -> None:
        """Ignore Ctrl-C and the first SIGTERM: the replica ends its workers."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _pass_over)
        if self.ends_along and sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if self._then is not None:
            self._then(worker_id)


def _end_workers(reference: weakref.ref[DataLoader[Any]]) -> None:
    """End the workers of a loader that still has some when the process ends: multiprocessing sends
    them one SIGTERM, which they pass over, and waits for them.
    """
    batches = reference()
    for worker in getattr(getattr(batches, "_iterator", None), "_workers", ()):
        worker.kill()


def _pass_over(number: int, _frame: FrameType | None) -> None:
    # A second SIGTERM comes from the replica, which ends a worker that does not answer.
    signal.signal(number, signal.SIG_DFL)
