"""Recording of the operations between a model's blocks, while it runs on an example.

    forward of the model, opened down to its blocks      recorded
    ────────────────────────────────────────────────     ─────────────────────────────────
    self.embed(ids)                                      call of module "embed"
    ids.shape[1], x.dtype                                nothing: see :mod:`.unify`
    x + positions                                        call of torch.Tensor.add
    create_causal_mask(config, x, mask, …)               call of that function
    if mask.all():                                       check that the answer is the same
    self.blocks[0](x, mask)                              call of module "blocks.0"

Modules without blocks in them stay closed: their calls are recorded, and run the original module.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pipollux_hybrid.errors import ConfigurationError

from .expressions import (
    PLAIN,
    Constant,
    Expression,
    Form,
    Literal,
    Opaque,
    Slice,
    State,
    Tree,
    Value,
    leaves_of,
)
from .interception import call_module, intercepted

METADATA = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mps",
        "is_xpu",
        "itemsize",
        "nbytes",
        "grad_fn",
        "names",
        "output_nr",
        "_version",
        "size",
        "dim",
        "numel",
        "stride",
        "storage_offset",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_contiguous",
        "is_inference",
        "is_conj",
        "is_neg",
        "__len__",
        "__hash__",
        "__repr__",
        "__format__",
        "ndimension",
        "nelement",
        "get_device",
        "data_ptr",
        "is_pinned",
        "is_shared",
        "type",
        "__reduce_ex__",
        "retain_grad",
        "can_cast",
        "result_type",
        "promote_types",
        "is_autocast_enabled",
    ]
)
"""Functions and attributes of tensors whose answers depend on shapes, types and devices only."""
RANDOM = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "bernoulli",
        "multinomial",
        "normal",
        "poisson",
        "bernoulli_",
        "uniform_",
        "normal_",
        "random_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
    ]
)
"""Functions of torch that draw from its generators whatever the mode."""
SHAPES = frozenset(
    ["shape", "size", "numel", "nelement", "nbytes", "stride", "__len__", "ndimension"]
)
"""Those of :data:`METADATA` that tell how many elements a tensor has."""
RAGGED = frozenset(
    [
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
        *("repeat_interleave", "nonzero_static"),
    ]
)
"""Functions whose results have as many elements as the data say, besides boolean indices."""
OURS = str(Path(__file__).parent)
TORCH = str(Path(torch.__file__).parent)


NOTHING = Literal(None)


class UnrecordableError(ConfigurationError):
    """A model does something that layers cannot repeat."""


@dataclass
class Call:
    """A recorded call."""

    target: Any
    """The function, or the name of the module."""
    args: Expression
    kwargs: Expression
    result: Expression
    """What it returned. A check's result is the value that it must have again."""
    where: str
    is_module: bool = False
    is_check: bool = False
    is_random: bool = False
    has_graph: bool = True
    """Whether gradients were enabled."""
    has_autocast: bool = True
    """Whether autocast was enabled, if it was around the model."""
    changes: frozenset[str] = frozenset()
    """Names of the buffers and parameters that it changes in place."""
    mutates: frozenset[int] = frozenset()
    """Numbers of the tensors that it changes in place."""

    @property
    def reads(self) -> Iterator[Expression]:
        """The leaves of its arguments."""
        yield from leaves_of(self.args)
        yield from leaves_of(self.kwargs)

    @property
    def writes(self) -> Iterator[int]:
        """The numbers of the tensors that it returns."""
        yield from (x.index for x in leaves_of(self.result) if isinstance(x, Value))


@dataclass
class Recording:
    """The calls of one forward."""

    calls: list[Call] = field(default_factory=list)
    inputs: Expression = NOTHING
    output: Expression = NOTHING
    forms: dict[int, Form] = field(default_factory=dict)
    """Those of its tensors, by their numbers."""
    bytes: dict[int, int] = field(default_factory=dict)


def record(
    model: nn.Module,
    opened: Iterable[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Recording:
    """Run a model, and return its calls.

    ``opened`` are the modules whose forward is recorded; all others are called as they are.

    Raises:
        UnrecordableError: A layer could not repeat what the model does.
    """
    return Recorder(model, opened).run(args, kwargs)


class Recorder(TorchFunctionMode):
    """Records one forward of a model; ``opened`` are the modules whose own calls are recorded."""

    checks_draws = True
    """Whether random numbers of Python and NumPy are refused: other threads may draw them."""

    def __init__(self, model: nn.Module, opened: Iterable[nn.Module]) -> None:
        super().__init__()
        self._model, self._opened = model, set(opened)
        self._paths = {module: name for name, module in model.named_modules()}
        states = [*model.named_parameters(), *model.named_buffers()]
        self._states = {id(tensor): State(name) for name, tensor in states}
        self._values: dict[int, Value] = {}
        # So that no id is used twice, also where modules replace their buffers.
        self._kept: list[Any] = [tensor for _, tensor in states]
        self._count = 0
        self._drawn: set[int] = set()
        self._ragged: set[int] = set()
        self._closed = False
        self._autocast = _autocast_enabled()
        self._thread = threading.get_ident()
        self.recording = Recording()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Recording:
        """Run the model, and return its calls; see :func:`record`."""
        states = {path: _attributes(module) for path, module in self._opened_paths()}
        before = random.getstate(), _numpy_state()
        self.recording.inputs = self._result((tuple(args), dict(kwargs)), (), "the inputs")[0]
        with intercepted(self, self._opened), self:
            output = self._model(*args, **kwargs)
        self.recording.output = self._expression(output, "the output", opaque=False)
        if self.checks_draws and not _same_draws(before, (random.getstate(), _numpy_state())):
            raise UnrecordableError(
                f"the forward of {self._name('')} draws random numbers with Python's random or "
                "NumPy, which layers do not repeat: draw them with torch"
            )
        for path, module in self._opened_paths():
            self._check_attributes(path, states[path], _attributes(module))
        return self.recording

    @property
    def pauses(self) -> bool:
        """Whether calls are not recorded: those in a recorded call, and those of other threads."""
        return self._closed or threading.get_ident() != self._thread

    def _opened_paths(self) -> list[tuple[str, nn.Module]]:
        return [(path, module) for module, path in self._paths.items() if module in self._opened]

    def _check_attributes(
        self, path: str, before: Mapping[str, Any], after: Mapping[str, Any]
    ) -> None:
        for name in before.keys() | after.keys():
            if before.get(name, self) is not after.get(name, self):
                raise UnrecordableError(
                    f"the forward of {self._name(path)} sets its attribute {name!r}, which layers "
                    "do not have: return the value as an output, or cut inside of the module with "
                    "cut_at="
                )

    def _name(self, path: str) -> str:
        module = self._model.get_submodule(path)
        return f"{path!r} ({type(module).__name__})" if path else f"the {type(module).__name__}"

    # --- calls -------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and record it if the model called it outside of its blocks."""
        kwargs = dict(kwargs or {})
        name = _name_of(func)
        changes_type = name == "type" and len(args) + len(kwargs) > 1
        if self._closed:
            return func(*args, **kwargs)
        if name in METADATA and not changes_type:
            if name in SHAPES and self._is_ragged(args[0]):
                self.call(shape_of, (args[0],), {})
            if name == "requires_grad" and self._may_be_frozen(args[0]):
                return self.call(requires_grad_of, (args[0],), {})
            return func(*args, **kwargs)
        if name == "__iter__":
            return iter(self.call(torch.unbind, args, kwargs))
        if name == "_assert" and not isinstance(args[0], Tensor):
            return func(*args, **kwargs)  # of sizes, with a text that has them
        if name == "_set_grad_enabled":
            return func(*args, **kwargs)
        return self.call(func, args, kwargs, is_random=name in RANDOM)

    def module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module, and record it as one call unless it is opened."""
        if self.pauses or module in self._opened or module not in self._paths:
            return call_module(module, *args, **kwargs)
        return self.call(self._paths[module], args, kwargs, module=module)

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        module: nn.Module | None = None,
        is_random: bool = False,
    ) -> Any:
        """Run and record a call."""
        where, opaque = _where(), module is None
        given = self._expression(args, where, opaque=opaque)
        named = self._expression(kwargs, where, opaque=opaque)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        buffers = list(module.buffers()) if module is not None else []
        tensors += buffers
        versions = [(x, x._version) for x in tensors if not x.is_inference()]
        graph, autocast = torch.is_grad_enabled(), _autocast_enabled()
        self._closed = True
        try:
            if module is None:
                returned = target(*args, **kwargs)
            else:
                returned = self.run_module(module, args, kwargs)
            changed = {id(x) for x, version in versions if x._version != version}
            if module is not None:
                changed |= {id(x) for x in buffers} - {id(x) for x in module.buffers()}
            self._check_changed(changed, (given, named), where)
            mutated = {self._values[x].index for x in changed if x in self._values}
            result, returned = self._result(returned, changed, where)
        finally:
            self._closed = False
        made = Call(target, given, named, result, where, is_module=module is not None)
        made.has_graph, made.has_autocast = graph, autocast or not self._autocast
        made.changes = frozenset(self._states[x].name for x in changed if x in self._states)
        made.mutates = frozenset(x.index for x in made.reads if isinstance(x, Value)) & mutated
        made.is_random = is_random or any(
            isinstance(x, Value) and x.index in self._drawn for x in made.reads
        )
        has_tensors = any(isinstance(x, Value) for x in leaves_of(result))
        made.is_check = module is None and not has_tensors and returned is not None
        if made.is_random:
            self._drawn.update(made.writes)
        if _is_ragged_call(target, args) or any(
            isinstance(x, Value) and x.index in self._ragged for x in made.reads
        ):
            self._ragged.update(made.writes)
        self._check(made)
        if made.is_check and not any(isinstance(x, (Value, State)) for x in made.reads):
            return returned  # a function of plain values
        self.recording.calls.append(made)
        return returned

    def run_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that is recorded as one call."""
        return call_module(module, *args, **kwargs)

    def _is_ragged(self, tensor: Any) -> bool:
        """Return whether a tensor may have as many elements as the data say."""
        value = self._values.get(id(tensor))
        return value is not None and value.index in self._ragged

    def _may_be_frozen(self, tensor: Tensor) -> bool:
        """Return whether freezing or unfreezing parameters may change ``requires_grad``.

        That of a result with a graph is left out: comparing with a recording under
        ``torch.no_grad()`` shows whether it decides anything.
        """
        if id(tensor) in self._states:
            return isinstance(tensor, nn.Parameter)
        return tensor.is_floating_point() and not tensor.requires_grad

    def _check_changed(
        self, changed: Iterable[int], given: Iterable[Expression], where: str
    ) -> None:
        constants = {
            x.identity for each in given for x in leaves_of(each) if isinstance(x, Constant)
        }
        if constants.intersection(changed):
            raise UnrecordableError(
                f"{where}: the model changes a tensor that is none of its buffers, so that layers "
                "would each change their own: register it as a buffer, or move the code into a "
                "block"
            )

    def _check(self, made: Call) -> None:
        if made.is_check and made.is_random:
            raise UnrecordableError(
                f"{made.where}: the model decides by a random number which operations run, as with "
                "layerdrop or stochastic depth outside of its blocks: set that probability to 0"
            )
        strange = (x for x in leaves_of(made.result) if isinstance(x, Opaque))
        if made.is_check and any(strange):
            raise UnrecordableError(
                f"{made.where}: {_name_of(made.target)} turns a tensor into a "
                f"{type(next(leaves_of(made.result)).value).__name__}, which layers cannot repeat: "  # type: ignore[union-attr]  # an Opaque
                "compute with tensors, or move the code into a block"
            )

    # --- values ------------------------------------------------------------------------------

    def _result(self, value: Any, changed: Iterable[int], where: str) -> tuple[Expression, Any]:
        """Number the tensors of a result; return it with tensors that are no argument's objects.

        A module that returns its argument in evaluation, such as dropout, returns another tensor
        in training. The two must not be confused, so the model gets a view. Parameters and
        buffers stay what they are.
        """
        changed = set(changed)

        def number(leaf: Any) -> tuple[Expression, Any]:
            if not isinstance(leaf, Tensor):
                return Literal(leaf) if _is_plain(leaf) else Opaque(leaf, _identity(leaf)), leaf
            is_state = id(leaf) in self._states
            if id(leaf) in self._values and id(leaf) not in changed:
                leaf = leaf.view_as(leaf)
            made = Value(self._count)
            if not is_state:  # a buffer that is changed, or moved to where it is, stays one
                self._values[id(leaf)] = made
            self._count += 1
            self._kept.append(leaf)
            shape = tuple(Literal(size) for size in leaf.shape)
            self.recording.forms[made.index] = Form(shape, leaf.dtype, leaf.requires_grad)
            self.recording.bytes[made.index] = leaf.numel() * leaf.element_size()
            return made, leaf

        return _mapped(value, number, where)

    def _expression(self, value: Any, where: str, *, opaque: bool) -> Expression:
        def known(leaf: Any) -> tuple[Expression, Any]:
            if isinstance(leaf, Tensor):
                found = self._values.get(id(leaf)) or self._states.get(id(leaf))
                self._kept.append(leaf)
                return found or Constant(leaf, id(leaf)), leaf
            if _is_plain(leaf):
                return Literal(leaf), leaf
            if not opaque and not callable(leaf):
                raise UnrecordableError(
                    f"{where}: the model passes a {type(leaf).__module__}.{type(leaf).__name__} "
                    "between its modules, and layers pass tensors, numbers, strings and None only"
                )
            if _has_module(leaf):
                raise UnrecordableError(
                    f"{where}: the model passes a module, or a function with a module or tensor in "
                    "it, to a function, where layers would not know it: call the module itself, or "
                    "move the code into a block"
                )
            self._kept.append(leaf)
            return Opaque(leaf, _identity(leaf)), leaf

        return _mapped(value, known, where)[0]


def _mapped(
    value: Any, function: Callable[[Any], tuple[Expression, Any]], where: str
) -> tuple[Expression, Any]:
    """Apply a function to the leaves of containers and slices."""
    if isinstance(value, slice):
        parts = [_mapped(x, function, where) for x in (value.start, value.stop, value.step)]
        return Slice((parts[0][0], parts[1][0], parts[2][0])), slice(*(x for _, x in parts))
    kind: Any = tuple if isinstance(value, torch.Size) else pytree._get_node_type(value)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None or isinstance(value, Tensor):
        return function(value)
    children, context = node.flatten_fn(tuple(value) if kind is tuple else value)
    pairs = [_mapped(x, function, where) for x in children]
    tree = Tree(tuple(x for x, _ in pairs), kind, context)
    return tree, node.unflatten_fn([x for _, x in pairs], context)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; recorded where the data decide about it."""
    return tuple(tensor.shape)


def requires_grad_of(tensor: Tensor) -> bool:
    """Return whether a tensor requires gradients; recorded where the model asks."""
    return tensor.requires_grad


def _is_ragged_call(target: Any, args: Sequence[Any]) -> bool:
    name = "" if isinstance(target, str) else _name_of(target)
    if name == "where":
        return len(args) == 1
    if name == "__getitem__":
        masks = (x for x in pytree.tree_leaves(args[1]) if isinstance(x, Tensor))
        return any(x.dtype in (torch.bool, torch.uint8) for x in masks)
    return name in RAGGED


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN)


def _has_module(value: Any) -> bool:
    """Return whether an object is a module or trained tensor, or a function that has one."""
    if isinstance(value, functools.partial):
        return any(map(_has_module, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, types.FunctionType):
        return any(_has_module(x) for x in _closed_over(value))
    return isinstance(getattr(value, "__self__", value), (nn.Module, Tensor))


def _closed_over(function: types.FunctionType) -> list[Any]:
    cells = [x.cell_contents for x in function.__closure__ or () if _is_filled(x)]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if it is empty
    except ValueError:
        return False
    return True


def _identity(value: Any) -> Any:
    """Return what an object is known by: of a function, its code and what it closes over.

    So functions that a model makes in each forward from the same plain values are equal.
    """
    if isinstance(value, types.FunctionType):
        inside = _closed_over(value)
        if all(_is_plain(x) or isinstance(x, types.FunctionType) for x in inside):
            return value.__code__, *((type(x), _identity(x)) for x in inside)
    return value if _is_plain(value) else id(value)


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", type(func).__name__)
    return func.__self__.__name__ if name == "__get__" else name


_OWN = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes besides those that every module has."""
    return {name: x for name, x in vars(module).items() if name not in _OWN}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with its buffers and parameters, and items of containers."""
    own = own_attributes(module)
    found = {**own, **module._buffers, **module._parameters}
    for name, value in own.items():
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        if isinstance(value, (list, set, deque)):
            items = enumerate(value)
        found |= {f"{name}[{key!r}]": item for key, item in items}
    return found


def _same_draws(one: Any, other: Any) -> bool:
    (python, (keys, place)), (python2, (keys2, place2)) = one, other
    return python == python2 and place == place2 and bool((keys == keys2).all())


def _numpy_state() -> Any:
    state: Any = np.random.get_state()  # the generator that scripts share
    return state[1:3]


def _autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _where() -> str:
    """Return the file and line of the model that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((OURS, TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the model"
