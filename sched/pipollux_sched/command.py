"""The command `pipollux`, which names the missing extra if only a job's packages are installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec

__all__ = ["main"]

NEEDED = ("fastapi", "jinja2", "sqlalchemy", "textual", "typer", "yaml")
"""Some packages of the extra `sched`."""
USAGE = 2


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
