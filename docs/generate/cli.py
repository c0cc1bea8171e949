"""`reference/cli.md`, from the typer commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from pipollux_policies import POLICIES
from pipollux_policies.options import show
from pipollux_protocol.reference import table
from pipollux_sched.cli.app import COMMANDS, app, load_command
from pipollux_sched.report.event_text import EVENT_TYPES, TELLING_TYPES
from pipollux_sched.views.explanation import LimitKind

from .notes import Notes

SHARED = ("--state-dir", "--output", "--help")
"""Options that are described once, for all commands."""
STANDARD_TYPES = {"<int range>": "INT", "<float range>": "FLOAT", "<bool>": ""}
OPTION = re.compile(r"(?<!\w)(--[a-z][a-z-]+)")
MARKUP = re.compile(r"\[/?(?:bold|italic|dim|cyan)\]")


def page() -> str:
    """Return the page, as Markdown."""
    notes = Notes("cli")
    text = "\n".join(_lines(notes)) + "\n"
    notes.close()
    return text


def _lines(notes: Notes) -> Iterator[str]:
    yield "# Command line"
    yield ""
    yield "<!-- Generated from pipollux_sched.cli by `make reference`. -->"
    yield from notes.lines("introduction")
    yield ""
    yield "## Commands"
    yield ""
    rows = [(f"[`{name}`](#{name})", entry.summary) for name, entry in COMMANDS.items()]
    yield from table(("command", "description"), rows)
    yield ""
    yield "## Global options"
    yield ""
    yield "These options precede the command: `pipollux --server URL jobs`."
    yield ""
    yield from _options(typer.main.get_command(app))
    yield from notes.lines("global options")
    yield ""
    yield "## Shared options"
    yield ""
    yield from _shared()
    yield from notes.lines("shared options")
    yield from _policy_options()
    for name in COMMANDS:
        yield from _command(name, notes)
    yield from notes.lines("output")


def _shared() -> Iterator[str]:
    jobs, logs, describe = (load_command(name) for name in ("jobs", "logs", "describe"))
    rows = [_row(jobs, _option(jobs, "--state-dir"))]
    rows += [_row(command, _option(command, "--output")) for command in (jobs, describe, logs)]
    yield from table(("option", "value", "default", "description"), rows)


def _policy_options() -> Iterator[str]:
    yield ""
    yield "## Policy options"
    yield ""
    yield "`--policy exact:rank_power=0.5,tail=1` sets two options of the policy `exact`."
    for name, entry in POLICIES.items():
        rows = [
            (f"`{one.name}`", one.allowed, f"`{show(one.default)}`", _marked(one.meaning))
            for one in entry.options.values()
        ]
        if rows:
            yield ""
            yield f"**{name}**"
            yield ""
            yield from table(("option", "value", "default", "description"), rows)


def _command(name: str, notes: Notes) -> Iterator[str]:
    command = load_command(name)
    yield ""
    yield f"## {name}"
    yield ""
    yield from _help(command.help)
    yield ""
    yield "```text"
    yield f"pipollux {name} {_usage(command)}"
    yield "```"
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    if arguments:
        rows = [(f"`{_type(command, one)}`", _text(one.help)) for one in arguments]
        yield ""
        yield from table(("argument", "description"), rows)
    yield ""
    yield from _options(command)
    yield from notes.lines(name)
    if name == "events":
        yield ""
        yield f"Types shown by default: {_listed(TELLING_TYPES)}."
        frequent = [kind for kind in EVENT_TYPES if kind not in TELLING_TYPES]
        yield f"Types shown only with `--type`: {_listed(frequent)}."
    if name == "explain":
        yield ""
        yield f"Values of `kind` in `limits`: {_listed([kind.value for kind in LimitKind])}."


def _usage(command: Any) -> str:
    """Return what follows the name of a command, without braces around names of arguments."""
    pieces = " ".join(command.collect_usage_pieces(_context(command)))
    pieces = re.sub(r"\{([^}]*?)(?:\.\.\.)?\}", r"\1", pieces)
    return pieces.replace("[[", "[").replace("]]", "]").replace("]...]...", "]...")


def _listed(words: Any) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _context(command: Any) -> Any:
    return command.context_class(command, info_name=command.name)


def _options(command: Any) -> Iterator[str]:
    """Yield a table of a command's own options, one for each panel of its help."""
    panels: dict[str, list[Any]] = {}
    own = [one for one in command.params if one.param_type_name == "option"]
    for one in own:
        if not set(SHARED) & set(one.opts):
            panels.setdefault(one.rich_help_panel or "", []).append(one)
    for number, (panel, options) in enumerate(panels.items()):
        if number:
            yield ""
        if panel:
            yield f"**{_marked(panel)}**"
            yield ""
        rows = [_row(command, one) for one in options]
        yield from table(("option", "value", "default", "description"), rows)
    shared = [opt for opt in SHARED[:2] if any(opt in one.opts for one in own)]
    if shared:
        if panels:
            yield ""
        also = "Also" if panels else "Options"
        yield f"{also}: {' and '.join(f'[`{opt}`](#shared-options)' for opt in shared)}."


def _option(command: Any, flag: str) -> Any:
    return next(one for one in command.params if flag in one.opts)


def _row(command: Any, option: Any) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    kind, described = _type(command, option), _text(option.help)
    if option.envvar:
        described += f" Environment variable: `{option.envvar}`."
    return names, f"`{kind}`" if kind else "", _default(option), described


def _type(command: Any, parameter: Any) -> str:
    shown = str(parameter.display_type_rich(ctx=_context(command)) or "")
    if parameter.param_type_name == "argument":
        shown = parameter.metavar or parameter.display_name_raw
    shown = STANDARD_TYPES.get(shown, shown.strip("<>"))
    bounds = parameter.min, parameter.max
    if shown and bounds != (None, None):
        return f"{shown} {_range(*bounds)}"
    return shown


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return f"≥ {least:g}"
    if least is None:
        return f"≤ {most:g}"
    return f"{least:g}–{_number(most)}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.default
    if option.required:
        return "required"
    unset = value is None or value is False or value in ("", [], ())
    if unset or not option.show_default:
        return ""
    return f"`{value.value if hasattr(value, 'value') else value}`"


def _text(text: str | None) -> str:
    return _marked(" ".join(MARKUP.sub("", text or "").replace("\\[", "[").split()))


def _marked(line: str) -> str:
    """Return a line with its options as code, and nothing that Markdown takes for a mark."""
    code = re.split(r"(`[^`]*`)", line)
    code[::2] = (OPTION.sub(r"`\1`", re.sub(r"([<>*_])", r"\\\1", part)) for part in code[::2])
    return "".join(code)


def _help(text: str) -> Iterator[str]:
    """Yield a command's help as Markdown: indented lines are commands or data."""
    for number, paragraph in enumerate(MARKUP.sub("", text).replace("\\[", "[").split("\n\n")):
        if number:
            yield ""
        lines = paragraph.splitlines()
        if all(line.startswith("    ") for line in lines):
            shell = all(line.split()[0] == "pipollux" for line in lines)
            yield "```console" if shell else "```text"
            yield from (f"$ {line[4:]}" if shell else line[4:] for line in lines)
            yield "```"
        else:
            yield from map(_marked, lines)
