"""The command `pipollux`, which says what to install where a job's packages are all there is."""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]

NEEDED = ("fastapi", "jinja2", "sqlalchemy", "textual", "typer", "yaml")
"""Packages of the extra `sched`, some of them."""
USAGE = 2
"""Exit status where a command cannot be run."""


def main() -> None:
    """Run the command line, and exit with its status."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            "pipollux: the command line and the scheduler need packages that training jobs do not "
            f"({', '.join(missing)}): pip install 'pipollux[sched]'",
            file=sys.stderr,
        )
        sys.exit(USAGE)
    from pipollux_sched.cli import main as run

    run()
