"""Small random models, and their training by the plain model and by a pipeline.

Between layers goes a tensor [batch, WIDTH], alone or with a second value in a tuple, list or dict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchgpipe import is_recomputing

from pipollux_hybrid import HybridParallel, PipolluxError, WeightedLoss, init_process_group
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.context import context
from tests.hybrid.models import gradients, state_of

WIDTH, CLASSES, STEPS = 4, 3, 2


@dataclass(frozen=True)
class Spec:
    """A model, its data and how it is trained."""

    layers: Sequence[tuple[str, str]]
    """Kind of each layer, and what it makes: a container, or the second value in it."""
    loss: str
    scope: str | None
    batch_size: int
    num_microbatches: int
    checkpoint: str
    schedule: str | None
    """None: one process drives all stages."""
    balance: Sequence[int]
    num_replicas: int
    adam: bool
    seed: int

    @property
    def num_processes(self) -> int:
        """Of a replica."""
        if self.schedule is None:
            return 1
        return len(self.balance) // (2 if self.schedule == "interleaved" else 1)


@dataclass
class Trained:
    """What training has left in one process."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, list[Tensor]] = field(default_factory=dict)
    """Of each dropout, by its name."""
    refused: str | None = None
    """What was said instead, and after how many optimizer steps."""
    steps: int = 0


def main_of(value: Any) -> Tensor:
    x: Tensor = value["x"] if isinstance(value, dict) else value
    return x if isinstance(x, Tensor) else x[0]


def second_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None
    return value.get("second") if isinstance(value, dict) else value[1]


def in_place_of(value: Any, x: Tensor) -> Any:
    """A container like another one, with another tensor."""
    if isinstance(value, Tensor):
        return x
    if isinstance(value, dict):
        return {**value, "x": x}
    return type(value)((x, *value[1:]))


class Layer(nn.Module):
    """One layer; `extra` says what a "pack" puts in the container, and which container it is."""

    def __init__(self, kind: str, extra: str, linear: nn.Linear | None) -> None:
        super().__init__()
        self.kind, self.extra = kind, extra
        self.linear = linear or nn.Linear(WIDTH, WIDTH)
        if kind in ("pack", "use", "sometimes", "unused", "widen"):
            self.other = nn.Linear(WIDTH, WIDTH)
        self.masks: list[Tensor] = []
        self.given: list[Tensor] | None = None

    def forward(self, value: Any) -> Any:
        return getattr(self, f"_{self.kind}")(value, main_of(value))

    def _linear(self, value: Any, x: Tensor) -> Any:
        return in_place_of(value, self.linear(x))

    def _tanh(self, value: Any, x: Tensor) -> Any:
        return in_place_of(value, self.linear(x).tanh())

    _shared = _unused = _tanh

    def _pack(self, _value: Any, x: Tensor) -> Any:
        container, _, content = self.extra.partition(" ")
        second = {
            "branch": lambda: self.other(x),
            "unused": lambda: self.other(x),
            "integers": lambda: x.argmax(1),
            "booleans": lambda: x > 0,
            "detached": lambda: x.detach() * 2,
            "mask": lambda: (x[:, :1] > 0.5) if bool((x[:, :1] > 0.5).any()) else None,
            "square": lambda: self.other.weight.tril()[None],
        }[content]()
        y = self.linear(x)
        if container == "dict":
            return {"x": y, "second": second}
        return (y, second) if container == "tuple" else [y, second]

    def _use(self, value: Any, x: Tensor) -> Any:
        second = second_of(value)
        y = self.linear(x)
        if second is None:
            return y
        if second.dtype == torch.bool:
            return y.masked_fill(second, 0.0)
        if not second.is_floating_point():
            return y + self.other.weight[second]
        return y @ second[0] if second.dim() == 3 else y + self.other(second)

    def _drop(self, _value: Any, x: Tensor) -> Any:
        return self.linear(x)

    def _mutate(self, value: Any, x: Tensor) -> Any:
        y = self.linear(x)
        if isinstance(value, dict):
            value["x"] = y
        elif isinstance(value, list):
            value[0] = y
        else:
            return in_place_of(value, y)
        return value

    def _widen(self, value: Any, x: Tensor) -> Any:
        """Puts one more tensor into the container that it was given."""
        if isinstance(value, dict):
            value["more"] = self.other(x)
            value["x"] = self.linear(x) + value.get("more", 0.0)
        elif isinstance(value, list):
            value.append(self.other(x))
            value[0] = self.linear(x) + value[-1]
        else:
            return in_place_of(value, self.linear(x))
        return value

    def _inplace(self, value: Any, x: Tensor) -> Any:
        y = self.linear(x * 1.0)
        x.mul_(0.5)
        return in_place_of(value, y + x)

    def _relu(self, value: Any, x: Tensor) -> Any:
        x.relu_()
        return in_place_of(value, self.linear(x))

    def _sometimes(self, value: Any, x: Tensor) -> Any:
        rows = x[:, 0] > 0.7
        y = self.linear(x)
        if bool(rows.any()):
            y = y.index_add(0, rows.nonzero()[:, 0], self.other(x[rows]))
        return in_place_of(value, y)

    def _dropout(self, value: Any, x: Tensor) -> Any:
        if self.given is None:
            mask = torch.rand(x.shape, dtype=x.dtype) < 0.6
            if not is_recomputing():
                self.masks.append(mask)
        else:
            mask = self.given.pop(0)
        return in_place_of(value, self.linear(x) * mask)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, value: Any) -> Tensor:
        head: Tensor = self.linear(main_of(value))
        return head


def build(spec: Spec) -> nn.Sequential:
    """The same parameters each time."""
    torch.manual_seed(spec.seed)
    shared: nn.Linear | None = None
    layers: list[nn.Module] = []
    for kind, extra in spec.layers:
        layer = Layer(kind, extra, shared if kind == "shared" else None)
        if kind == "shared" and shared is None:
            shared = layer.linear
        layers.append(layer)
    return nn.Sequential(*layers, Head()).double()


def data(spec: Spec, step: int) -> tuple[Tensor, Tensor]:
    """Inputs [batch, WIDTH] and classes of a step; some of these are padding."""
    generator = torch.Generator().manual_seed(spec.seed + 1000 * step)
    inputs = torch.randn(spec.batch_size, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, (spec.batch_size,), generator=generator)
    if spec.loss in ("ignoring", "summed"):
        targets[torch.rand(spec.batch_size, generator=generator) < 0.3] = -100
        targets[-1] = 0
    return inputs, targets


def contrasting(output: Tensor, targets: Tensor) -> Tensor:
    alike = output @ output.T
    return F.cross_entropy(alike, targets % len(output))


def summed(output: Tensor, targets: Tensor) -> WeightedLoss:
    loss = F.cross_entropy(output, targets, reduction="sum")
    return WeightedLoss(loss, (targets != -100).sum())


CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": F.cross_entropy,
    "ignoring": F.cross_entropy,
    "weighing": lambda y, t: F.cross_entropy(y, t, CLASS_WEIGHTS),
    "contrasting": contrasting,
    "summed": summed,
}


def optimizer_of(spec: Spec, module: nn.Module) -> torch.optim.Optimizer:
    if spec.adam:
        return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train_plain(spec: Spec, masks: dict[str, list[Tensor]]) -> Trained:
    """The whole batch through the plain model, with dropout's masks given."""
    module, found = build(spec), Trained()
    for name, layer in module.named_children():
        if name in masks:
            assert isinstance(layer, Layer)
            layer.given = list(masks[name])
    optimizer = optimizer_of(spec, module)
    for step in range(STEPS):
        inputs, targets = data(spec, step)
        optimizer.zero_grad()
        loss = LOSSES[spec.loss](module(inputs), targets)
        loss = loss.sum / loss.weight if isinstance(loss, WeightedLoss) else loss
        loss.backward()
        found.losses.append(float(loss.detach()))
        found.gradients.append(gradients(module))
        optimizer.step()
    found.state = state_of(module)
    return found


def train_pipeline(spec: Spec) -> Trained:
    """The same in one process of a pipeline, with this replica's share of each batch."""
    init_process_group("gloo", timeout=60.0)
    contexts.reset()
    env = context().env
    module, found = build(spec), Trained()
    layers = dict(module.named_children())
    optimizer = optimizer_of(spec, module)
    try:
        model = HybridParallel(
            module,
            optimizer,
            balance=list(spec.balance),
            num_microbatches=spec.num_microbatches,
            activation_checkpoint=spec.checkpoint,
            schedule=spec.schedule,
        )
        for step in range(STEPS):
            inputs, targets = (x[env.rank :: env.num_replicas] for x in data(spec, step))
            optimizer.zero_grad()
            scope: Any = spec.scope
            loss = model.train_step(inputs, targets, LOSSES[spec.loss], loss_scope=scope)
            found.losses.append(float(loss))
            found.gradients.append(gradients(module))
            optimizer.step()
            found.steps += 1
    except PipolluxError as error:
        found.refused = f"{type(error).__name__}: {error}"
    kept = dict(module.named_children())
    found.state = dict(module.state_dict())
    for name, layer in layers.items():
        if kept[name] is layer and isinstance(layer, Layer) and layer.masks:
            found.masks[name] = layer.masks
    return found


def whole_masks(
    spec: Spec, replicas: Sequence[Sequence[Trained]], steps: int
) -> dict[str, list[Tensor]]:
    """Dropout's masks of whole batches, by layer: one for each step; after these many, nothing."""
    names = {name for process in itertools.chain(*replicas) for name in process.masks}
    return {
        name: [
            _mask(spec, replicas, name, step) if step < steps else torch.ones(1, dtype=torch.bool)
            for step in range(STEPS)
        ]
        for name in names
    }


def _mask(spec: Spec, replicas: Sequence[Sequence[Trained]], name: str, step: int) -> Tensor:
    whole = torch.zeros(spec.batch_size, WIDTH, dtype=torch.bool)
    for r, processes in enumerate(replicas):
        (masks,) = (process.masks[name] for process in processes if name in process.masks)
        rows = whole[r :: len(replicas)]
        flat = torch.cat(masks)  # each step has as many rows
        rows.copy_(flat[step * len(rows) : (step + 1) * len(rows)])
    return whole
