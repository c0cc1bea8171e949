"""The small message that replicas exchange once a step, beside the gradients.

Stopping, saving and changing the batch size must happen on every replica at the same step, or the
next collective hangs. So at each step boundary every replica contributes one small vector, which is
summed over the replicas: whether it was asked to stop, its share of the loss, and (from rank 0
alone) whether to save and which configuration to use next. It rides on the sums that a
synchronising backward makes anyway (:meth:`ControlPlane.ride`), so that a step of training has one
small collective and not two; an iteration without such a backward makes one at its end.

Replicas that are not at the same place of their training loops would wait for each other for ever,
or, worse, take each other's gradients for their own. So each vector also carries a checksum of
where its replica is, and the sum of its square: all checksums x of R replicas are equal where
R·Σx² = (Σx)², and otherwise all replicas learn of it at the same step. The vectors of backwards and
of boundaries are of one length, so that they can meet and tell.

The vector travels over a gloo group of its own, whatever carries the gradients, so it costs no GPU
synchronisation.

Where a replica is lost, an exchange may come about in some processes and not in others. Those of
one replica have to be of one mind: where stages have processes, they tell each other how it has
ended (:meth:`~pipollux_hybrid.job.mesh.ProcessMesh.share`), and what came to one has come to all.
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

from .groups import ReplicaGroup
from .mesh import ProcessMesh
from .peer_loss import PeerLoss
from .peers import lost_peers
from .self_checks import SelfCheck, share_of

__all__ = ["ControlMessage", "ControlPlane"]

_MARK = 0xFFFFF
"""Bits of a checksum of places: few enough for sums of squares to be exact in float64."""


@dataclass(frozen=True, kw_only=True)
class ControlMessage:
    """One replica's contribution, and, summed, what all replicas agreed on."""

    stop: bool = False
    """Some replica was asked to stop."""
    save: bool = False
    """Rank 0 finds that a periodic checkpoint is due."""
    atomic_bsz: int = 0
    """Atomic batch size that rank 0 proposes; 0 for no change."""
    accum_steps: int = 0
    """Accumulation steps that go with it."""
    num_microbatches: int = 0
    """Micro-batches that go with it; 0 where the script decides on them."""
    loss_sum: float = 0.0
    """Sum over samples of the loss of the step before."""
    loss_samples: int = 0
    """Number of samples in that sum."""
    formed: int = 0
    """Number of the membership whose groups this replica has formed; 0: none."""
    formed_sqr: int = 0
    """Its square: all replicas mean the same one where R·Σx² = (Σx)²."""
    proposed: int = 0
    """Number of the newest membership that rank 0 has heard of."""
    pending: int = 0
    """Accumulators that hold amounts which this replica alone knows."""
    generators: tuple[int, ...] = (0, 0, 0)
    """Checksums of the random generators, where it matters whether they are the same on all."""
    generators_sqr: tuple[int, ...] = (0, 0, 0)
    """Their squares."""

    def numbers(self) -> list[float]:
        """Return the message as numbers, which may be summed over replicas."""
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
        """Return the same as float64, shape [17]."""
        return torch.tensor(self.numbers(), dtype=torch.float64)

    @classmethod
    def read(cls, vector: torch.Tensor) -> ControlMessage:
        """Return the message that a (summed) vector of shape [17] stands for."""
        return cls.of(vector.tolist())

    @classmethod
    def of(cls, numbers: Sequence[float]) -> ControlMessage:
        """Return the message that (summed) numbers stand for."""
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
"""What a call is named whose caller does not say more."""
_HEAD = len(NOTHING.numbers()) + 4


class ControlPlane:
    """Exchanges one :class:`ControlMessage` a step among all replicas.

    Args:
        num_replicas: Number R of replicas; with one, messages come back as they are.
        timeout: Seconds after which a slow peer ends the job.
    """

    def __init__(self, num_replicas: int, timeout: float) -> None:
        self._num_replicas = num_replicas
        self._timeout = timeout
        self._group: ReplicaGroup | None = None
        if num_replicas > 1:
            made = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            self._group = ReplicaGroup(made, num_replicas)
        self.losses = PeerLoss()
        """What becomes of a step in which a replica is lost."""
        self.exchanges = 0
        """Exchanges that have come about in this membership; at one boundary replicas differ by one
        at most, where some have it from an all-reduce and others have not."""
        self.last: ControlMessage | None = None
        """What the last of them gave."""
        self.mesh: ProcessMesh | None = None
        """The groups of this process where each stage has one."""
        self.settings: dict[str, str | None] = {}
        """What :func:`~pipollux_hybrid.job.agreement.agree` has compared, by name."""
        self.checks: list[SelfCheck] = []
        """What every exchange compares between all processes."""
        self._message: ControlMessage | None = None
        """What this replica contributes to the exchange under way."""
        self._agreed: ControlMessage | None = None
        """What came of it, if a backward has taken it along."""
        self._place = ""
        self._riding = 0
        """Numbers that ride with a backward."""

    @property
    def group(self) -> ReplicaGroup | None:
        """The gloo group of all replicas; None for one replica."""
        return self._group

    @property
    def under_way(self) -> bool:
        """Whether a message was launched and its answer not collected yet."""
        return self._message is not None

    def rejoin(self, group: ReplicaGroup | None) -> None:
        """Go on with the replicas of another membership, between two exchanges.

        Args:
            group: All of its replicas; None for one.
        """
        self._group, self._riding = group, 0
        self._num_replicas = 1 if group is None else group.size
        self.exchanges, self.last = 0, None

    def abandon(self) -> None:
        """Give up the exchange under way and the group, in which a replica was lost."""
        self._message = self._agreed = self._group = None
        self._place = ""

    def close(self) -> None:
        """Release the group, so that it ends with the process group and not with the interpreter.

        A gloo thread that gives a tensor back while the interpreter shuts down aborts the process.
        """
        self._message = self._agreed = self._group = None

    def launch(self, message: ControlMessage, place: str = "") -> None:
        """Send this replica's message with the next backward that synchronises.

        Args:
            message: What this replica contributes.
            place: Where in its training loop this replica is, which must be where all are.
        """
        self._message, self._place = message, place
        self._agreed = message if self._group is None else None

    def ride(self, numbers: Sequence[float], failure: PeerLostError | None = None) -> list[float]:
        """Add numbers up over the replicas, and send the message under way with them.

        Args:
            numbers: Of a backward that synchronises; as many on every replica.
            failure: Why this process's part of the backward cannot come about, so that it does not
                take part; what is raised then.

        Returns:
            Their sums.

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
        """Return what the replicas agreed on in the exchange under way, None if there is none.

        Raises:
            SynchronizationError: A replica is gone, or elsewhere in its training loop.
        """
        if self._message is None:
            return None
        if self._agreed is None:
            self._meet(f"a step boundary, {self._place}" if self._place else "a step boundary")
            vector = self._vector([0.0] * self._riding, rides=False)
            try:
                vector = self._sum(vector, self._timeout)
            except SynchronizationError:
                raise  # which says what it is already
            except RuntimeError as error:
                raise lost_peers("at a step boundary", error) from error
            self._agreed, _ = self._read(vector)
        agreed, self._message, self._agreed, self._place = self._agreed, None, None, ""
        self.exchanges, self.last = self.exchanges + 1, agreed
        return agreed

    def exchange(self, message: ControlMessage, place: str = "") -> ControlMessage:
        """Send and read at once, for the moments when training waits anyway."""
        self.collect()
        self.launch(message, place)
        agreed = self.collect()
        assert agreed is not None  # noqa: S101  # it was launched two lines above
        return agreed

    def barrier(self) -> None:
        """Return when every replica has come here."""
        self.exchange(ControlMessage())

    def check(self) -> None:
        """Compare now what every exchange compares, whatever is under way.

        Raises:
            SynchronizationError: A process is elsewhere or has something else, or is gone.
        """
        if self._group is None:
            return
        self._meet(EXCHANGE)
        vector = self._vector([0.0] * self._riding, rides=False, message=NOTHING)
        try:
            vector = self._sum(vector)
        except SynchronizationError:
            raise  # which says what it is already
        except RuntimeError as error:
            raise lost_peers("while comparing what all must have in common", error) from error
        self._read(vector)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather one CPU tensor of equal shape from every replica, in the order of ranks."""
        if self._group is None:
            return [tensor]
        self._meet(EXCHANGE)
        with self._gathering():
            return self._group.all_gather(tensor)

    def gather_bytes(self, content: bytes, call: str = EXCHANGE) -> list[bytes]:
        """Gather bytes of any length from every replica, in the order of ranks.

        Args:
            content: This replica's.
            call: What the script has called, for messages.
        """
        if self._group is None:
            return [content]
        self._meet(call)
        with self._gathering():
            return self._group.all_gather_bytes(content)

    def _meet(self, call: str) -> None:
        """Make sure that all processes of this replica come here."""
        if self.mesh is not None:
            self.mesh.calls.meet(call)

    def _refuse_places(self) -> NoReturn:
        """Refuse replicas at different places; all find out at once, so they can exchange them."""
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
        """Return message, place, whether a backward sends them, and the numbers, as float64.

        Args:
            numbers: Of a backward.
            rides: Whether it is one.
            message: What to send in the place of the message under way.
        """
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
        """Return the message and the numbers that a sum of vectors stands for."""
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
                f"{here} is at {self._place or 'a point outside of loops'}, where {riding} "
                "replicas ran a backward and the others did not: decide on all replicas alike, or "
                "multiply the loss by zero"
            )
        return ControlMessage.of(head[:-4]), sums

    def _compare(self) -> None:
        """Compare what differs; all processes find out at once."""
        word = "replica" if self.mesh is None else "rank"
        for check in self.checks:
            check.compare(self.gather_bytes(check.content()), word)

    def _sum(
        self,
        vector: torch.Tensor,
        timeout: float | None = None,
        failure: PeerLostError | None = None,
    ) -> torch.Tensor:
        """Return the sum of a vector over all processes; all of a replica get it, or none.

        Args:
            vector: This process's, which is overwritten.
            timeout: Seconds to wait; None: the group's.
            failure: Why this process does not take part.
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
        """Gather within; if it fails in one process of a replica it fails in all."""
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
            raise lost_peers("while comparing what all must have in common", cause) from failure

    @property
    def _is_shared(self) -> bool:
        """Whether the processes of a replica tell each other how a collective of all has ended."""
        return self.mesh is not None and self.losses.recoverable(False)
