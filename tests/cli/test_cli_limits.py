"""No command takes a number that is none, one that nothing can hold, or a text without end."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer

from pipollux_sched.cli import main
from pipollux_sched.cli.app import COMMANDS

HUGE = "9999999999999999999999"
LONG = 200_000 * "x"


def kinds(annotation: Any) -> set[type]:
    """The plain types in ``Annotated[list[str] | None, …]``."""
    if get_origin(annotation) is Annotated:
        return kinds(get_args(annotation)[0])
    inside = get_args(annotation)
    return set().union(*map(kinds, inside)) if inside else {annotation}


def parameters(command: str) -> Iterator[tuple[str, set[type], bool]]:
    """Name, types, and whether it is an option, of every parameter of a command."""
    function = getattr(import_module(f"pipollux_sched.cli.{COMMANDS[command].module}"), command)
    hints = get_type_hints(function, include_extras=True)
    for name in inspect.signature(function).parameters:
        (info,) = (
            entry
            for entry in hints[name].__metadata__
            if isinstance(entry, typer.models.ParameterInfo)
        )
        given = [text for text in info.param_decls or () if text.startswith("--")]
        default = getattr(info, "default", None)
        if isinstance(default, str) and default.startswith("--"):
            given.insert(0, default)
        option = given[0] if given else f"--{name.replace('_', '-')}"
        yield option, kinds(hints[name]), isinstance(info, typer.models.OptionInfo)


def wrong_values(types: set[type]) -> tuple[str, ...]:
    if float in types:
        return ("nan", "inf", "-inf", "1e999", LONG)
    if int in types:
        return (HUGE, f"-{HUGE}", "1e300", "nan", LONG)
    if types & {str, Path}:
        return (LONG, "a\0b")
    return () if bool in types else (LONG,)


@pytest.mark.parametrize("in_turn", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_value_of_every_command(
    command: str, in_turn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """`in_turn`: each option takes the next one of the values of its type."""
    known = list(parameters(command))
    needed = [f"x{index}" for index, (_, _, is_option) in enumerate(known) if not is_option]
    for index, (option, types, is_option) in enumerate(known):
        values = wrong_values(types)
        turn = index % max(len(values), 1)
        for value in values[turn : turn + 1] if in_turn else values:
            args = [*needed, option, value] if is_option else [value]
            with pytest.raises(SystemExit) as ended:
                main([command, *args])
            said = capsys.readouterr()
            assert ended.value.code == 2, (option, value[:40], said.err)
            assert said.err.startswith("Error: Invalid value for"), (option, value[:40], said.err)
            assert said.err.count("\n") == 1
            assert len(said.err) < 2100, option
            assert said.out == ""


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["serve", "--interval", "1e300"], "'--interval'"),
        (["serve", "--interval", "0"], "'--interval'"),
        (["serve", "--policy", "exact:tail=11"], "'--policy': exact:tail=11 is invalid; tail must"),
        (["serve", "--policy", "fifo:tail=1"], "'--policy': fifo:tail=1 is invalid; fifo has no"),
        (["serve", "--grace", "-1"], "'--grace'"),
        (["serve", "--heartbeat-timeout", "1e9"], "'--heartbeat-timeout'"),
        (["serve", "--port", "65536"], "'--port'"),
        (["serve", "--autoscale", "1:2:3", "--expander-command", "true"], "'--autoscale'"),
        (["top", "--interval", "1e300"], "'--interval'"),
        (["nothing" + LONG], "No such command 'nothing"),
    ],
)
def test_what_is_out_of_bounds(
    args: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert what in said
    assert len(said) < 2100
