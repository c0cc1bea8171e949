"""Loading of batches in a multi-process pipeline by the stages that need them.

The first stage needs the inputs and the last one the targets. The other processes of the replica
get the same batch without values (:mod:`~pipollux_hybrid.pipeline.unloaded`): per batch, all of
them exchange a small message with the sizes of its tensors.

A data set of pairs has to be a ``StackDataset`` of two data sets for the first stage to load only
inputs and the last one only targets. Of other data sets both load whole batches.

Random numbers are those of a replica that loads everything in one process. The first stage draws
them, and the others take over its generators. In the last stage, which does not load the inputs,
targets must not draw any: they would be the same numbers as those of the inputs.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, StackDataset, Subset, default_collate

from pipollux_hybrid.checkpoint.rng_state import host_generators, set_host_generators
from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.mesh import ProcessMesh
from pipollux_hybrid.job.replica_calls import BatchDigest
from pipollux_hybrid.pipeline import named_tuples
from pipollux_hybrid.pipeline.host_random import equal_states, host_states, seeded
from pipollux_hybrid.pipeline.microbatch import PLAIN
from pipollux_hybrid.pipeline.samples import plain_batch
from pipollux_hybrid.pipeline.unloaded import Unloaded
from pipollux_hybrid.sync.batch_digest import digest_of

CALL = "the next batch of an AdaptiveDataLoader"
COMPARED = 4
"""Samples of the first batch that both ends of the pipeline load and compare."""
Collate = Callable[[list[Any]], Any]


class PairCollate:
    """Collates inputs and targets of samples that are pairs, each with its own function."""

    def __init__(self, collates: Sequence[Collate]) -> None:
        if len(collates) != 2 or not all(callable(collate) for collate in collates):
            raise ConfigurationError(
                "collate_fn is a tuple: one function for the inputs and one for the targets of "
                "samples (inputs, targets) are needed, or a single function for both"
            )
        self.collates = tuple(collates)

    def __call__(self, samples: list[Any]) -> list[Any]:
        """Return [inputs, targets]."""
        return [
            collate([sample[place] for sample in samples])
            for place, collate in enumerate(self.collates)
        ]


class Request(NamedTuple):
    """The samples of a batch, and of these the ones to compare."""

    indices: Sequence[int]
    compared: Sequence[int]


class Fetched(NamedTuple):
    """The inputs or targets of a batch, and digests of the compared samples; 0: none."""

    batch: Any
    inputs: int
    targets: int


class StagePart:
    """The inputs or the targets of a data set, as whole batches, in a process or its workers.

    It is no ``Dataset`` and has slots: a ``worker_init_fn`` that sets attributes of the script's
    data set fails here, instead of changing another object.
    """

    __slots__ = ("_collates", "_halves", "_place")

    def __init__(self, halves: Sequence[Any], collates: Sequence[Collate], place: int) -> None:
        self._halves, self._collates, self._place = halves, collates, place

    def __getitems__(self, request: Request) -> Fetched:
        """Load a batch."""
        digests = [self._digest(place, request.compared) for place in (0, 1)]
        before = _generators()
        batch = self._load(self._place, request.indices)
        if self._place == 1 and _have_drawn(before):
            raise ConfigurationError(
                "load_per_stage=True: the targets draw random numbers, which the last stage cannot "
                "draw after those of the inputs as it does not load these; draw them from a "
                "torch.Generator of the targets' data set, or load batches whole: give a data set "
                "that is no StackDataset"
            )
        return Fetched(batch, *digests)

    def _load(self, place: int, indices: Sequence[int]) -> Any:
        dataset = self._halves[place]
        together = getattr(dataset, "__getitems__", None)
        samples = together(indices) if together else [dataset[index] for index in indices]
        return self._collates[place](samples)

    def _digest(self, place: int, indices: Sequence[int]) -> int:
        """Return a digest of some samples, which both ends load with the same random numbers."""
        if not indices:
            return 0
        with torch.random.fork_rng(devices=[]), seeded(0):
            torch.default_generator.manual_seed(0)
            leaves = pytree.tree_leaves(plain_batch(self._load(place, indices)))
        others = repr([leaf for leaf in leaves if isinstance(leaf, (str, int, float))])
        digest = digest_of([leaf for leaf in leaves if isinstance(leaf, Tensor)], whole=True)
        return zlib.crc32(others.encode(), digest & 0xFFFFFFFF) + 1


class StageLoading:
    """Shares batches between the processes of a replica, each of which loads what it needs."""

    def __init__(self, mesh: ProcessMesh, dataset: Any, collate: Collate | None) -> None:
        self._mesh = mesh
        self._is_last = mesh.stage == mesh.num_stages - 1
        collates = _collates_of(collate)
        self._halves = None if collates is None else halves_of(dataset)
        self.loads = mesh.stage == 0 or self._is_last
        """Whether this process loads anything."""
        self.part = (
            StagePart(self._halves, collates, int(self._is_last))
            if self.loads and self._halves is not None and collates is not None
            else None
        )
        """This stage's part of the data set; None: it loads whole batches, or nothing."""
        self._has_compared = self._halves is None

    def requests(self, lists: Iterable[Sequence[int]]) -> Iterator[Any]:
        """Yield what the data set is asked for, of lists of indices."""
        if self.part is None:
            yield from lists
            return
        compares = not self._has_compared
        for indices in lists:
            yield Request(indices, indices[:COMPARED] if compares else ())
            compares = False

    def shared(self, loaded: Iterable[Any]) -> Iterator[Any]:
        """Yield whole items from those that this process has loaded; any in middle stages."""
        draws = self._mesh.stage == 0
        before = _generators() if draws else None
        for item in loaded:
            yield self._share(item, before)
            before = _generators() if draws else None

    def _share(self, item: Any, before: Any) -> Any:
        digest = None
        if isinstance(item, Fetched):
            digest = BatchDigest(inputs=item.inputs, targets=item.targets)
            item = item.batch
        content = b""
        if self._mesh.stage == 0:
            content = _without_values(item, host_generators() if _have_drawn(before) else None)
        elif self._is_last and self._halves is not None:
            content = _without_values(item)
        found = self._mesh.calls.gather(CALL, content, digest)
        self._has_compared = True
        first, generators = _read(found[0])
        if generators is not None and self._mesh.stage > 0:
            set_host_generators(generators)
        if self._halves is None:
            return item if self.loads else first
        last, _ = _read(found[-1])
        return [item if self._mesh.stage == 0 else first, item if self._is_last else last]


def halves_of(dataset: Any) -> Sequence[Any] | None:
    """Return the data sets of inputs and targets of a data set of pairs; None if it is another."""
    # Exactly these classes: a subclass may combine or transform samples.
    if type(dataset) is StackDataset and isinstance(dataset.datasets, tuple):
        return dataset.datasets if len(dataset.datasets) == 2 else None
    if type(dataset) is Subset:
        halves = halves_of(dataset.dataset)
        return halves and [Subset(half, dataset.indices) for half in halves]
    if type(dataset) is ConcatDataset:
        parts = [halves_of(part) for part in dataset.datasets]
        if None not in parts:
            return [ConcatDataset(half) for half in zip(*cast("Any", parts), strict=True)]
    return None


def _collates_of(collate: Collate | None) -> Sequence[Collate] | None:
    if isinstance(collate, PairCollate):
        return collate.collates
    return (default_collate, default_collate) if collate in (None, default_collate) else None


def _without_values(item: Any, generators: bytes | None = None) -> bytes:
    """Return a message with all of a batch but the values of its tensors."""
    leaves, structure = pytree.tree_flatten(item)
    try:
        named = named_tuples.names_of(structure, "a batch")
        content = {
            "named": named,
            "structure": pytree.treespec_dumps(structure),
            "leaves": [_layout(leaf) for leaf in leaves],
            "generators": generators,
        }
    except (ConfigurationError, NotImplementedError, TypeError) as error:
        raise ConfigurationError(
            "load_per_stage=True sends all of a batch but the values of its tensors to the other "
            f"stages, which failed ({error}): have collate_fn return tuples, lists and dicts of "
            "tensors and plain values"
        ) from error
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _layout(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else None
        return {"tensor": (tuple(leaf.shape), strides, leaf.dtype, str(leaf.device))}
    if isinstance(leaf, range):
        return {"range": (leaf.start, leaf.stop, leaf.step)}
    if leaf is None or isinstance(leaf, PLAIN):
        return leaf
    raise TypeError(f"it holds a {type(leaf).__name__}")


def _read(message: bytes) -> tuple[Any, bytes | None]:
    """Return the batch of a message, with unloaded tensors, and the generators."""
    content = torch.load(io.BytesIO(message), weights_only=True)
    named_tuples.register(content["named"])
    structure = pytree.treespec_loads(content["structure"])
    leaves = [_leaf(layout) for layout in content["leaves"]]
    return pytree.tree_unflatten(leaves, structure), content["generators"]


def _leaf(layout: Any) -> Any:
    match layout:
        case {"tensor": given}:
            return _unloaded(*given)
        case {"range": given}:
            return range(*given)
    return layout


def _unloaded(
    size: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: str
) -> Tensor:
    like = torch.empty(size, dtype=dtype, device="meta")
    made = like if strides is None else like.as_strided(size, strides)
    return Unloaded(made, torch.device(device))


def _generators() -> Any:
    return torch.get_rng_state(), host_states()


def _have_drawn(before: Any) -> bool:
    cpu, host = _generators()
    return not (torch.equal(cpu, before[0]) and equal_states(host, before[1]))
