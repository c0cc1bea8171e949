"""The small message that replicas exchange at every step, beside the gradients.

Stopping, saving and changing the batch size must happen on every replica at the same step, or the
next collective hangs. So at each step boundary every replica contributes one small vector, which is
summed over the replicas: its stop request, its share of the loss, and (from rank 0 alone) whether
to save and which configuration to use next. It is part of the all-reduce of a synchronizing
backward (:meth:`ControlPlane.ride`); an iteration without such a backward makes one at its end.

Replicas at different points of their training loops would wait for each other forever or mix up
each other's gradients. So each vector also carries a checksum x of the replica's position, and x²:
the checksums of R replicas are equal where R·Σx² = (Σx)²; otherwise all replicas learn of it at the
same step. Vectors of backwards and of boundaries have the same length, so that they can match each
other and report the difference.

The vector has its own gloo group whatever the backend of the gradients, and costs no GPU
synchronization.

When a replica is lost, an exchange may succeed in some processes only. In a multi-process pipeline
the processes of one replica therefore share the result
(:meth:`~pipollux_hybrid.job.mesh.ProcessMesh.share`): if one of them has it, all do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from pipollux_hybrid.errors import PeerLostError, SynchronizationError
from pipollux_utils.text import count

from .groups import ReplicaGroup
from .mesh import ProcessMesh
from .peer_loss import PeerLoss
from .peers import lost_peers
from .self_checks import SelfCheck, share_of

_MARK = 0xFFFFF
"""Mask of a position checksum: few enough bits for sums of squares to be exact in float64."""


@dataclass(frozen=True, kw_only=True)
class ControlMessage:
    """One replica's contribution, or the sum over all replicas."""

    stop: bool = False
    """Some replica was asked to stop."""
    save: bool = False
    """A periodic checkpoint is due (rank 0)."""
    atomic_bsz: int = 0
    """Atomic batch size that rank 0 proposes; 0 for no change."""
    accum_steps: int = 0
    num_microbatches: int = 0
    """Micro-batches of that proposal; 0 where the script chooses them."""
    loss_sum: float = 0.0
    """Sum over samples of the previous step's loss."""
    loss_samples: int = 0
    formed: int = 0
    """Number of the pending membership whose groups this replica has formed; 0: none."""
    formed_sqr: int = 0
    """Its square: all replicas have formed the same one where R·Σx² = (Σx)²."""
    proposed: int = 0
    """Number of the newest membership known to rank 0."""
    pending: int = 0
    """Number of accumulators with amounts that only this replica holds."""
    generators: tuple[int, ...] = (0, 0, 0)
    """Checksums of the random generators, to find out which are equal on all replicas."""
    generators_sqr: tuple[int, ...] = (0, 0, 0)

    def numbers(self) -> list[float]:
        """Return the message as numbers that can be summed over replicas."""
        return [
            float(self.stop),
            float(self.save),
            float(self.atomic_bsz),
            float(self.accum_steps),
            float(self.num_microbatches),
            self.loss_sum,
            float(self.loss_samples),
            float(self.formed),
            float(self.formed_sqr),
            float(self.proposed),
            float(self.pending),
            *map(float, self.generators),
            *map(float, self.generators_sqr),
        ]

    def vector(self) -> torch.Tensor:
        """Return :meth:`numbers` as float64, shape [17]."""
        return torch.tensor(self.numbers(), dtype=torch.float64)

    @classmethod
    def read(cls, vector: torch.Tensor) -> ControlMessage:
        """Return the message of a (summed) vector of shape [17]."""
        return cls.of(vector.tolist())

    @classmethod
    def of(cls, numbers: Sequence[float]) -> ControlMessage:
        """Return the message of (summed) numbers."""
        stop, save, atomic_bsz, accum_steps, microbatches, loss_sum, loss_samples = numbers[:7]
        formed, formed_sqr, proposed, pending = numbers[7:11]
        return cls(
            stop=stop > 0,
            save=save > 0,
            atomic_bsz=round(atomic_bsz),
            accum_steps=round(accum_steps),
            num_microbatches=round(microbatches),
            loss_sum=loss_sum,
            loss_samples=round(loss_samples),
            formed=round(formed),
            formed_sqr=round(formed_sqr),
            proposed=round(proposed),
            pending=round(pending),
            generators=tuple(map(round, numbers[11:14])),
            generators_sqr=tuple(map(round, numbers[14:])),
        )


NOTHING = ControlMessage()
EXCHANGE = "an exchange between all processes"
"""Call name where the caller gives none."""
_HEAD = len(NOTHING.numbers()) + 4


class ControlPlane:
    """Exchanges one :class:`ControlMessage` per step among all replicas; a peer slower than
    ``timeout`` seconds ends the job. With one replica, messages are returned unchanged.
    """

    def __init__(self, num_replicas: int, timeout: float) -> None:
        self._num_replicas = num_replicas
        self.timeout = timeout
        """Seconds to wait for a slow replica."""
        self._group: ReplicaGroup | None = None
        if num_replicas > 1:
            made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._group = ReplicaGroup(made, num_replicas)
        self.losses = PeerLoss()
        self.exchanges = 0
        """Completed exchanges in this membership; at a boundary replicas differ by at most one,
        where an all-reduce has succeeded on some only."""
        self.last: ControlMessage | None = None
        self.mesh: ProcessMesh | None = None
        self.settings: dict[str, str | None] = {}
        """Settings compared by :func:`~pipollux_hybrid.job.agreement.agree`, by name."""
        self.checks: list[SelfCheck] = []
        """Checks compared between all processes at every exchange."""
        self._message: ControlMessage | None = None
        """This replica's contribution to the current exchange."""
        self._left: Exception | None = None
        """What ended a step in this process while others wait for its micro-batches."""
        self._agreed: ControlMessage | None = None
        """Its result, if a backward has carried it."""
        self._place = ""
        self._riding = 0

    @property
    def group(self) -> ReplicaGroup | None:
        """The gloo group of all replicas; None for one replica."""
        return self._group

    @property
    def under_way(self) -> bool:
        """Whether a message was launched and its result not collected yet."""
        return self._message is not None

    def rejoin(self, group: ReplicaGroup | None) -> None:
        """Continue with the replicas of another membership, between two exchanges."""
        self._group, self._riding = group, 0
        self._num_replicas = 1 if group is None else group.size
        self.exchanges, self.last = 0, None

    def abandon(self) -> None:
        """Drop the current exchange and the group, in which a replica was lost."""
        self._message = self._agreed = self._group = None
        self._place = ""

    def close(self) -> None:
        """Release the group: its gloo thread would abort the process at interpreter shutdown."""
        self._message = self._agreed = self._group = None

    def launch(self, message: ControlMessage, place: str = "") -> None:
        """Send this replica's message with the next synchronizing backward; ``place`` is its
        position in the training loop, which must be equal on all replicas.
        """
        self._message, self._place = message, place
        self._agreed = message if self._group is None else None

    def expect_numbers(self, count: int) -> None:
        """Set how many numbers the first backward sends, alike on all replicas: an exchange
        without a backward has as many, so that it meets those with one.
        """
        self._riding = count

    def ride(self, numbers: Sequence[float], failure: PeerLostError | None = None) -> list[float]:
        """Sum a synchronizing backward's numbers, of equal count, over the replicas, with the
        launched message. ``failure`` is raised if this process's part of the backward failed.

        Raises:
            SynchronizationError: A replica is elsewhere in its training loop.
            RuntimeError: A replica is gone, or silent for longer than the group's timeout.
        """
        self._riding = len(numbers)
        vector = self._vector(numbers, rides=True)
        agreed, sums = self._read(self._sum(vector, failure=failure))
        if self._agreed is None and self._message is not None:
            self._agreed = agreed
        return sums

    def collect(self) -> ControlMessage | None:
        """Return the result of the launched exchange, None if there is none. Raises a
        SynchronizationError if a replica is gone, or elsewhere in its training loop.
        """
        if self._message is None:
            return None
        if self._agreed is None:
            self._meet(f"a step boundary, {self._place}" if self._place else "a step boundary")
            vector = self._vector([0.0] * self._riding, rides=False)
            try:
                vector = self._sum(vector, self.timeout)
            except SynchronizationError:
                raise  # has a message already
            except RuntimeError as error:
                raise lost_peers("at a step boundary", error) from error
            self._agreed, _ = self._read(vector)
        agreed, self._message, self._agreed, self._place = self._agreed, None, None, ""
        self.exchanges, self.last = self.exchanges + 1, agreed
        return agreed

    def exchange(self, message: ControlMessage, place: str = "") -> ControlMessage:
        """Launch and collect in one call, where training waits anyway."""
        self.collect()
        self.launch(message, place)
        agreed = self.collect()
        assert agreed is not None  # noqa: S101  # it was launched two lines above
        return agreed

    def barrier(self) -> None:
        """Wait until every replica calls this."""
        self.exchange(ControlMessage())

    def check(self) -> None:
        """Compare the checks of every exchange now, without affecting a launched message. Raises a
        SynchronizationError if a process is elsewhere, differs in a check, or is gone.
        """
        if self._group is None:
            return
        self._meet(EXCHANGE)
        vector = self._vector([0.0] * self._riding, rides=False, message=NOTHING)
        try:
            vector = self._sum(vector)
        except SynchronizationError:
            raise  # has a message already
        except RuntimeError as error:
            raise lost_peers("while comparing common settings", error) from error
        self._read(vector)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather one CPU tensor of equal shape from every replica, in the order of ranks."""
        if self._group is None:
            return [tensor]
        self._meet(EXCHANGE)
        with self._gathering():
            return self._group.all_gather(tensor)

    def gather_bytes(self, content: bytes, call: str = EXCHANGE) -> list[bytes]:
        """Gather bytes of any length from every replica, by rank; ``call`` is for messages."""
        if self._group is None:
            return [content]
        self._meet(call)
        with self._gathering():
            return self._group.all_gather_bytes(content)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Refuse all later exchanges if an exception ends the body, in which other processes wait
        for this one.
        """
        try:
            yield
        except SynchronizationError:
            raise  # they have ended, or know
        except Exception as error:  # whatever it is: the others wait
            self._left = error
            raise

    def check_left(self) -> None:
        """Raise a SynchronizationError if an exception has left such a body."""
        if self._left is not None:
            raise SynchronizationError(
                f"a {type(self._left).__name__} has ended a call of the model in this process "
                f"({self._left}), and other processes of the replica wait in it for this one's "
                "micro-batches: do not catch it; let the job end, and start it again from its last "
                "checkpoint"
            )

    def _meet(self, call: str) -> None:
        self.check_left()
        if self.mesh is not None:
            self.mesh.calls.meet(call)

    def _refuse_places(self) -> NoReturn:
        """Gather and report different positions; all replicas detect them in the same exchange."""
        places = [place.decode() for place in self.gather_bytes(self._place.encode())]
        outside, mine = "a point outside of loops", self._place
        others = "; ".join(
            f"replica {rank} is at {place or outside}"
            for rank, place in enumerate(places)
            if place != mine
        )
        raise SynchronizationError(
            f"replica {dist.get_rank()} of {self._num_replicas} is at {mine or outside}, and "
            f"another replica is not: every replica must be given the same data sets (same "
            f"samples, same order, not sharded by hand) and take the same loops ({others})"
        )

    def _vector(
        self, numbers: Sequence[float], *, rides: bool, message: ControlMessage | None = None
    ) -> torch.Tensor:
        """Return message, position, whether a backward sends them, and its numbers, as float64."""
        if message is None:
            sent = self._message is None or self._agreed is not None
            message = NOTHING if sent or self._message is None else self._message
        mark = float(zlib.crc32(self._place.encode()) & _MARK)
        share = 0.0
        if self._group is not None:
            share = share_of(self.checks, self._group.process_group.rank(), self._num_replicas)
        head = [*message.numbers(), mark, mark * mark, share, float(rides)]
        return torch.tensor([*head, *numbers], dtype=torch.float64)

    def _read(self, vector: torch.Tensor) -> tuple[ControlMessage, list[float]]:
        totals = vector.tolist()
        head, sums = totals[:_HEAD], totals[_HEAD:]
        mark, mark_sqr, differing, riding = map(int, head[-4:])
        if self._num_replicas * mark_sqr != mark * mark:
            self._refuse_places()
        if differing:
            self._compare()
        if riding not in (0, self._num_replicas):
            here = f"replica {dist.get_rank()} of {self._num_replicas}"
            raise SynchronizationError(
                f"{here} is at {self._place or 'a point outside of loops'}, where "
                f"{count(riding, 'replica')} ran a backward and the others did not: decide on all "
                "replicas alike, or multiply the loss by zero"
            )
        return ControlMessage.of(head[:-4]), sums

    def _compare(self) -> None:
        word = "replica" if self.mesh is None else "rank"
        for check in self.checks:
            check.compare(self.gather_bytes(check.content()), word)

    def _sum(
        self,
        vector: torch.Tensor,
        timeout: float | None = None,
        failure: PeerLostError | None = None,
    ) -> torch.Tensor:
        """Return the sum of a vector over all processes; all of a replica get it, or none. The
        vector is overwritten; with ``failure`` this process does not take part.
        """
        error: RuntimeError | None = failure
        if self._group is not None and failure is None:
            try:
                self._group.all_reduce(vector, timeout)
            except RuntimeError as failed:
                error = failed
        if self._is_shared:
            assert self.mesh is not None  # noqa: S101  # else it is not
            if error is not None:
                self.losses.hang_up()  # another process of this replica may wait for this one
            found = self.mesh.share(vector if error is None else None, len(vector))
            if found is not None and failure is None:
                return found
        if error is not None:
            raise error
        return vector

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Gather within; a failure in one process of a replica fails in all of them."""
        failure: RuntimeError | None = None
        try:
            yield
        except RuntimeError as error:
            failure = error
        others = 0.0
        if self._is_shared:
            assert self.mesh is not None  # noqa: S101  # else it is not
            if failure is not None:
                self.losses.hang_up()
            (others,) = self.mesh.sum_over_stages([float(failure is not None)])
        if failure is not None or others > 0.0:
            cause = failure or RuntimeError("another process of this replica lost them")
            raise lost_peers("while comparing common settings", cause) from failure

    @property
    def _is_shared(self) -> bool:
        """Whether the processes of a replica share the outcome of a collective."""
        return self.mesh is not None and self.losses.recoverable(False)
