"""How a replica becomes a member of the job at the servers."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from pipollux_hybrid.errors import ConfigurationError

from .agreement import Settings, digest_of_frozen, has_running_statistics
from .fragments import master_values
from .key_range import Place
from .options import PushPull
from .worker import KVWorker

if TYPE_CHECKING:
    from pipollux_hybrid.job.context import JobContext

Layers = Mapping[int, Sequence[tuple[str, nn.Parameter]]]
"""The trained parameters of each layer, with their names."""


class Joined(NamedTuple):
    """A membership."""

    member: int
    place: Place | None
    """The job's loop; None at the start of a job."""
    present: Mapping[str, Any] | None
    """The replicas of the job, in its first process of the replica."""


class Joining:
    """Joins with what the servers compare.

    Args:
        ctx: The job's context.
        options: The options.
        module: The whole model, before layers of other stages are removed.
        settings: The replica's settings.
        worker: The client of the servers.
    """

    def __init__(
        self,
        ctx: JobContext,
        options: PushPull,
        module: nn.Sequential,
        settings: Settings,
        worker: KVWorker,
    ) -> None:
        self._context, self._settings, self._worker = ctx, settings, worker
        self.num_layers, self._normalises = len(module), has_running_statistics(module)
        self._options = {**options.to_json_object(), "frozen": digest_of_frozen(module)}
        self._options |= {"layers": self.num_layers}

    def join(self, layers: Layers, fragments: Sequence[Sequence[int]], *, former: int) -> Joined:
        """Join with the layers that are here; ``former``: the member that this replica was, or 0.

        Raises:
            ServerError: Other replicas have other options, parameters or settings.
        """
        self._worker.configure(self._options, again=former > 0)
        values = {key: master_values(several) for key, several in layers.items()}
        names = {key: [name for name, _ in several] for key, several in layers.items()}
        self._worker.init(values, names, again=former > 0)
        # After this exchange all layers exist.
        everyone = self._context.control.gather_bytes(json.dumps(fragments).encode())
        reply: dict[str, Any] | None = None
        if self._context.env.stage == 0:
            groups = [keys for several in everyone for keys in json.loads(several)]
            reply = self._worker.ask(self._request(groups, former)).wait().header
        shared = json.dumps(None if reply is None else [reply["member"], reply["place"]])
        number, place = json.loads(self._context.control.gather_bytes(shared.encode())[0])
        return Joined(number, None if place is None else (place[0], place[1]), reply)

    def _request(self, fragments: Sequence[Sequence[int]], former: int) -> dict[str, Any]:
        env = self._context.env
        header = {"op": "join", "replica": env.replica, "processes": env.processes_per_replica}
        # A joining replica waits for nobody.
        expected = 1 if env.joins else env.expected_replicas
        header |= {"num_layers": self.num_layers, "expected": expected}
        header |= {"node": env.node or socket.gethostname(), "former": former}
        return {**header, "fragments": fragments, "settings": dict(self._settings)}

    def tell(self, place: Place, optimizer: torch.optim.Optimizer, *, fresh: bool) -> None:
        """Print what the user has to know of a replica that begins, in the job's loop ``place``.
        ``fresh``: no checkpoint was restored.

        Raises:
            ConfigurationError: Its learning-rate schedule would begin anew.
        """
        # Every scheduler leaves this mark.
        scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        if scheduled and fresh and place[0] > 0:
            raise ConfigurationError(
                f"this replica joins in epoch {place[0]}, and its learning-rate schedule "
                "would begin anew: set PIPOLLUX_CHECKPOINT_DIR on all replicas, so that it "
                "continues from theirs, and give HybridParallel(…) the lr_scheduler"
            )
        env = self._context.env
        if env.stage > 0:
            return
        if env.replica == 0 and self._normalises:
            _say(
                "running statistics of batch normalization stay with their replica: evaluations "
                "differ between replicas, and replica 0 saves its own"
            )
        if place == (0, 0):
            return
        text = f"replica {env.replica} goes on in epoch {place[0]} with the servers' parameters"
        if fresh and self._normalises:
            text += (
                ", and its running statistics of batch normalization begin anew: set "
                "PIPOLLUX_CHECKPOINT_DIR on all replicas, so that they continue from theirs"
            )
        _say(text)


def _say(text: str) -> None:
    print(f"pipollux: {text}", file=sys.stderr, flush=True)
