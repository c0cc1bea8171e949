"""Layers from a recording: one for the calls before the first block, one from each block on.

    recording     embed  add  mask │ block 0 │ block 1  norm │ block 2 │ norm  head
    layer         0                │ 1       │ 2             │ 3       │ 4
    carried                     x, mask    x, mask         x, mask     x

A layer's forward is Python source that repeats its calls. It carries on the tensors that later
layers read.
"""

from __future__ import annotations

import hashlib
import itertools
import linecache
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .expressions import (
    PLAIN,
    Expression,
    Form,
    Literal,
    Names,
    Polynomial,
    State,
    Tree,
    Value,
    is_name,
    leaves_of,
    path,
    source,
)
from .inputs import Inputs
from .recorder import Call, Recording, requires_grad_of
from .watch import SettingsWatch

_numbers = itertools.count()


@dataclass(frozen=True)
class Piece:
    """The calls of one layer, and the tensors that it gets and returns."""

    calls: tuple[Call, ...]
    receives: tuple[int, ...]
    returns: tuple[int, ...]
    output: Expression | None
    """The model's output, of the last layer."""
    needs_sizes: bool
    """Whether this layer or a later one reads the batch's sizes."""
    carried_bytes: int
    forms: Mapping[int, Form]
    """Those of the tensors that it gets and makes; none if the sizes of results are not checked."""

    @property
    def results(self) -> Iterator[int]:
        """The numbers of the tensors that its modules return."""
        return (index for call in self.calls if call.is_module for index in call.writes)


def pieces_of(recording: Recording, blocks: Sequence[str]) -> tuple[list[str], list[Piece]]:
    """Cut a recording before each block and after the last; return the blocks and the pieces."""
    wanted = set(blocks)
    found = [
        i for i, call in enumerate(recording.calls) if call.is_module and call.target in wanted
    ]
    cuts = [0, *found, found[-1] + 1, len(recording.calls)]
    outputs = {x.index for x in leaves_of(recording.output) if isinstance(x, Value)}
    made = {x.index for x in leaves_of(recording.inputs) if isinstance(x, Value)}
    pieces: list[Piece] = []
    for first, last in itertools.pairwise(cuts):
        calls = recording.calls[first:last]
        is_last = len(pieces) == len(cuts) - 2
        receives = _read(recording.calls[first:], outputs) & made
        made |= {index for call in calls for index in call.writes}
        returns = set() if is_last else _read(recording.calls[last:], outputs) & made
        later = [
            *recording.calls[first:],
            Call(None, recording.output, Literal(None), Literal(None), ""),
        ]
        pieces.append(
            Piece(
                tuple(calls),
                tuple(sorted(receives)),
                tuple(sorted(returns)),
                recording.output if is_last else None,
                any(_has_sizes(call) for call in later),
                sum(recording.bytes[index] for index in returns),
                {
                    index: recording.forms[index]
                    for index in (*receives, *(x for call in calls for x in call.writes))
                    if index in recording.forms
                },
            )
        )
    return [recording.calls[i].target for i in found], pieces


def _read(calls: Sequence[Call], outputs: set[int]) -> set[int]:
    return outputs | {x.index for call in calls for x in call.reads if isinstance(x, Value)}


def _has_sizes(call: Call) -> bool:
    parts = itertools.chain(call.reads, leaves_of(call.result))
    return any(isinstance(x, Polynomial) for x in parts)


class Scope(nn.Module):
    """Holds modules and parameters under the names that they have in the model."""


class RecordedLayer(Scope):
    """A layer made of a model's own modules and the operations between them.

    Its parameters, buffers and modules have their names in the model.
    """

    def __init__(self, inputs: Inputs | None) -> None:
        super().__init__()
        self.__class__ = _own_class()
        self._inputs = inputs
        self._run: dict[bool, Callable[[Any, Any], Any]] = {}
        self.recorded = ""
        """A digest of the forward, by which replicas compare their layers."""
        self.refuses_autocast: str | None = None
        self.watch: SettingsWatch | None = None

    def forward(self, value: Any) -> Any:
        """Run the layer's calls."""
        if self.watch is not None:
            self.watch.check(training=self.training)
        if self.refuses_autocast is not None and torch.is_autocast_enabled(_device_of(value).type):
            raise ConfigurationError(
                f"the model cannot be run under autocast as layers: {self.refuses_autocast}"
            )
        return self._run[self.training](self, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the layer to another device.

        Raises:
            ConfigurationError: Its dtype would change, which its operations have recorded.
        """
        before = [x.dtype for x in self.parameters()]
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        if [x.dtype for x in self.parameters()] != before:
            raise ConfigurationError(
                "the dtype of a converted model was changed, and the operations between its blocks "
                "are those of the dtype before: change the model's dtype, then convert it"
            )
        return result


def _own_class() -> type[RecordedLayer]:
    """Return a class whose forward is a code object of its own.

    ``torch.compile`` limits how often it compiles a code object, and layers do different things.
    """
    shared = RecordedLayer.forward
    own = types.FunctionType(shared.__code__.replace(), shared.__globals__, shared.__name__)
    own.__annotations__, own.__doc__ = shared.__annotations__, shared.__doc__
    members = {"forward": own, "__module__": __name__, "__doc__": RecordedLayer.__doc__}
    return type(RecordedLayer.__name__, (RecordedLayer,), members)


def write_forward(
    layer: RecordedLayer, piece: Piece, following: Piece | None, *, training: bool, title: str
) -> str:
    """Give a layer the forward of a piece; return its source."""
    names, lines = Names(), []
    if layer._inputs is not None:
        lines.append("sizes, leaves = self._inputs.read(value, self.training)")
        tensors = list(layer._inputs.tensors)
        lines += [f"v{index} = leaves[{tensors[index]}]" for index in piece.receives]
    else:
        received = [*(["sizes"] if piece.needs_sizes else []), *(f"v{i}" for i in piece.receives)]
        lines.append(f"({', '.join(received)},) = value")
    given = ", ".join(f"v{index}" for index in piece.receives)
    start = len(lines)
    # Another stage's tensor is a leaf with a gradient, and must not change in place.
    changed = frozenset[int]().union(*(call.mutates for call in piece.calls))
    lines += [f"v{index} = v{index}.clone()" for index in piece.receives if index in changed]
    last = _last_reads(piece)
    needed, known = _needed_sizes(piece), _known_sizes(piece)
    if needed and layer._inputs is None and not piece.needs_sizes:
        lines.append(
            f"sizes = ({', '.join(known.get(i, 'None') for i in range(max(needed) + 1))},)"
        )
    for place, call in enumerate(piece.calls):
        lines += _statements(call, names)
        for index in call.writes if call.is_module else ():
            if index in piece.forms:
                lines.append(_size_check(call, index, piece.forms[index], names))
        dead = [f"v{i}" for i, end in last.items() if end == place]
        if dead:
            lines.append(f"del {', '.join(dead)}")
    if piece.output is not None:
        lines.append(f"return {source(piece.output, names)}")
    else:
        needs = following is not None and following.needs_sizes
        carried = [*(["sizes"] if needs else []), *(f"v{i}" for i in piece.returns)]
        lines.append(f"return ({', '.join(carried)},)")
    if any(re.search(r"\bdevice\b", line) for line in lines):
        lines.insert(start, f"device = device_of({given})")
    text = "def forward(self, value):\n" + "".join(f"    {line}\n" for line in lines)
    file = f"<pipollux layer {next(_numbers)}: {title}>"
    namespace = {**_HELPERS, **names.values}
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), namespace)  # noqa: S102  # our own source, with no text of the user
    layer._run[training] = namespace["forward"]
    content = [layer.recorded, text, *(f"{x} = {_shown(names.values[x])}" for x in names.values)]
    layer.recorded = hashlib.blake2b("\n".join(content).encode(), digest_size=6).hexdigest()
    return text


def _shown(value: Any) -> str:
    """Return a text of an object that is equal in all processes."""
    if isinstance(value, (*PLAIN, Tensor)):
        return repr(value)
    function = getattr(value, "function", value)
    return str(getattr(function, "__qualname__", type(value).__qualname__))


def can_check_sizes(pieces: Sequence[Piece]) -> bool:
    """Return whether each layer can compare the sizes of its modules' results with the batch's."""
    for place, piece in enumerate(pieces):
        if any(index not in piece.forms for index in piece.results):
            return False
        if place and not piece.needs_sizes and _needed_sizes(piece) - set(_known_sizes(piece)):
            return False
    return True


def _needed_sizes(piece: Piece) -> set[int]:
    """Return the numbers of the batch's dimensions on which the results of modules depend."""
    shapes = (piece.forms[index].shape for index in piece.results if index in piece.forms)
    sizes = (x for shape in shapes for x in shape if isinstance(x, Polynomial))
    return {x for size in sizes for dimensions, _ in size.terms for x in dimensions}


def _known_sizes(piece: Piece) -> dict[int, str]:
    """Return the source of dimensions of the batch that received tensors have."""
    found = {}
    for index in piece.receives:
        for place, size in enumerate(piece.forms[index].shape if index in piece.forms else ()):
            if isinstance(size, Polynomial) and len(size.terms) == 1:
                ((dimensions, coefficient),) = size.terms
                if len(dimensions) == coefficient == 1:
                    found[dimensions[0]] = f"v{index}.shape[{place}]"
    return found


def _size_check(call: Call, index: int, form: Form, names: Names) -> str:
    """Return the statement that compares the size of a module's result.

    The code between blocks is compared with the model at a new length, the code in them is not: it
    is checked that what they return has the size that the comparison took for granted.
    """
    wanted = f"({''.join(f'{source(x, names)}, ' for x in form.shape)})"
    where = names.of(f"{call.where}: {call.target!r}", "where")
    return f"if v{index}.shape != {wanted}: misshaped(v{index}, {wanted}, {where})"


def _last_reads(piece: Piece) -> dict[int, int]:
    """Return the last call that uses each tensor that is not needed afterwards."""
    kept = set(piece.returns)
    if piece.output is not None:
        kept |= {x.index for x in leaves_of(piece.output) if isinstance(x, Value)}
    last: dict[int, int] = {}
    for place, call in enumerate(piece.calls):
        used = {x.index for x in call.reads if isinstance(x, Value)} | set(call.writes)
        last.update(dict.fromkeys(used - kept, place))
    return last


def _statements(call: Call, names: Names) -> list[str]:
    target = f"self{path(call.target)}" if call.is_module else names.of(call.target, "function")
    assert isinstance(call.args, Tree)  # noqa: S101  # recorded from a tuple
    assert isinstance(call.kwargs, Tree)  # noqa: S101  # recorded from a dict
    given = [source(x, names) for x in call.args.items]
    pairs = list(zip(call.kwargs.context, call.kwargs.items, strict=True))
    given += [f"**{{{name!r}: {source(x, names)}}}" for name, x in pairs if not is_name(name)]
    given += [f"{name}={source(x, names)}" for name, x in pairs if is_name(name)]
    text = f"{target}({', '.join(given)})"
    if call.is_check:
        wanted = source(call.result, names)
        check = "check_frozen" if call.target is requires_grad_of else "check"
        lines = [f"{check}({text}, {wanted}, {names.of(call.where, 'where')})"]
    else:
        lines = _unpacked(call, text, names)
    contexts = ["no_grad()"] if not call.has_graph else []
    contexts += ["no_autocast(device)"] if not call.has_autocast else []
    if contexts:
        return [f"with {', '.join(contexts)}:", *(f"    {line}" for line in lines)]
    return lines


def _unpacked(call: Call, text: str, names: Names) -> list[str]:
    if isinstance(call.result, Value):
        return [f"v{call.result.index} = {text}"]
    leaves = list(leaves_of(call.result))
    if not any(isinstance(x, Value) for x in leaves):
        return [text]
    pattern, extra = [], []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Value):
            pattern.append(f"v{leaf.index}")
            continue
        pattern.append(f"u{number}")
        if not isinstance(leaf, (Literal, Polynomial)):
            continue
        where = names.of(call.where, "where")
        extra.append(f"check(u{number}, {source(leaf, names)}, {where})")
    if (
        isinstance(call.result, Tree)
        and call.result.kind in (tuple, list)
        and list(call.result.items) == leaves
    ):
        return [f"({', '.join(pattern)},) = {text}", *extra]
    return [f"({', '.join(pattern)},) = unpack({text}, {names.of(call.where, 'where')})", *extra]


def _check(value: Any, expected: Any, where: str) -> None:
    if type(value) is not type(expected) or value != expected:
        _differs(where, value, expected)


def _check_frozen(value: bool, expected: bool, where: str) -> None:
    if value is not expected:
        raise ConfigurationError(
            f"{where}: the model reads requires_grad, which was {expected} at the conversion and "
            f"is {value} now, and the layers have the operations for {expected} only: freeze or "
            "unfreeze parameters before the conversion, or name the module in cut_at="
        )


def _differs(where: str, value: Any, expected: Any) -> NoReturn:
    raise ConfigurationError(
        f"{where}: the model decides by its data which operations run; the answer was {expected!r} "
        f"on the example inputs and is {value!r} for this batch, and the layers have "
        "the operations for the first only: give example_inputs like this batch, or cut_at= "
        "modules around the decision"
    )


class MisshapedError(ConfigurationError):
    """A module returned a tensor of another size than recorded."""


def _misshaped(value: Tensor, wanted: tuple[int, ...], where: str) -> NoReturn:
    raise MisshapedError(
        f"{where} returns a tensor of shape {tuple(value.shape)} for this batch, and {wanted} was "
        "expected from the recording: the module does something else at this length; pad the "
        "batch, or give example_inputs as long as the longest batch"
    )


def _unpack(value: Any, where: str) -> list[Any]:  # noqa: ARG001  # for the error's position
    return pytree.tree_leaves(value)


def _device_of(*values: Any) -> torch.device:
    """Return the device of the first tensor."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")


def _autocast_type(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return otherwise


def _no_autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, enabled=False)


def _constant(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)


_HELPERS: Mapping[str, Any] = {
    "check": _check,
    "check_frozen": _check_frozen,
    "misshaped": _misshaped,
    "unpack": _unpack,
    "device_of": _device_of,
    "autocast_type": _autocast_type,
    "no_grad": torch.no_grad,
    "no_autocast": _no_autocast,
    "constant": _constant,
}


def attach(
    layer: nn.Module, name: str, value: nn.Module | Tensor, *, persistent: bool = True
) -> None:
    """Register a module, parameter or buffer in a layer under its name in the model."""
    *scopes, last = name.split(".")
    place = layer
    for scope in scopes:
        if scope not in place._modules:
            place.add_module(scope, Scope())
        place = place._modules[scope]  # type: ignore[assignment]  # it is there now
    if last in place._modules or last in place._parameters or last in place._buffers:
        return
    if isinstance(value, nn.Module):
        place.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        place.register_parameter(last, value)
    else:
        place.register_buffer(last, value, persistent=persistent)


def states_of(piece: Piece) -> set[str]:
    """Return the names of parameters and buffers that a piece's calls use directly."""
    used = {x.name for call in piece.calls for x in call.reads if isinstance(x, State)}
    if piece.output is not None:
        used |= {x.name for x in leaves_of(piece.output) if isinstance(x, State)}
    return used


def modules_of(piece: Piece) -> set[str]:
    """Return the names of the modules that a piece calls."""
    return {call.target for call in piece.calls if call.is_module}
