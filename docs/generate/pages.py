"""The generated pages of the reference, by file name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pipollux_protocol import reference as protocol

from . import cli, job_file, metrics, python, rest

FOLDER = Path(__file__).parents[1] / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli.page,
    "job-file.md": job_file.page,
    "metrics.md": metrics.page,
    "protocol.md": protocol.page,
    "python.md": python.page,
    "rest.md": rest.page,
}
