"""The last report of a job, kept on the disk if no scheduler received it.

``unsent_report.json`` lies beside the checkpoints, as the marker of a stop does. A scheduler reads
it once the attempt has ended: without it, what a job did while no scheduler ran is never known.
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
    """Write a report down; where the disk does not take it, training has not failed for that.

    Args:
        directory: That of the checkpoints; None: there is none, and nothing is kept.
        report: The body that the scheduler would have been sent.
    """
    if directory is None:
        return
    from pipollux_protocol.files import UNSENT_REPORT  # imports pydantic

    aside = directory / f".{UNSENT_REPORT}"
    try:
        files.write_file(aside, json.dumps(report).encode())
        aside.rename(directory / UNSENT_REPORT)
    except OSError as error:
        LOG.warning("the last report could neither be sent nor be kept: %s", error)
