"""The `pipollux` program. A command's module is imported only to run it: `--help` stays fast."""

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
from .console import FAILED, OUTPUT_ERRORS, USAGE, complain, discard_output, use_any_output
from .options import AuthorityFile, ServerUrl, TokenFile


class _Entry(NamedTuple):
    module: str
    summary: str


_MOST_SHOWN = 60
"""Largest number of characters of an invalid value in an error message."""
COMMANDS = {
    "demo": _Entry("demo", "Run two jobs under a scheduler on this machine; write a report."),
    "plan": _Entry("plan", "Show the allocation that each job would get."),
    "apply": _Entry("apply", "Carry out a plan after confirmation."),
    "serve": _Entry("serve", "Run the scheduler in the foreground."),
    "submit": _Entry("submit", "Submit jobs to a running scheduler."),
    "run": _Entry("run", "Run one script as a job, and follow its log."),
    "jobs": _Entry("jobs", "List jobs: phase, allocation, progress."),
    "sweeps": _Entry("sweeps", "List sweeps, or the trials of one."),
    "describe": _Entry("describe", "Show the details of a job."),
    "explain": _Entry("explain", "Explain a job's allocation, or why it is queued."),
    "logs": _Entry("logs", "Print the logs of a job."),
    "cancel": _Entry("submit", "Cancel jobs."),
    "suspend": _Entry("submit", "Suspend jobs: checkpoint and release their slots."),
    "resume": _Entry("submit", "Resume suspended jobs."),
    "rerun": _Entry("submit", "Run ended jobs again."),
    "update": _Entry("submit", "Move jobs to another team."),
    "delete": _Entry("submit", "Delete ended jobs."),
    "nodes": _Entry("nodes", "List nodes: slots, jobs, condition."),
    "drain": _Entry("nodes", "Drain a node, or return it to service."),
    "teams": _Entry("teams", "List teams and their quotas, or replace them."),
    "tokens": _Entry("tokens", "List, create and revoke the tokens of users."),
    "notify": _Entry("notify", "List, add, test and remove notification channels."),
    "events": _Entry("events", "Print events, or follow new ones."),
    "top": _Entry("top.command", "Watch the cluster on a full screen."),
    "fit": _Entry("fit", "Fit the performance model to measured step times."),
    "predict": _Entry("predict", "Predict step time, goodput and speedup of allocations."),
    "report": _Entry("report", "Write the HTML report of a run."),
    "simulate": _Entry("simulate", "Compare policies on a simulated cluster."),
    "version": _Entry("version", "Print the version."),
}
"""The module and the summary of each command, in the order of `--help`."""


class _LazyGroup(TyperGroup):
    """A group that imports a command when it runs, not when it is listed."""

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
    """Import a command's module and return the command."""
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
    """Train pipeline-parallel models on as many nodes as pay off.

    The scheduler moves whole pipeline replicas between jobs to maximize the goodput
    of the cluster, its useful training progress per second.

    Start with [bold]pipollux demo[/bold], then plan your own jobs:

        pipollux plan --cluster examples/cluster.yaml --jobs examples/jobs.yaml
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: Sequence[str] | None = None) -> None:
    """Run `pipollux` and exit with 0 (done), 1 (failed) or 2 (usage), without a traceback."""
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
        # The reader, for instance `head`, has closed the pipe.
        discard_output()
        return FAILED
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        discard_output()
        complain(f"the output cannot be written ({error.strerror})")
        return FAILED
    except Exception as error:  # typer's errors become a sentence; any other is a defect
        return _usage_error(error, sys.argv[1:] if args is None else args)
    return code if isinstance(code, int) else 0


def _usage_error(error: Exception, args: Sequence[str]) -> int:
    if not hasattr(error, "format_message"):  # typer's errors have it
        raise error
    command = f"pipollux {args[0]}" if args and args[0] in COMMANDS else "pipollux"
    said = error.format_message().rstrip(".").replace(": Value error, ", ": ")
    said = said.replace("Input should be", f"{_given(error)} must be")
    if command == "pipollux run" and "--" not in args and hasattr(error, "option_name"):
        said += "; put '--' before the script if the option is the script's"
    complain(f"{said}; see '{command} --help'")
    return USAGE


def _given(error: Exception) -> str:
    """Return the value that typer refused; typer's own message leaves it out."""
    problems = getattr(error.__cause__, "errors", None)  # pydantic's
    return repr(clean(problems()[0]["input"], _MOST_SHOWN)) if problems else "it"
