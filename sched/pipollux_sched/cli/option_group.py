"""Related options of a command: one dataclass, and one panel of `--help`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, Protocol, get_args, get_type_hints

import typer

__all__ = ["OptionGroup", "flag_of", "text_option", "with_groups"]


class OptionGroup(Protocol):
    """A dataclass whose fields are options, declared like typer parameters."""

    panel: ClassVar[str]
    """Heading of the options in `--help`."""


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Pass a command's options as objects, one for each parameter annotated with an `OptionGroup`.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class AddressFlags:
        ...     panel: ClassVar[str] = "Server"
        ...     port: Annotated[int, typer.Option(help="Where to listen.")] = 0
        >>> @with_groups
        ... def serve(*, address: AddressFlags) -> None: ...
    """
    signature = inspect.signature(command, eval_str=True)
    own = signature.parameters.values()
    groups: dict[str, Any] = {
        one.name: one.annotation for one in own if is_dataclass(one.annotation)
    }

    @wraps(command)
    def run(**given: Any) -> Any:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    shown = [one for one in own if one.name not in groups]
    shown += [one for group in groups.values() for one in _parameters(group)]
    # typer reads both the signature and the annotations.
    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # inspect's
    run.__annotations__ = {one.name: one.annotation for one in shown}
    return run


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, declared = get_args(hints[field.name])
        option = copy(declared)
        option.rich_help_panel = group.panel
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[kind, option],
        )


def text_option(flag: str, metavar: str, text: str, default: str) -> Any:
    """Declare an option that takes a text; `default` describes the default."""
    return typer.Option(flag, metavar=metavar, help=text, show_default=default)


def flag_of(group: type[OptionGroup], name: str) -> str:
    """Return the option of a field, such as "--checkpoint-claim"."""
    _, declared = get_args(get_type_hints(group, include_extras=True)[name])
    return str(declared.default)  # here typer keeps what an option was declared with first
