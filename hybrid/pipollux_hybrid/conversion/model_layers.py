"""The layers of a converted model: an ``nn.Sequential`` with the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipollux_hybrid.checkpoint.parameter_groups import RECORDED, plain_name
from pipollux_hybrid.errors import ConfigurationError

from .pieces import Piece, RecordedLayer
from .watch import SettingsWatch


class ModelLayers(nn.Sequential):
    """A model as layers, made by :func:`pipollux.as_layers`.

    Modules and parameters are the model's own objects. ``state_dict``, ``named_parameters`` and
    ``named_buffers`` have the names of the model, so that its checkpoints load, and the model loads
    those of the layers.
    """

    original: type[nn.Module] = nn.Module
    """The class of the converted model."""
    _settings: SettingsWatch | None = None

    def __init__(
        self, layers: Mapping[str, RecordedLayer], pieces: Sequence[Piece], order: Sequence[str]
    ) -> None:
        super().__init__()
        for number, (name, layer) in enumerate(layers.items()):
            self.add_module(f"{number}{RECORDED}{name.replace('.', '/')}", layer)
        self._pieces, self._order = list(pieces), list(order)
        renames: Any = self.register_load_state_dict_pre_hook  # torch does not annotate it
        renames(ModelLayers._rename)

    def watch(self, settings: SettingsWatch) -> None:
        """Refuse to run when settings of the model change."""
        self._settings = settings
        next(iter(self)).watch = settings  # type: ignore[assignment]  # a RecordedLayer

    def __getattr__(self, name: str) -> Any:
        """Say where the attributes of the converted model are."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            self.explain_missing(name, error)
            raise

    def explain_missing(self, name: str, error: AttributeError) -> None:
        """Raise an error that says more, if the converted model has such an attribute."""
        settings = self.__dict__.get("_settings")
        known = settings is not None and settings.has_attribute(name)
        if known or hasattr(self.original, name):
            raise AttributeError(
                f"{name!r} is an attribute of the {self.original.__name__} that was converted: use "
                "it there, or on another one that has loaded state_dict()"
            ) from error

    def train(self, mode: bool = True) -> ModelLayers:
        """Set the mode of the layers, and of the model's modules around them."""
        if self._settings is not None:
            self._settings.set_mode(mode)
        return super().train(mode)

    def describe(self) -> str:
        """Return a table of the layers.

        Each has its modules, the number of operations between them, the number of tensors that it
        passes on, their bytes on the example of two samples, and its parameters.
        """
        rows = [("layer", "modules", "operations", "carries", "bytes", "parameters")]
        for name, layer, piece in zip(self._modules, self, self._pieces, strict=True):
            called = [call.target for call in piece.calls if call.is_module]
            operations = len(piece.calls) - len(called)
            size = sum(x.numel() for x in layer.parameters())
            row = (
                name,
                ", ".join(called),
                operations,
                len(piece.returns),
                piece.carried_bytes,
                size,
            )
            rows.append(tuple(map(str, row)))  # type: ignore[arg-type]  # six columns
        widths = [min(60, max(map(len, column))) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                _short(cell, width).ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in rows
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state under the model's names, in the model's order."""
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        given = kwargs.get("destination", args[0] if args else None)
        kwargs = {"keep_vars": kwargs.get("keep_vars", args[2] if len(args) > 2 else False)}
        state = super().state_dict(**kwargs)
        named = {plain_name(name): x for name, x in state.items()}
        target = state if given is None else given
        if given is None:
            target.clear()
        target.update({prefix + name: named[name] for name in self._order if name in named})
        return target

    def _rename(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rename the entries of a state that is being loaded to those of the layers."""
        given = {name: x for name, x in state_dict.items() if name.startswith(prefix)}
        used = set()
        for name in super().state_dict(prefix=prefix):
            original = prefix + plain_name(name[len(prefix) :])
            if original in given:
                state_dict[name] = given[original]
                used.add(original)
        for name in used:
            state_dict.pop(name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters."""
        for _, parameter in super().named_parameters("", recurse):
            yield parameter

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with the model's names."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield _joined(prefix, plain_name(name)), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with the model's names."""
        for name, buffer in super().named_buffers("", recurse, remove_duplicate):
            yield _joined(prefix, plain_name(name)), buffer

    def __getitem__(self, index: Any) -> Any:
        """Return a layer by its index; a slice has no names of its own.

        Raises:
            ConfigurationError: The index is a slice.
        """
        if isinstance(index, slice):
            raise ConfigurationError(
                "layers of a converted model cannot be sliced: choose where to cut with cut_at="
            )
        return super().__getitem__(index)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
