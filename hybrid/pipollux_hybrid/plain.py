"""What a wrapped model still shows of the plain one: its layers, and state under their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from .errors import ConfigurationError
from .parameter_groups import plain_name

__all__ = ["PlainFace"]


class PlainFace(nn.Module):
    """A module around an ``nn.Sequential`` that saves and loads as that one does.

    Stages leave no trace in names, and neither does ``torch.compile``, so state goes from any
    number of stages to any other, and from and to the plain module.

    Args:
        module: The layers.
    """

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        self.module = module

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.module)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer by its place."""
        return self.module[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        return iter(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's state, keyed by its own layer names whatever the balance."""
        state = self.module.state_dict(*args, **kwargs)
        for name in list(state):  # all are put back, so that their order stays
            state[plain_name(name)] = state.pop(name)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the plain module's state, whether its layers were compiled or not."""
        if assign:
            raise ConfigurationError(
                "assign=True would put other tensors in the place of parameters that the optimizer "
                "and the synchronisation hold: load before wrapping, or with assign=False"
            )
        ours = {plain_name(name): name for name in self.module.state_dict()}
        renamed = {ours.get(plain_name(n), n): value for n, value in state_dict.items()}
        return self.module.load_state_dict(renamed, strict=strict)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Change the type of parameters and buffers; their devices are the stages'.

        Raises:
            ConfigurationError: A device was asked for.
        """
        try:
            device = torch._C._nn._parse_to(*args, **kwargs)[0]
        except RuntimeError:  # a device by its number, on a machine that has none
            _refuse_to_move()
        if device is not None:
            _refuse_to_move()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:  # noqa: ARG002  # the base class's signature
        """Refused, as stages have their devices."""
        _refuse_to_move()

    def cpu(self) -> NoReturn:
        """Refused, as stages have their devices."""
        _refuse_to_move()


def _refuse_to_move() -> NoReturn:
    raise ConfigurationError(
        "a pipeline's layers cannot be moved, as each stage has a device of its own: say "
        "HybridParallel(…, devices=[…]), one for each stage, and leave the call out"
    )
