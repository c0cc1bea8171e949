"""Sums over all replicas that survive restarts: losses, counts of correct answers, histograms.

Each replica adds up its own amounts, which are summed when the script reads them and at every
checkpoint. The interface is AdaptDL's. Code between the loops over loaders runs again after a
restart (:mod:`~pipollux_hybrid.elastic.epoch`), so an accumulator remembers the changes and reads
of such code in the current epoch, skips these changes, and returns the same totals again.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import torch

from pipollux_hybrid.checkpoint.manager import load_state
from pipollux_hybrid.checkpoint.state import State
from pipollux_hybrid.errors import ConfigurationError, SynchronizationError
from pipollux_hybrid.job.context import JobContext, context
from pipollux_hybrid.pipeline.unloaded import is_loaded, refusal
from pipollux_hybrid.resize.elastic_membership import elastic_membership

from .accumulator_values import Key, PendingSum, Summable, add, check_key, checked, on_cpu
from .epoch import epoch_state
from .loop import numbered_name, refuse_inside_loop

Summables = dict[Key, Summable]


SYNC = "the synchronized() of an Accumulator, or a checkpoint"


class AccumulatorState(State):
    """The state of an accumulator."""

    takes_over = False

    def __init__(self, ctx: JobContext, values: Summables) -> None:
        super().__init__(numbered_name(ctx, "accumulator", "pt"))
        self._context = ctx
        self._changes_to_save: dict[str, int] = {}
        self.totals: Summables = values
        """Sums over all replicas as of the last sync; equal on all."""
        self.pending: Summables = {}
        """Amounts that this replica has added since."""
        self.changes: dict[str, int] = {}
        """Number of changes made outside of loops, for the phases that a restart runs again."""
        self.changes_before: dict[str, int] = {}
        """The largest number on any replica in the checkpoint."""
        self.read: dict[str, list[Summables]] = {}
        """The totals that each synchronized block outside of loops has read, by phase."""

    def sync(self) -> None:
        """Add the pending amounts of all replicas to the totals."""
        ctx = self._context
        known = {key: amount for key, amount in self.pending.items() if is_loaded(amount)}
        unknown = sorted(self.pending.keys() - known.keys(), key=str)
        mine = (_copy(known), unknown, zlib.crc32(_bytes(self.totals)), self.changes)
        everyone = [_read(content) for content in ctx.control.gather_bytes(_bytes(mine), SYNC)]
        if len({sent.checksum for sent in everyone}) > 1:
            raise SynchronizationError(
                "the totals of an Accumulator differ between replicas: inside synchronized() every "
                "replica must make the same changes, so move what depends on the rank out of it"
            )
        self.pending = {}
        self._changes_to_save = dict(self.changes_before)
        processes = ctx.env.processes_per_replica
        for first in range(0, len(everyone), processes):
            for key, amount in _amounts(everyone[first : first + processes]).items():
                self.totals[key] = add(key, self.totals.get(key, 0), amount)
            for phase, count in everyone[first].changes.items():
                most = max(self._changes_to_save.get(phase, 0), count)
                self._changes_to_save[phase] = most

    def is_pending(self) -> bool:
        """Return whether this replica has added amounts that the others do not have."""
        return bool(self.pending)

    def remember(self) -> Callable[[], None]:
        """Copy the tables only: amounts are replaced, not changed in place."""
        totals, pending = dict(self.totals), dict(self.pending)
        changes, before = dict(self.changes), dict(self.changes_before)
        read = {phase: list(found) for phase, found in self.read.items()}

        def put_back() -> None:
            self.totals, self.pending = totals, pending
            self.changes, self.changes_before, self.read = changes, before, read

        return put_back

    def publish(self, phase: str, number: int) -> None:
        """Publish the totals of a synchronized block outside of loops for joining replicas."""
        membership = elastic_membership(self._context)
        if membership is not None and self._context.env.leads and self._context.joins is None:
            membership.totals.publish(self.name, phase, number, _bytes(self.read[phase][number]))

    def published(self, phase: str, number: int) -> Summables:
        """Return the totals of that block in the job that this replica is about to join."""
        membership = elastic_membership(self._context)
        assert membership is not None  # noqa: S101  # else there is no job to join
        content = membership.joining.totals(self.name, phase, number)
        found: Summables = torch.load(io.BytesIO(content), weights_only=True)
        return found

    def regrouped(self) -> None:
        """Publish all totals again: the replica that published them may be the lost one."""
        for phase, found in self.read.items():
            for number in range(len(found)):
                self.publish(phase, number)

    def rejoined(self) -> None:
        """Drop amounts added before joining: the others have added them."""
        self.pending = {}
        self.regrouped()

    def save(self, fileobj: BinaryIO) -> None:
        """Write the totals, and the changes and reads outside of loops."""
        content = {"totals": self.totals, "changes": self._changes_to_save, "read": self.read}
        torch.save(content, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Read the output of :meth:`save`."""
        content = torch.load(fileobj, weights_only=True)
        self.totals, self.changes_before, self.read = (
            content[name] for name in ("totals", "changes", "read")
        )


class Accumulator(MutableMapping[Key, Any]):
    """A dictionary of sums over all replicas and all attempts of the job.

    Outside of :meth:`synchronized` it only supports additions; inside, it is a plain dictionary of
    totals, and every replica must apply the same operations to it.

    Example::

        accum = Accumulator()
        for epoch in remaining_epochs_until(30):
            for inputs, targets in loader:
                ...
                accum["loss_sum"] += loss.detach() * len(targets)
                accum["total"] += len(targets)
            with accum.synchronized():
                print("loss", accum["loss_sum"] / accum["total"])
                accum.clear()

    Values are numbers (integers stay exact, others are float64) and tensors, which are added up
    element by element as int64 or float64, on their own device, without waiting for it. Keys are
    strings or integers, and may differ between replicas.

    Args:
        *args: Initial content, as for ``dict``.
        **kwargs: The same by keyword.

    Raises:
        ConfigurationError: It is created inside the body of a loop over a loader, or with a key or
            value that cannot be summed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ctx = context()
        refuse_inside_loop(ctx, "Accumulator")
        self._context = ctx
        self._epochs = epoch_state(ctx)
        values = {
            check_key(key): checked(key, value) for key, value in dict(*args, **kwargs).items()
        }
        self._state = AccumulatorState(ctx, {key: on_cpu(value) for key, value in values.items()})
        load_state(self._state)
        self._visible: Summables | None = None
        self._blocks: dict[str, int] = {}

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Sum the values of all replicas, to be read inside the block.

        All replicas enter it at the same point of the script. Inside, values may also be set or
        removed, equally on all replicas.

        Raises:
            SynchronizationError: Replicas made different changes in the last such block.
        """
        if self._visible is not None:
            yield self
            return
        self._forget_phases()
        self._visible = self._totals()
        try:
            yield self
        finally:
            self._visible = None

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add amounts to values, where ``dict.update`` would replace them."""
        for key, amount in dict(*args, **kwargs).items():
            self._add(check_key(key), checked(key, amount))

    def subtract(self, *args: Any, **kwargs: Any) -> None:
        """Subtract amounts from values; takes the arguments of :meth:`update`."""
        for key, amount in dict(*args, **kwargs).items():
            self._add(check_key(key), -checked(key, amount))

    def __iadd__(self, other: Mapping[Key, Any] | Iterable[tuple[Key, Any]]) -> Accumulator:
        self.update(other)
        return self

    def __isub__(self, other: Mapping[Key, Any] | Iterable[tuple[Key, Any]]) -> Accumulator:
        self.subtract(other)
        return self

    def __getitem__(self, key: Key) -> Any:
        """Return the total inside :meth:`synchronized`, else the operand of ``+=`` and ``-=``."""
        if self._visible is not None:
            return self._visible[key]
        return PendingSum(check_key(key), 0)

    def __setitem__(self, key: Key, value: Any) -> None:
        if self._visible is not None:
            self._visible[check_key(key)] = checked(key, value)
            return
        if not isinstance(value, PendingSum) or value.key != key:
            raise ConfigurationError(
                f"accumulator[{key!r}] was set outside of synchronized(): there it can only be "
                "added to, with += or update()"
            )
        self._add(key, value.amount)

    def __delitem__(self, key: Key) -> None:
        del self._readable()[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._readable())

    def __len__(self) -> int:
        return len(self._readable())

    def __contains__(self, key: object) -> bool:
        return key in self._readable()

    def __repr__(self) -> str:
        shown = "only synchronized" if self._visible is None else repr(self._visible)
        return f"Accumulator({shown})"

    def _readable(self) -> Summables:
        if self._visible is None:
            raise ConfigurationError(
                "an Accumulator was read outside of synchronized(), where a replica knows its own "
                "share only: read it inside `with accumulator.synchronized():`"
            )
        return self._visible

    def _add(self, key: Key, amount: Summable) -> None:
        if self._visible is not None:
            raise ConfigurationError(
                f"accumulator[{key!r}] was added to inside synchronized(), where values are sums "
                "over all replicas already: add before the block"
            )
        if self._context.batch.loop is None and self._was_done():
            return
        micro_step = self._context.batch.micro_step
        if micro_step is not None and micro_step.num_samples == 0:
            return  # padding: another replica counts its sample
        pending = self._state.pending
        pending[key] = add(key, pending.get(key, 0), amount)

    def _was_done(self) -> bool:
        """Return whether this change was already made outside of loops before the restart."""
        state, phase = self._state, self._epochs.phase
        state.changes[phase] = state.changes.get(phase, 0) + 1
        return state.changes[phase] <= state.changes_before.get(phase, 0)

    def _totals(self) -> Summables:
        """Return the totals for a block; those of its first run if it runs again."""
        state = self._state
        if self._context.batch.loop is not None:
            state.sync()
            return state.totals
        phase = self._epochs.phase
        read = state.read.setdefault(phase, [])
        number = self._blocks.get(phase, 0)
        self._blocks[phase] = number + 1
        if number < len(read):
            state.publish(phase, number)
            return _copy(read[number])
        if self._context.joins is not None:
            return state.published(phase, number)
        state.sync()
        read.append(_copy(state.totals))
        state.publish(phase, number)
        return state.totals

    def _forget_phases(self) -> None:
        kept = ("start", self._epochs.phase)
        state = self._state
        _keep(state.changes, kept)
        _keep(state.changes_before, kept)
        _keep(state.read, kept)
        _keep(self._blocks, kept)


def _keep(memory: dict[str, Any], phases: tuple[str, ...]) -> None:
    for phase in [phase for phase in memory if phase not in phases]:
        del memory[phase]


def _copy(amounts: Summables) -> Summables:
    return {key: on_cpu(amount) for key, amount in amounts.items()}


def _bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class _Sent(NamedTuple):
    """The contribution of a process to the totals."""

    amounts: Summables
    unknown: list[Key]
    """Keys whose amounts depend on a part of a batch that another stage has loaded."""
    checksum: int
    changes: dict[str, int]


def _read(content: bytes) -> _Sent:
    return _Sent(*torch.load(io.BytesIO(content), weights_only=True))


def _amounts(stages: Sequence[_Sent]) -> Summables:
    """Return the amounts of a replica: its processes add the same, as far as they know it."""
    first, *others = stages
    found = dict(first.amounts)
    for key in first.unknown:
        known = [stage.amounts[key] for stage in others if key in stage.amounts]
        if not known:
            raise refusal(f"the amount of accumulator[{key!r}]")
        found[key] = known[0]
    return found
