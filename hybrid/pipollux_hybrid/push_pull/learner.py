"""A replica's side of push and pull: when to push which fragment, and what to continue from.

Time runs to the right; H = 6 steps, P = 2 fragments, τ = 1::

    step       1   2   3   4   5   6   7   8   9
    fragment 0         push            …       push     change since the pull before
                          pulled
    fragment 1                     push
                                      pulled

With Θ the parameters that were pulled last and θ the replica's own, a push sends Δ = Θ − θ. The
pull returns Θ' that includes it, and the replica continues from Θ' plus what it has changed
meanwhile, which is part of the next Δ: no sample's change is lost or sent twice.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError, PeerLostError
from pipollux_hybrid.job.context import AtServers
from pipollux_hybrid.warning import warn
from pipollux_perfmodel.timing.params import AUTO as AUTO_INTERVAL

from .agreement import settings_of
from .compression import ErrorFeedback
from .fragments import check_layers, fragments_of, layer_parameters, layer_sizes, master_value
from .joining import Joining
from .key_range import FENCED, PAST, Place
from .leases import Cut, Leases, Span
from .options import AUTO, PushPull
from .transport import ServerError, require_zmq
from .worker import Handle, KVWorker, Pulled

if TYPE_CHECKING:
    from pipollux_hybrid.job.batch import BatchShape, BatchSlice
    from pipollux_hybrid.job.context import JobContext

ALIGNING = 15.0
"""Seconds of waiting for other replicas after which all fragments are pushed."""
LEAVING = 5.0
"""Seconds that the end of the script waits for the servers to note it."""
COMPRESSED = 4
"""Compressed pushes that have as many bytes as an outer step."""
REASONS = {
    FENCED: "was lost for the servers for a while",
    PAST: "is ahead of a server that was restored",
}
"""Why a replica joins again, by the error."""
SMOOTHING = 0.2
"""Weight of the newest measured time in the mean."""
SMOOTHING_ROUNDS = 0.5
"""The same of the steps of a round, which have a mean of their own."""
_SETTLED = 100
"""Successive leases with one step per round after which ``sync_every="auto"`` counts as 1."""


@dataclass
class Fragment:
    """Layers that are pushed together."""

    keys: list[int]
    age: int = 0
    """Steps since its last push."""
    number: int = 0
    """Pushes of it by this member."""
    spans: list[Span] = field(default_factory=list)
    """Positions of these steps."""
    pull: Handle[Pulled] | None = None
    """The pull that is under way."""
    sent: dict[str, Tensor] = field(default_factory=dict)
    """The parameters when it was pushed."""
    pushed_at: float = 0.0


class Learner:
    """Pushes and pulls the parameters of this process.

    Args:
        ctx: The job's context, of this replica alone.
        options: The options.
        module: The whole model, before layers of other stages are removed.
        optimizer: The inner optimizer, before a checkpoint is restored.
        lr_scheduler: Its schedule, if there is one.
    """

    def __init__(
        self,
        ctx: JobContext,
        options: PushPull,
        module: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        require_zmq()
        env = ctx.env
        if env.servers is None or env.token is None:
            raise ConfigurationError(
                "synchronization=PushPull(…) needs servers: under a scheduler, add servers: 1 to "
                "the job file; else start python -m pipollux.server for each address in "
                "PIPOLLUX_SERVERS, and set PIPOLLUX_SERVERS and PIPOLLUX_TOKEN for servers and "
                "replicas alike"
            )
        self.options, self._context = options, ctx
        self._sizes = layer_sizes(module)
        timeout = ctx.control.timeout
        # A copy does not know pushes before their step, so it cannot tell how far others are.
        copies = options.max_staleness == 0 and options.quorum is None
        # With SGD inside, one step between two pushes makes it SGD with momentum.
        self._may_warn = options.outer_optimizer.momentum > 0 and not isinstance(
            optimizer, torch.optim.SGD
        )
        """Whether a warning of the outer momentum is still possible."""
        self._single_steps = 0
        """Successive leases with one step per round."""
        self._worker = KVWorker(env.servers, env.token, self._sizes, timeout, copies=copies)
        ctx.closers.append(self._close)
        settings = settings_of(module, optimizer, lr_scheduler)
        self._joining = Joining(ctx, options, module, settings, self._worker)
        self._module = module
        self.trained = False
        """Whether there was a backward in the iteration under way."""
        self._leases = Leases(self._positions)
        self._layers: dict[int, list[tuple[str, nn.Parameter]]] = {}
        self._still: list[tuple[str, nn.Parameter]] = []
        """Parameters that were frozen when this replica joined."""
        self._fragments: list[Fragment] = []
        self._base: dict[str, Tensor] = {}
        """Θ, by parameter name."""
        self._revisions: dict[int, int] = {}
        self._rounds: dict[int, int] = {}
        self._feedback = ErrorFeedback() if options.compression else None
        self._member = 0
        self._lost = False
        """Whether the servers do not know this member any more."""
        self._turn = 0
        self._steps = 1
        """Steps of a round, as the ledger says."""
        self._next = self._progress = 0
        """The fragment whose turn is next, which comes when P times the steps since are H."""
        self._place: Place = (0, 0)
        self._loop: tuple[int, int, str] = (0, 0, "")
        """Arguments of :meth:`open`."""
        self._begins = False
        """Whether it has joined, and has no samples yet."""
        self._step_time = self._sync_time = 0.0
        self._round: list[float] = []
        """Seconds of the steps since the last lease. Some are slow, as those during a push."""
        self._since: float | None = None
        self._in_loop = False
        self._confirmations: list[Handle[Any]] = []
        """Pushes under way."""
        self._completions: deque[Handle[Any]] = deque()
        """Notes of them to the ledger, appended by the worker's thread."""
        self.exchanged = 0.0
        """Seconds of pushing and pulling after the last step."""
        self.place: Place | None = None
        """The job's loop when this replica joined; None at the start of a job."""

    def begin(
        self, module: nn.Sequential, optimizer: torch.optim.Optimizer, *, fresh: bool
    ) -> None:
        """Join with the layers that are here, and continue from the servers' parameters.
        ``fresh``: no checkpoint was restored.
        """
        here = layer_parameters(module)
        self._layers = {
            key: kept
            for key, several in here.items()
            if (kept := [x for x in several if x[1].requires_grad])
        }
        self._still = [x for several in here.values() for x in several if not x[1].requires_grad]
        check_layers(self._layers, self.options.compression)
        if not self._layers:
            raise ConfigurationError("no parameter of this stage is trained: nothing to push")
        sizes = {key: self._sizes[key] for key in self._layers}
        groups = fragments_of(sizes, self.options.fragments)
        self._fragments = [Fragment(keys) for keys in groups]
        self._join()
        self._joining.tell(self.place or (0, 0), optimizer, fresh=fresh)
        optimizer.register_step_pre_hook(self._leave_out)
        if self._context.heartbeat is not None:
            from .presence import Presence  # imports pydantic

            self._presence = Presence(self._context, self._joining.num_layers, self.place or (0, 0))

    def _join(self) -> None:
        """Become a member, and continue from the servers' parameters: those of the first replica,
        or of a run before.
        """
        again = self._member > 0
        groups = [fragment.keys for fragment in self._fragments]
        joined = self._joining.join(self._layers, groups, former=self._member)
        if joined.present is not None:
            self._note_present(joined.present)
        self._member, self._lost, self._turn = joined.member, False, 0
        self._begins = True
        if joined.place is not None and not again:
            self.place = joined.place
        if self._context.env.stage == 0:
            self._worker.beat(self._member, self._note_loss)
        for fragment in self._fragments:
            fragment.number, fragment.spans, fragment.pull = 0, [], None
        self._pull_all()
        self._align()

    def _note_loss(self) -> None:
        self._lost = True

    def _align(self) -> None:
        """Begin with the fragment that has the fewest rounds, as all other replicas do."""
        rounds = [self._rounds[fragment.keys[0]] for fragment in self._fragments]
        self._next, self._progress = rounds.index(min(rounds)), 0

    # The loop over data.

    def trains(self) -> bool:
        """Return whether a loop that begins now is one of the training."""
        return self._module.training and torch.is_grad_enabled()

    def parts(self, order: Tensor, shape: BatchShape, cut: Cut) -> Iterator[BatchSlice]:
        """Yield this replica's parts of iterations (see :meth:`Leases.parts`)."""
        normalises = self._context.pipeline.fewest_samples > 1  # a single value has no variance
        return self._leases.parts(order, shape, cut, 2 if normalises else 1)

    def open(self, place: Place, num_samples: int, batch: int, data: str) -> bool:
        """Begin a loop, with the samples of a step and a description of the data that is equal on
        all replicas; return whether it is over already.

        Raises:
            ConfigurationError: The loop before was left by ``break``, or the parameters are not
                those of the servers.
        """
        if self._in_loop and place != self._place:
            raise ConfigurationError(
                "the training loop before was left by break: with synchronization=PushPull(…) a "
                "loop takes all samples, over all replicas; for fewer of them give the loader a "
                "torch.utils.data.Subset"
            )
        self._check_unchanged()
        self._place, self._loop = place, (num_samples, batch, data)
        header = {"op": "open", "member": self._member, "stage": self._context.env.stage}
        header |= {"place": place, "num_samples": num_samples, "batch": batch}
        header["data"] = data
        try:
            reply = self._worker.ask(header).wait()
        except ServerError as error:
            self._rejoin(error)  # which opens the loop
            return False
        reached = reply.header["place"]
        self._in_loop = (int(reached[0]), int(reached[1])) == place
        return not self._in_loop

    def _positions(self, batch: int) -> dict[str, Any]:
        """Return the ledger's next answer; none if this member is lost, which ends the segment."""
        try:
            return self._request(batch)
        except ServerError as error:
            if str(error) != FENCED:
                raise
            self._lost = True
            return {"status": "none"}

    def _request(self, batch: int, *, idle: bool = False) -> dict[str, Any]:
        """Return the ledger's next answer."""
        self._turn += 1
        if self._round:
            self._step_time = _smooth(self._step_time, fmean(self._round), SMOOTHING_ROUNDS)
            self._round.clear()
        header = {"op": "answer", "member": self._member, "turn": self._turn, "idle": idle}
        header |= {"stage": self._context.env.stage, "batch": batch}
        header |= {"step_time": self._step_time, "sync_time": self._sync_time}
        found: dict[str, Any] = self._worker.ask(header).wait().header["answer"]
        if found["status"] == "leased":
            self._steps = found["steps"]
            self._warn_of_momentum()
            self._note_present(found)
        if found["status"] != "none" and (idle or self._begins):
            # Only now do others wait for this replica: until then they went on.
            self._begins = False
            self._pull_all()
            self._align()
            self._since = None  # this was no part of a step
        return found

    def _warn_of_momentum(self) -> None:
        """Warn once, in one process of the job, if the outer momentum acts on every step."""
        self._single_steps = self._single_steps + 1 if self._steps == 1 else 0
        every = self.options.sync_every
        enough = 1 if every == 1 else _SETTLED if every == AUTO else math.inf
        if not (self._may_warn and self._single_steps >= enough and self._context.env.leads):
            return
        self._may_warn = False
        outer = self.options.outer_optimizer
        warn(
            "replicas push after every step, so that the outer optimizer with "
            f"lr={outer.lr} and momentum={outer.momentum} multiplies each step of the inner "
            f"optimizer by {outer.lr / (1 - outer.momentum):.3g} in the end, which raises the loss "
            "with optimizers such as AdamW; set outer_optimizer=OuterSGD(lr=1.0, momentum=0.0), or "
            "sync_every=25 or more",
        )

    def _note_present(self, found: Mapping[str, Any]) -> None:
        """Note which replicas the job has, for its model and its scheduler."""
        every = self.options.sync_every
        self._context.at_servers = AtServers(
            replicas=tuple(found["replicas"]),
            num_nodes=min(found["nodes"], len(found["replicas"])),
            sync_time=self._sync_time,
            sync_every=every if isinstance(every, int) else AUTO_INTERVAL,
            sync_overlap=self.options.overlap,
        )

    def step_done(self) -> bool:
        """Handle the end of an iteration; return whether the positions that were leased are void,
        so that a new segment has to begin.
        """
        if not self.trained:
            raise ConfigurationError(
                "an iteration over training samples had no backward: to evaluate, call "
                "model.eval() or loop under torch.no_grad(), and each replica gets all samples"
            )
        self.trained = False
        span = self._leases.done()
        now = time.monotonic()
        if self._since is not None:
            self._round.append(now - self._since)
        for fragment in self._fragments:
            fragment.age += 1
            fragment.spans.append(span)
        try:
            if self._lost:
                raise ServerError(FENCED)
            self._exchange()
        except ServerError as error:
            self._rejoin(error)
            return True
        finally:
            self._since = time.monotonic()
            self.exchanged = self._since - now
        return False

    def _exchange(self) -> None:
        """Apply pulls that are due, and push the next fragments: each in its turn, in one order on
        all replicas, as they may wait for each other.
        """
        overlap = min(self.options.overlap, self._steps - 1)
        self._apply_due(overlap)
        self._progress += len(self._fragments)
        while self._progress >= self._steps:
            self._progress -= self._steps
            fragment = self._fragments[self._next]
            self._next = (self._next + 1) % len(self._fragments)
            if fragment.pull is not None:  # several turns in one step
                self._apply(fragment)
            self._push(fragment)
        if overlap == 0:
            self._apply_due(overlap)

    def _apply_due(self, overlap: int) -> None:
        for fragment in self._fragments:
            if fragment.pull is not None and fragment.age >= overlap:
                self._apply(fragment)

    def _apply_all(self) -> None:
        while waiting := [x for x in self._fragments if x.pull is not None]:
            self._apply(waiting[0])  # which may push others

    def finish(self, batch: int) -> bool:
        """Push everything at the end of the positions; return whether the loop goes on, with
        positions that were returned. All replicas have the same parameters once it is over.
        """
        try:
            if self._lost:
                raise ServerError(FENCED)
            self._push_rest()
            self._apply_all()
            had_none = self._begins
            answer = self._request(batch, idle=True)
        except ServerError as error:
            self._rejoin(error)
            return True
        finally:
            self._since = None
        if answer["status"] == "leased":
            self._leases.hold(answer)
            return True
        self._in_loop = False
        if had_none:
            self._note_nothing_left()
        return False

    def _note_nothing_left(self) -> None:
        env = self._context.env
        if env.replica == 0 and env.stage == 0:
            print(
                f"pipollux: no sample of epoch {self._place[0]} was left for replica 0: others "
                "have trained on them, or a run before on the same servers or their --directory; "
                "to train from the beginning, start the servers with an empty one",
                file=sys.stderr,
                flush=True,
            )

    def _push_rest(self) -> None:
        """Push all changes, and wait until the servers have them."""
        self._apply_all()
        for fragment in self._fragments:
            if fragment.spans:
                self._push(fragment, at_once=True)
        for confirmation in self._confirmations:
            confirmation.wait()
        self._confirmations.clear()
        while self._completions:
            self._completions.popleft().wait()

    def _push(self, fragment: Fragment, *, at_once: bool = False) -> None:
        """Send a fragment's change, and request what it becomes. ``at_once``: the servers confirm
        it before their step, which others may not make soon.
        """
        fragment.number += 1
        changes: dict[int, list[Tensor]] = {}
        scales: dict[str, list[float]] = {}
        for key in fragment.keys:
            for name, parameter in self._layers[key]:
                sent = master_value(parameter)
                change = self._base[name] - sent
                if not parameter.requires_grad and not change.any():
                    raise ConfigurationError(
                        f"parameter {name} was frozen after HybridParallel(…) was made, and the "
                        "momentum of the servers would still move it: freeze it before that"
                    )
                fragment.sent[name] = sent
                if self._feedback is not None:
                    quantized = self._feedback.compress(name, change)
                    scales.setdefault(str(key), []).append(quantized.scale)
                    change = quantized.values
                changes.setdefault(key, []).append(change)
        spans = {key: _joined(fragment.spans, key) for key in fragment.keys}
        header: dict[str, Any] = {
            "member": self._member,
            "number": fragment.number,
            "place": self._place,
            "weights": {key: sum(b - a for a, b in x) for key, x in spans.items()},
            "intervals": {str(key): x for key, x in spans.items()},
            "revisions": {str(key): self._revisions[key] for key in fragment.keys},
        }
        header["weights"] = {str(key): weight for key, weight in header["weights"].items()}
        # Few small pushes are sent on for the copy as they are, since a step has full precision.
        present = self._context.at_servers
        num_replicas = math.inf if present is None else len(present.replicas)
        few = self._feedback is not None and num_replicas <= COMPRESSED
        header |= {"at_once": at_once or few, "is_of_two": num_replicas == 2}
        if scales:
            header["scales"] = scales
        done = {"op": "complete", "place": self._place, "intervals": header["intervals"]}
        fragment.pushed_at, fragment.age, fragment.spans = time.monotonic(), 0, []
        while self._completions and self._completions[0].done():
            self._completions.popleft().wait()  # raises what has failed
        confirmed = self._worker.push(changes, header, lambda: self._confirm(done))
        self._confirmations = [x for x in self._confirmations if not x.done()] + [confirmed]
        wanted = dict.fromkeys(fragment.keys, fragment.number)
        fragment.pull = self._worker.pull(wanted, {"member": self._member})

    def _confirm(self, header: Mapping[str, Any]) -> None:
        # In the worker's thread, which must not wait for the reply.
        self._completions.append(self._worker.ask(header))

    def _apply(self, fragment: Fragment) -> None:
        """Continue from the pulled parameters and what has changed since the push."""
        assert fragment.pull is not None  # noqa: S101  # callers have seen to it
        pulled = self._await(fragment.pull, fragment)
        took = pulled.arrived - fragment.pushed_at - pulled.waited
        self._sync_time = _smooth(self._sync_time, max(took, 0.0) * len(self._fragments))
        for key in fragment.keys:
            for (name, parameter), value in zip(self._layers[key], pulled.values[key], strict=True):
                since = master_value(parameter) - fragment.sent[name]
                self._adopt(name, parameter, value, since)
        self._note(pulled)
        fragment.pull, fragment.sent = None, {}

    def _await(self, pull: Handle[Pulled], fragment: Fragment) -> Pulled:
        """Return the result of a fragment's pull. Others may wait for other fragments of this
        replica, which waits for them: so these are pushed, again and again, as others may be
        several rounds behind.
        """
        others, aligns = [x for x in self._fragments if x is not fragment], False
        while True:
            with suppress(TimeoutError):
                pulled = pull.wait(ALIGNING)
                break
            aligns = True
            for other in others:
                if other.pull is not None and other.pull.done():
                    self._apply(other)
                if other.pull is None:
                    self._push(other)
        if aligns:
            self._align()
        return pulled

    def _note(self, pulled: Pulled) -> None:
        self._revisions |= pulled.revisions
        self._rounds |= pulled.rounds

    def _adopt(self, name: str, parameter: nn.Parameter, value: Tensor, since: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(value + since)
        # What rounding to the parameter's dtype leaves out is no change of the replica's.
        exact = parameter.dtype == value.dtype
        self._base[name] = value if exact else master_value(parameter) - since

    def _pull_all(self) -> None:
        """Continue from the servers' parameters as they are."""
        numbers = {key: f.number for f in self._fragments for key in f.keys}
        pulled = self._worker.pull(numbers, {"member": self._member}).wait()
        for key, several in self._layers.items():
            for (name, parameter), value in zip(several, pulled.values[key], strict=True):
                self._adopt(name, parameter, value, torch.zeros_like(value))
        self._note(pulled)

    def _rejoin(self, error: ServerError) -> None:
        """Go on as a new member after the servers have given up this one.

        Raises:
            PeerLostError: The replica has several processes, which may be at different steps.
        """
        if str(error) not in REASONS:
            raise error
        why = REASONS[str(error)]
        env = self._context.env
        if env.processes_per_replica > 1:
            raise PeerLostError(
                f"replica {env.replica} {why}: start its processes again, and it continues from "
                "the servers' parameters"
            ) from error
        print(
            f"pipollux: replica {env.replica} {why}; it joins again, and others train on what it "
            "had not pushed",
            file=sys.stderr,
            flush=True,
        )
        self._leases.drop()
        self._confirmations.clear()
        self._completions.clear()
        self._feedback = ErrorFeedback() if self._feedback is not None else None
        self._join()
        if self.open(self._place, *self._loop):
            raise PeerLostError(
                f"replica {env.replica} was lost for so long that the others have ended its epoch: "
                "start it again, and it continues with theirs"
            )

    def _check_unchanged(self) -> None:
        """Refuse parameters that were changed between loops, as by ``load_state_dict``: their
        change would go to the outer optimizer.
        """
        for several in self._layers.values():
            for name, parameter in several:
                if not _are_equal(master_value(parameter), self._base[name]):
                    raise ConfigurationError(
                        f"parameter {name} was changed outside of a training loop, and servers "
                        "hold its value: load a model's state before HybridParallel(…), and start "
                        "the servers with an empty --directory"
                    )

    def _leave_out(self, *_: Any) -> None:
        """Keep layers from a step on samples that a lost replica trained them on.

        Raises:
            ConfigurationError: The step is on samples that no server has handed out.
        """
        if not self._in_loop:
            raise ConfigurationError(
                "optimizer.step() outside of a loop over an AdaptiveDataLoader, or in one that "
                "began after model.eval() or under torch.no_grad(), as for an evaluation: with "
                "synchronization=PushPull(…) replicas train on the samples that servers hand out"
            )
        for name, parameter in self._still:
            if parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter {name} was frozen when HybridParallel(…) was made, so servers do "
                    "not hold it: unfreeze it before that"
                )
        for key in self._leases.current.skip:
            for _name, parameter in self._layers.get(key, ()):
                parameter.grad = None

    def left_loop(self) -> None:
        """Return the samples of a loop that was left by `break` or an exception to the others."""
        if not self._in_loop or not self._member or self._context.env.stage > 0:
            return
        print(
            f"pipollux: replica {self._context.env.replica} has left a training loop before its "
            "end: others train on what it had not pushed, and its parameters are not theirs; to "
            "end after fewer samples, give the loader a torch.utils.data.Subset",
            file=sys.stderr,
            flush=True,
        )
        self._worker.ask({"op": "leave", "member": self._member})

    def leave(self) -> None:
        """Push everything and leave the job, as this replica stops."""
        try:
            if self._in_loop:
                self._push_rest()
        except ServerError as error:
            if str(error) not in REASONS:
                raise
            # What is not pushed is trained on by others, or after the restart.
        self._context.control.barrier()  # other processes of the replica have pushed, too
        if self._context.env.stage == 0:
            self._worker.ask({"op": "leave", "member": self._member}).wait()
        self._member = 0

    def _close(self) -> None:
        if self._member and not self._in_loop and self._context.env.stage == 0:
            with suppress(TimeoutError, ServerError, PeerLostError):  # it is lost after a while
                self._worker.ask({"op": "leave", "member": self._member}).wait(LEAVING)
        self._worker.close()


def _are_equal(first: Tensor, second: Tensor) -> bool:
    # A training that has diverged has NaN, which nobody has changed.
    return torch.equal(first, second) or torch.allclose(first, second, 0.0, 0.0, equal_nan=True)


def _joined(spans: Sequence[Span], key: int) -> list[list[int]]:
    """Return the positions that a layer was trained on."""
    joined: list[list[int]] = []
    for start, stop, skip in spans:
        if key in skip:
            continue
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return joined


def _smooth(mean: float, value: float, weight: float = SMOOTHING) -> float:
    return value if mean == 0.0 else mean + weight * (value - mean)
