"""`pipollux` itself: the list of commands, and the handling of errors.

To add a command, write a typer function of that name (``-`` becomes ``_``) in a module of this
package and put a line into `COMMANDS`. A module is imported only when one of its commands is run,
so `pipollux --help` stays fast whatever they import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from pipollux_sched.errors import PipolluxError
from pipollux_utils.text import clean

from .checked_command import CheckedCommand
from .console import (
    FAILED,
    OUTPUT_ERRORS,
    USAGE,
    complain,
    discard_output,
    use_any_output,
)
from .options import AuthorityFile, ServerUrl, TokenFile


class _Entry(NamedTuple):
    module: str
    summary: str


_MOST_SHOWN = 60
"""Characters of a wrong value."""
COMMANDS = {
    "demo": _Entry("demo", "Run two jobs under the scheduler on this machine, and write a report."),
    "plan": _Entry("plan", "Print what each job would get; change nothing."),
    "apply": _Entry("apply", "Carry out a plan, after confirmation."),
    "serve": _Entry("serve", "Run the scheduler until it is interrupted."),
    "submit": _Entry("submit", "Submit jobs to a running scheduler."),
    "jobs": _Entry("jobs", "List jobs: phase, allocation, progress."),
    "describe": _Entry("describe", "Print everything known about a job."),
    "explain": _Entry("explain", "Explain a job's allocation, or why it is queued."),
    "logs": _Entry("logs", "Print what a job has written."),
    "cancel": _Entry("submit", "Cancel jobs."),
    "suspend": _Entry("submit", "Suspend jobs: checkpoint and release their slots."),
    "resume": _Entry("submit", "Resume suspended jobs."),
    "rerun": _Entry("submit", "Run ended jobs again."),
    "update": _Entry("submit", "Move jobs to another team."),
    "delete": _Entry("submit", "Delete ended jobs."),
    "nodes": _Entry("nodes", "List nodes: slots, who holds them, condition."),
    "drain": _Entry("nodes", "Take a node out of use, or back into it."),
    "teams": _Entry("teams", "List teams: quotas, what they hold; set them."),
    "tokens": _Entry("tokens", "List, create and revoke tokens of users."),
    "events": _Entry("events", "Print past events, or follow new ones."),
    "top": _Entry("top.command", "Watch the cluster, live."),
    "fit": _Entry("fit", "Fit the performance model to measured step times."),
    "predict": _Entry("predict", "Predict step time, goodput and speedup on allocations."),
    "report": _Entry("report", "Draw the report of a run from its event log."),
    "simulate": _Entry("simulate", "Try policies on a simulated cluster, and compare them."),
    "version": _Entry("version", "Print the version."),
}
"""Every command, in the order of `--help`: its module, and its line there."""


class _LazyGroup(TyperGroup):
    """A group whose commands are imported when they are run, not when they are listed."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # the base class's
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # the base class's
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            return TyperCommand(name=cmd_name, help=COMMANDS[cmd_name].summary)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def load_command(name: str) -> Any:
    """Import the module of a command, and return the command."""
    module = import_module(f"pipollux_sched.cli.{COMMANDS[name].module}")
    command = typer.Typer(add_completion=False, rich_markup_mode="rich")
    command.command(name, cls=CheckedCommand)(getattr(module, name.replace("-", "_")))
    return typer.main.get_command(command)


app = typer.Typer(
    name="pipollux",
    cls=_LazyGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .version import version

        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def pipollux(
    context: typer.Context,
    server: ServerUrl = None,  # noqa: ARG001  # read by `choose_server`, from the context
    token_file: TokenFile = None,  # noqa: ARG001  # as above
    ca_file: AuthorityFile = None,  # noqa: ARG001  # as above
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train models partitioned into GPipe stages on as many nodes as pay off.

    A scheduler moves whole pipeline replicas between jobs to maximise the goodput
    of the cluster (useful training progress per second).

    Begin with [bold]pipollux demo[/bold]; then plan jobs of your own:

        pipollux plan --cluster examples/cluster.yaml --jobs examples/jobs.yaml
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: Sequence[str] | None = None) -> None:
    """Run `pipollux` and exit: 0 done, 1 failed, 2 usage.

    A user's mistake ends in one clear sentence on standard error, never in a traceback.

    Args:
        args: the command line without the program; None: `sys.argv`.
    """
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    use_any_output()
    try:
        os.getcwd()
    except FileNotFoundError:
        complain("the working directory has been deleted; change to another one, as with 'cd'")
        return FAILED
    try:
        code = app(args=args, prog_name="pipollux", standalone_mode=False)
        # A closed pipe can be handled here, but not when the interpreter exits.
        sys.stdout.flush()
    except PipolluxError as error:
        complain(*error.problems)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        return FAILED
    except BrokenPipeError:
        # The reader, for instance `head`, has what it wanted and has closed the pipe.
        discard_output()
        return FAILED
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        discard_output()
        complain(f"the output cannot be written ({error.strerror})")
        return FAILED
    except Exception as error:  # typer's own as a sentence; any other is a defect
        return _usage_error(error, sys.argv[1:] if args is None else args)
    return code if isinstance(code, int) else 0


def _usage_error(error: Exception, args: Sequence[str]) -> int:
    """Print a mistake in the command line, and return the status; raise any other error."""
    if not hasattr(error, "format_message"):  # typer's errors have it
        raise error
    command = f"pipollux {args[0]}" if args and args[0] in COMMANDS else "pipollux"
    said = error.format_message().rstrip(".").replace(": Value error, ", ": ")
    said = said.replace("Input should be", f"{_given(error)} must be")
    complain(f"{said}; see '{command} --help'")
    return USAGE


def _given(error: Exception) -> str:
    """Return the value that typer refused, which its own text leaves out."""
    problems = getattr(error.__cause__, "errors", None)  # pydantic's
    return repr(clean(problems()[0]["input"], _MOST_SHOWN)) if problems else "it"
