"""Random numbers that go on after a restart as if there had been none."""

from __future__ import annotations

from typing import BinaryIO

import torch

from .checkpoint import State, load_state
from .context import JobContext

__all__ = ["RandomState", "random_state"]

STATE_NAME = "random.pt"


class RandomState(State):
    """The state of torch's CPU generator on every replica.

    With as many replicas as before, each goes on with its own numbers. With another number, each
    gets a new sequence that depends on the old ones and its rank only.
    """

    def __init__(self, ctx: JobContext) -> None:
        super().__init__(STATE_NAME)
        self._context = ctx
        self._states: list[torch.Tensor] = []
        self._restored: list[torch.Tensor] = []

    def sync(self) -> None:
        """Collect every replica's state."""
        self._states = self._context.control.gather(torch.get_rng_state())

    def save(self, fileobj: BinaryIO) -> None:
        """Write them."""
        torch.save(self._states, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Read them; :meth:`restore_once` puts this replica's to use."""
        self._restored = torch.load(fileobj, weights_only=True)

    def restore_once(self) -> None:
        """Go on with the restored numbers; does nothing when called again."""
        restored, self._restored = self._restored, []
        if not restored:
            return
        env = self._context.env
        if len(restored) == env.num_replicas:
            torch.set_rng_state(restored[env.rank])
        else:
            torch.set_rng_state(restored[0])
            seed = int(torch.randint(1 << 62, ()).item())
            torch.manual_seed(seed + env.rank)


def random_state(ctx: JobContext) -> RandomState:
    """The job's random state, registered at its first use."""
    state = ctx.states.get(STATE_NAME)
    if state is None:
        state = RandomState(ctx)
        load_state(state)
    assert isinstance(state, RandomState)  # noqa: S101  # the name is this module's own
    return state
