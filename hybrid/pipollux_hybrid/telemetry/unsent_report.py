"""The last report of a job, saved to disk if no scheduler received it.

A scheduler reads ``unsent_report.json`` beside the checkpoints once the attempt has ended, to
include progress made while no scheduler was running.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipollux_hybrid.checkpoint import storage as files

__all__ = ["keep"]

LOG = logging.getLogger(__name__)


def keep(directory: Path | None, report: Mapping[str, Any]) -> None:
    """Save a report to the checkpoint directory; an error is logged, as training has not failed."""
    if directory is None:
        return
    from pipollux_protocol.files import UNSENT_REPORT  # imports pydantic

    aside = directory / f".{UNSENT_REPORT}"
    try:
        files.write_file(aside, json.dumps(report).encode())
        aside.rename(directory / UNSENT_REPORT)
    except OSError as error:
        LOG.warning("the last report could neither be sent nor be kept: %s", error)
