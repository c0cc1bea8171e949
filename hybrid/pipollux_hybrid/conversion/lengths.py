"""Verification of lengths at their first use.

A model may do something else at a length that was not recorded, and layers have none of its code
between blocks. So the first layer keeps a copy of the model without the memory of its parameters.
At a new length the copy's own code runs on two samples of the example, while its modules return
zeros of the size that the recording predicts. The calls are compared with those of the recording::

    the model's code         self.embed(ids)    x + positions[:, :n]    self.blocks[0](x, mask)
    at length 700            zeros [2, 700, h]  runs                    zeros [2, 700, h]

Layers check the sizes that modules really return, see :func:`.pieces.write_forward`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import unify, verify
from .expressions import (
    ByMode,
    Expression,
    Form,
    Literal,
    Polynomial,
    State,
    Tree,
    Value,
    evaluate,
)
from .inputs import Inputs
from .recorder import Recorder, Recording, UnrecordableError, own_attributes
from .watch import configs_of

MOST_BYTES = 2**30
"""Memory for the results of operations between blocks, beyond which a length is not verified."""

NUM_SAMPLES = 2
"""Samples of the batches that are compared; other numbers are known to make no difference."""

Sizes: TypeAlias = tuple[int, ...]


class LengthProbe:
    """Runs a model's code between blocks at other lengths, and compares it with a recording."""

    def __init__(
        self,
        model: nn.Module,
        opened: Mapping[str, nn.Module],
        programs: Mapping[bool, Recording],
        inputs: Inputs,
    ) -> None:
        self._programs, self._inputs = programs, inputs.samples(NUM_SAMPLES)
        names = _states_of(programs.values())
        self._model = _without_memory(model, names)
        self._opened = [self._model.get_submodule(name) for name in opened]
        self._buffers = [x for name, x in self._model.named_buffers() if name in names]
        self._draws: dict[bool, bool] = {}
        """Whether the code between blocks draws random numbers, by mode."""
        self._device = next((x.device for x in model.parameters()), torch.device("cpu"))

    def __call__(self, training: bool, lengths: Sizes) -> str | None:
        """Return what the model does differently at these lengths, or None if it does the same."""
        sizes = (NUM_SAMPLES, *lengths)
        program = self._programs[training]
        made = {i for call in program.calls if not call.is_module for i in call.writes}
        needed = sum(x.bytes(sizes) for i, x in program.forms.items() if i in made)
        if needed > MOST_BYTES:
            return f"to verify that length takes {needed / 2**30:.1f} GiB"
        run = self._difference
        if "torch._dynamo" in sys.modules:  # do not compile the model's code in a compiled layer
            run = torch.compiler.disable(run)
        return run(program, sizes, training)

    def _difference(self, program: Recording, sizes: Sizes, training: bool) -> str | None:
        device = self._device
        # A checkpoint around the forward would count the tensors that operations here save.
        unseen = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)
        restored, uncached = self._restored(training), without_caches(self._model)
        with unseen, plain_contexts(device), restored, uncached:
            for module in self._model.modules():
                module.training = training
            args, kwargs = self._inputs.resized(sizes)
            recorder = _Prober(self._model, self._opened, program, sizes, training)
            recorder.device = device
            try:
                unify.check_size(program, recorder.run(args, kwargs), sizes, training=training)
            except Exception as error:  # the model's code, at a size that it may not expect
                return str(error) or type(error).__name__
        return None

    @contextmanager
    def _restored(self, training: bool) -> Iterator[None]:
        """Restore buffers that have memory, attributes, and torch's generators, after the body.

        Stages may be threads that draw numbers at the same time, so generators are restored only if
        the code between blocks draws some. The first body of a mode shows that, in the conversion.
        """
        values = [x.clone() for x in self._buffers]
        kept = [(x, dict(vars(x)), dict(x._buffers)) for x in self._opened]
        state = verify.random_state() if self._draws.get(training, True) else None
        try:
            yield
        finally:
            if state is not None:
                self._draws.setdefault(training, not verify.same_random_state(state))
                verify.set_random_state(state)
            for module, attributes, tensors in kept:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.update(tensors)
            with torch.no_grad():
                for buffer, value in zip(self._buffers, values, strict=True):
                    buffer.copy_(value)


class _Prober(Recorder):
    """Records a model whose modules return zeros of the recorded forms."""

    checks_draws = False

    def __init__(
        self,
        model: nn.Module,
        opened: Iterable[nn.Module],
        program: Recording,
        sizes: Sizes,
        training: bool,
    ) -> None:
        super().__init__(model, opened)
        self._program, self._sizes, self._in_training = program, sizes, training
        self.device = torch.device("cpu")

    def run_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002  # a Recorder's signature
        """Return zeros of the forms that the call at this place returned."""
        place = len(self.recording.calls)
        calls = self._program.calls
        name = self._paths[module]
        if place >= len(calls) or calls[place].target != name:
            pairs = zip(self.recording.calls, calls, strict=False)
            first = next((x.where for x, known in pairs if x.target != known.target), repr(name))
            raise UnrecordableError(f"{first}: the model calls other functions or modules")
        return self._stand_in(calls[place].result, f"the result of {name!r}")

    def _stand_in(self, expression: Expression, what: str) -> Any:
        match expression:
            case Value(index) if index in self._program.forms:
                form = self._program.forms[index]
                if min(form.sizes(self._sizes), default=0) < 0:
                    raise UnrecordableError(f"by the recording, {what} has a negative size")
                return _zeros(form, self._sizes, self.device)
            case Literal(value):
                return value
            case Polynomial():
                return evaluate(expression, self._sizes)
            case ByMode(evaluation, training):
                return (training if self._in_training else evaluation).value
            case Tree(items, kind, context):
                made = [self._stand_in(x, what) for x in items]
                return pytree.SUPPORTED_NODES[kind].unflatten_fn(made, context)
        raise UnrecordableError(f"{what} has a {type(expression).__name__}")


def _zeros(form: Form, sizes: Sizes, device: torch.device) -> Tensor:
    """Return zeros that share one element."""
    zero = torch.zeros((), dtype=form.dtype, device=device, requires_grad=form.requires_grad)
    return zero.expand(form.sizes(sizes))


def _states_of(programs: Iterable[Recording]) -> set[str]:
    """Return the names of the parameters and buffers that the code between blocks uses."""
    calls = (call for program in programs for call in program.calls)
    return {x.name for call in calls for x in call.reads if isinstance(x, State)}


def _without_memory(model: nn.Module, used: Collection[str]) -> nn.Module:
    """Return a copy of a model whose parameters have one zero each for all of their elements.

    The named buffers keep their values; configurations and constants are the model's own.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        expanded = empty.expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(expanded, requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        empty = torch.zeros((), dtype=buffer.dtype, device=buffer.device)
        memo[id(buffer)] = buffer.detach().clone() if name in used else empty.expand(buffer.shape)
    for module in model.modules():
        for value in own_attributes(module).values():
            if isinstance(value, Tensor) or hasattr(value, "to_dict"):
                memo.setdefault(id(value), value)
    return copy.deepcopy(model, memo)


# --- contexts ----------------------------------------------------------------------------------


@contextmanager
def plain_contexts(device: torch.device | None = None) -> Iterator[None]:
    """Leave the contexts of the caller: inference, disabled gradients, autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        kinds = {"cpu"} if device is None else {device.type, "cpu"}
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Run a Hugging Face model without caches of keys and values.

    Its own activation checkpointing is disabled for good: stages have theirs.
    """
    changed = []
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            setattr(module, "gradient_checkpointing", False)  # noqa: B010  # no module declares it
        for each in configs_of(module):
            if getattr(each, "use_cache", None):
                changed.append(each)
                each.use_cache = False
    try:
        yield
    finally:
        for each in changed:
            each.use_cache = True
