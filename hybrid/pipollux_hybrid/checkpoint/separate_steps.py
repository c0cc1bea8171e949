"""Whether an optimizer steps each parameter by itself, so that parts of a model can step apart.

A stage's process has the parameters of its stage, and a norm over all parameters would be that of
the stage. For an optimizer that is none of torch's this is tried out: a copy of it steps some small
tensors together, and further copies step them one by one.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.pipeline.host_random import seeded
from pipollux_hybrid.warning import warn

Optimizer = torch.optim.Optimizer

EACH_ALONE = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD"),
)
"""Optimizers of ``torch.optim`` that step each parameter independently."""
PER_GROUP = 3
"""Parameters of each group that are tried."""
GROUPS = 4
SIDE = 3
"""The longest side of the tensors that stand for parameters."""
RATE = 0.1
SCALES = (0.01, 100.0, 1.0, 1.0, 30.0, 0.1, 1.0, 1.0, 1.0, 1.0)
"""Factors on the gradients of the steps: norms may have an effect above a threshold only."""
TOLERANCE = 1e-6


def steps_separately(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known not to combine several parameters in its step."""
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, x) and step is inspect.unwrap(x.step) for x in known())


def known() -> list[type[Optimizer]]:
    """Return the classes of :data:`EACH_ALONE` that this torch has."""
    return [getattr(torch.optim, name) for name in EACH_ALONE if hasattr(torch.optim, name)]


def check_stages_may_step(optimizer: Optimizer, *, tells: bool) -> None:
    """Refuse an optimizer whose steps of a stage would not be those of the model; warn, where this
    process ``tells``, if that cannot be known.

    Raises:
        ConfigurationError: Its step combines parameters.
    """
    separate = steps_separately(optimizer) or try_steps(optimizer)
    kind = type(optimizer).__name__
    if separate is False:
        raise ConfigurationError(
            f"optimizer is a {kind}, whose step() combines the parameters, such as by a norm over "
            "all of them: in a multi-process pipeline each process only has those of its stage. "
            "Use an optimizer that steps each parameter by itself, such as one of torch.optim, or "
            "a single-process pipeline (leave out schedule and processes_per_replica)"
        )
    if separate is None and tells:
        warn(
            f"optimizer is a {kind}, which is none of torch.optim's: in a multi-process pipeline "
            "its step() sees the parameters of one stage, so a norm over all of them would be that "
            "of the stage"
        )


def try_steps(optimizer: Optimizer) -> bool | None:
    """Return whether copies of an optimizer step small tensors together as one by one; None if it
    cannot be copied or its steps are random. Nothing of the optimizer or its parameters changes.

    Example:
        >>> weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
        >>> try_steps(torch.optim.Adam(weights))
        True
    """
    chosen = [p for group in optimizer.param_groups[:GROUPS] for p in _some(group["params"])]
    if len(chosen) < 2:
        return True
    with torch.random.fork_rng(devices=[]), seeded(0), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            together = _changes(optimizer, chosen, range(len(chosen)), seed=0)
            again = _changes(optimizer, chosen, range(len(chosen)), seed=1)
            alone = [_changes(optimizer, chosen, [n], seed=0)[0] for n in range(len(chosen))]
        except Exception:  # the optimizer's own code, which may expect anything
            return None
    if not _alike(together, again) or not all(change.any() for change in together):
        return None
    return _alike(together, alone)


def _some(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Choose the first parameter of each number of dimensions, and others as there is room."""
    filled = [p for p in parameters if p.numel()]
    first = {p.dim(): p for p in reversed(filled)}
    return list(dict.fromkeys([*first.values(), *filled]))[:PER_GROUP]


def _changes(
    optimizer: Optimizer, chosen: Sequence[Tensor], numbers: Sequence[int], seed: int
) -> list[Tensor]:
    """Return what steps change of the stand-ins of some parameters."""
    small = [_stand_in(parameter, number) for number, parameter in enumerate(chosen)]
    copy = _Copy(dict(zip(map(id, chosen), small, strict=True)), [small[n] for n in numbers])
    copied = copy.of(optimizer)
    step = type(copied).step
    if getattr(step, "hooked", False):  # torch's, which calls the hooks of all optimizers
        step = step.__wrapped__  # functools.wraps sets it
    begins = [small[n].clone() for n in numbers]
    torch.default_generator.manual_seed(seed)  # not those of GPUs, which belong to the script
    for scale in SCALES:
        for n in numbers:
            small[n].grad = scale * (1 + 0.5 * _values(small[n], 100 + n))
        step(copied)
    return [small[n] - begin for n, begin in zip(numbers, begins, strict=True)]


def _stand_in(parameter: Tensor, number: int) -> nn.Parameter:
    shape = [min(side, SIDE) for side in parameter.shape]
    dtype = torch.complex128 if parameter.is_complex() else torch.float64
    return nn.Parameter(_values(torch.empty(shape, dtype=dtype), number))


def _values(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        bool((x - y).abs().max() <= TOLERANCE * x.abs().max())
        for x, y in zip(some, others, strict=True)
    )


class _Copy:
    """Copies optimizers, with those that they hold, to other parameters.

    ``copy.deepcopy`` leaves attributes out, and would copy modules and tensors of any size.
    """

    def __init__(self, stand_ins: dict[int, nn.Parameter], kept: Sequence[nn.Parameter]) -> None:
        self._stand_ins = stand_ins
        self._kept = set(map(id, kept))
        self._copies: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return a copy of a value; raise a TypeError if it is none of those known here."""
        if id(value) not in self._copies:
            self._copies[id(value)] = self._new(value)
        return self._copies[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, Optimizer):
            return self._optimizer(value)
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.of, value))
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
            return value.clone()
        if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
            return value
        raise TypeError(type(value).__name__)

    def _optimizer(self, optimizer: Optimizer) -> Optimizer:
        copied: Optimizer = object.__new__(type(optimizer))
        self._copies[id(optimizer)] = copied
        for name, value in vars(optimizer).items():
            if name == "state":
                copied.state = defaultdict(dict)
            elif isinstance(value, OrderedDict):  # hooks
                setattr(copied, name, OrderedDict())
            elif name not in ("step", "zero_grad"):  # those of schedulers call the original
                setattr(copied, name, self.of(value))
        return copied

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        names = [name for name in value if name != "param_names"]
        copied = {name: self.of(value[name]) for name in names if name != "params"}
        if "params" in value:
            mine = [self._stand_ins.get(id(parameter)) for parameter in value["params"]]
            copied["params"] = [x for x in mine if x is not None and id(x) in self._kept]
            if isinstance(copied.get("lr"), (int, float)):
                copied["lr"] = RATE  # a warmup may begin at 0
        return copied
