"""Model and optimizer in a checkpoint, keyed by layer.

Names are those of the user's own ``nn.Sequential``: independent of stages, so the next attempt may
cut the layers differently, and of ``torch.compile``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import CheckpointError
from pipollux_hybrid.job.context import context, from_scratch

from .async_save import StagingBuffers
from .optimizer_shards import LOST, OptimizerShards
from .parameter_groups import ParameterGroups, plain_name
from .remembering import BufferCopies, copied, unchanged
from .state import State, States, check_loadable

LOG = logging.getLogger(__name__)
STATE_NAME = "model.pt"
REMEDY = "build the model the checkpoint was made with"


class ModelState(State):
    """Parameters, buffers, optimizer state and learning-rate scheduler.

    ``elsewhere`` has the names of parameters and buffers in other processes of the replica,
    ``shared`` the names of parameters that other stages hold a copy of; without ``shards`` every
    replica holds the whole optimizer state.
    """

    in_parts = True
    equal = True  # every step adds the same averages to the same parameters

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        elsewhere: Collection[str] = (),
        shards: OptimizerShards | None = None,
        shared: Mapping[nn.Parameter, str] | None = None,
    ) -> None:
        super().__init__(STATE_NAME)
        self._shards = shards or OptimizerShards(context(), module, optimizer, wanted=False)
        self._module, self._elsewhere = module, frozenset(elsewhere)
        self._groups = ParameterGroups(module, optimizer, shared)
        self._lr_scheduler = lr_scheduler
        self._looked = False
        self._host_copy = StagingBuffers()
        self._optimizer, self._parameters = optimizer, list(module.parameters())
        self._buffers: BufferCopies | None = None
        if context().env.checkpoint_dir is not None:  # fail now, not at the first save
            check_loadable("lr_scheduler", lr_scheduler.state_dict() if lr_scheduler else None)
            check_loadable("optimizer", optimizer.state_dict())

    def save(self, fileobj: BinaryIO) -> None:
        """Write the content with ``torch.save``."""
        torch.save(self.content(), fileobj)
        self._shards.drop()

    def snapshot(self) -> Callable[[BinaryIO], None]:
        """Copy the content to host memory."""
        copy = self._host_copy.take(self.content())
        self._shards.drop()

        def write(fileobj: BinaryIO) -> None:
            self._host_copy.wait()
            torch.save(copy, fileobj)

        return write

    def load(self, fileobj: BinaryIO) -> None:
        """Read the output of :meth:`save`; tensors are copied to the parameters' devices. Raises a
        CheckpointError with the first difference for another model or optimizer.
        """
        self.adopt(torch.load(fileobj, map_location="cpu", weights_only=True))

    def load_parts(self, files: Sequence[BinaryIO]) -> None:
        """Read the output of several stages; this process loads its own layers."""
        parts = [torch.load(x, map_location="cpu", weights_only=True) for x in files]
        self.adopt(_merged(parts))

    def check(self, content: Mapping[str, Any]) -> None:
        """Raise a CheckpointError with the first difference for another model or optimizer."""
        self._check_model(content["model"])
        self._groups.check(content["optimizer"])

    def adopt(self, content: Mapping[str, Any]) -> None:
        """Load parameters, buffers, optimizer state and schedule; errors as of :meth:`check`."""
        self._load_model(self._here(content["model"]))
        ours = self._optimizer_here(content["optimizer"])
        self._groups.restore(ours, self._shards.is_own)
        self._load_frozen(content.get("frozen"), content.get("frozen_with_gradients") or ())
        if self._lr_scheduler is not None and content["lr_scheduler"] is not None:
            self._check_schedule(content.get("lr_scheduler_class"))
            self._lr_scheduler.load_state_dict(content["lr_scheduler"])

    def sync(self) -> None:
        """Gather sharded optimizer state on replica 0."""
        if context().env.checkpoint_dir is not None:
            self._shards.gather(everywhere=False)

    def spread(self) -> None:
        """Gather sharded optimizer state on all replicas."""
        self._shards.gather(everywhere=True)

    def rejoined(self) -> None:
        """Shard the optimizer state among the current replicas."""
        self._shards.rejoin()

    def lost(self) -> str:
        """Return which state is lost with a replica: its shard of the optimizer state."""
        return LOST if self._shards.divided else ""

    def remember(self) -> Callable[[], None]:
        """Copy the state that a script may change in a void iteration outside of the step: buffers,
        learning rates and other options of groups, and the scheduler's state.
        """
        check = unchanged("parameters", self._parameters)
        self._buffers = self._buffers or BufferCopies(self._module)
        buffers, groups = self._buffers.remember(), self._optimizer.param_groups
        rates = [
            {n: x.clone() if isinstance(x, Tensor) else x for n, x in group.items()}
            for group in groups
        ]
        schedule = copied(self._lr_scheduler.state_dict()) if self._lr_scheduler else None

        def put_back() -> None:
            check()
            buffers()
            for group, values in zip(groups, rates, strict=True):
                group.update(values)
            if self._lr_scheduler is not None and schedule is not None:
                self._lr_scheduler.load_state_dict(schedule)

        return put_back

    def _look_for_schedule(self) -> None:
        """Warn once if the optimizer has a learning-rate scheduler that no checkpoint includes."""
        if self._looked or context().env.checkpoint_dir is None:
            return
        self._looked = True
        scheduled = any("initial_lr" in group for group in self._optimizer.param_groups)
        states = context().component(States).values()
        if scheduled and not any(state.may_hold_schedule for state in states):
            LOG.warning(
                "the optimizer's learning-rate scheduler is not saved in checkpoints: a restart "
                "resets it, with other learning rates; pass it as "
                "HybridParallel(…, lr_scheduler=scheduler), or call "
                'pipollux.register_for_checkpointing("lr_scheduler", scheduler)'
            )

    def content(self) -> dict[str, Any]:
        """Return the whole state, by names of layers."""
        if self._lr_scheduler is None:
            self._look_for_schedule()
        schedule = self._lr_scheduler.state_dict() if self._lr_scheduler else None
        frozen = {p: n for p, n in self._groups.names().items() if not p.requires_grad}
        return {
            "model": {plain_name(n): x for n, x in self._module.state_dict().items()},
            "frozen": [*frozen.values()],
            "frozen_with_gradients": [n for p, n in frozen.items() if p.grad is not None],
            "optimizer": self._groups.state(self._shards.whole),
            "lr_scheduler": schedule,
            "lr_scheduler_class": _kind_of(self._lr_scheduler) if self._lr_scheduler else None,
        }

    def _here(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in named.items() if plain_name(name) not in self._elsewhere}

    def _optimizer_here(self, content: Mapping[str, Any]) -> dict[str, Any]:
        # A parameter shared by several stages is here, too, under another name.
        elsewhere = self._elsewhere - set(self._groups.names().values())
        groups = []
        for group in content["groups"]:
            here = [plain_name(name) not in elsewhere for name in group["params"]]
            fields = {
                field: [x for x, stays in zip(group[field], here, strict=True) if stays]
                for field in ("params", "param_names")
                if field in group
            }
            groups.append({**group, **fields})
        state = {n: x for n, x in content["state"].items() if plain_name(n) not in elsewhere}
        return {**content, "groups": groups, "state": state}

    def _check_model(self, saved: Mapping[str, Any]) -> None:
        ours = {plain_name(name): x for name, x in self._module.state_dict().items()}
        difference = _difference({plain_name(name): x for name, x in saved.items()}, ours)
        if difference is not None:
            raise CheckpointError(
                f"it is of another model: {difference}; {REMEDY}, or {from_scratch()}"
            )

    def _load_model(self, saved: Mapping[str, Any]) -> None:
        self._check_model(saved)
        ours = {plain_name(name): (name, x) for name, x in self._module.state_dict().items()}
        theirs = {ours[plain_name(name)][0]: x for name, x in saved.items()}
        held = {name for name, x in ours.values() if _is_same_memory(theirs[name], x)}
        if not held or _loads_its_own_way(self._module):
            self._module.load_state_dict(theirs)
        elif len(held) < len(theirs):
            left = {name: x for name, x in theirs.items() if name not in held}
            self._module.load_state_dict(left, strict=False)

    def _load_frozen(self, frozen: Collection[str] | None, with_gradients: Collection[str]) -> None:
        if frozen is None:
            return
        for parameter, name in self._groups.names().items():
            parameter.requires_grad_(name not in frozen)
            # Momentum and weight decay go on where the script sets gradients to zero, not None.
            if name in with_gradients and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _check_schedule(self, theirs: str | None) -> None:
        ours = _kind_of(self._lr_scheduler)
        if theirs is not None and theirs != ours:
            raise CheckpointError(
                f"its lr_scheduler is {theirs} and the script's is {ours}: use {theirs}, or "
                f"{from_scratch()}"
            )


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = dict(parts[0])
    first["model"] = {name: x for part in parts for name, x in part["model"].items()}
    for field in ("frozen", "frozen_with_gradients"):
        first[field] = [name for part in parts for name in part.get(field) or ()]
    optimizers = [part["optimizer"] for part in parts]
    groups = []
    for same in zip(*(optimizer["groups"] for optimizer in optimizers), strict=True):
        fields = [field for field in ("params", "param_names") if field in same[0]]
        names = [name for group in same for name in group["params"]]
        # Stages may share a parameter, whose state is equal in each of them.
        chosen = {name: place for place, name in reversed(list(enumerate(names)))}
        joined = {}
        for field in fields:
            flat = [x for group in same for x in group[field]]
            joined[field] = [flat[place] for place in sorted(chosen.values())]
        groups.append({**same[0], **joined})
    state = {name: x for optimizer in optimizers for name, x in optimizer["state"].items()}
    first["optimizer"] = {**optimizers[0], "groups": groups, "state": state}
    return first


def _is_same_memory(one: Any, other: Any) -> bool:
    """Return whether a tensor was already overwritten in place."""
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and one.data_ptr() == other.data_ptr() and one.device == other.device


def _loads_its_own_way(module: nn.Module) -> bool:
    """Return whether some layer customises loading beyond copying tensors."""
    return any(
        type(layer)._load_from_state_dict is not nn.Module._load_from_state_dict
        or layer._load_state_dict_pre_hooks
        or layer._load_state_dict_post_hooks
        for layer in module.modules()
    )


def _kind_of(lr_scheduler: Any) -> str:
    """Return a scheduler's class with its inner schedulers: ``SequentialLR(LinearLR, StepLR)``."""
    inner = ", ".join(_kind_of(each) for each in getattr(lr_scheduler, "_schedulers", ()))
    name = type(lr_scheduler).__name__
    return f"{name}({inner})" if inner else name


def _difference(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return the first difference between a checkpoint's model and the script's, None if equal."""
    for name, value in ours.items():
        if name not in saved:
            return f"{name!r} is missing in the checkpoint"
        shapes = [tuple(x.shape) for x in (saved[name], value) if isinstance(x, Tensor)]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            return f"{name!r} has shape {shapes[0]} in the checkpoint and {shapes[1]} in the script"
    extra = next((name for name in saved if name not in ours), None)
    return None if extra is None else f"{extra!r} of the checkpoint is not in the script's model"
