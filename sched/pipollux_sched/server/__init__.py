"""REST interface for jobs and users; `docs/reference/rest.md` lists the requests.

The admin's token grants access to everything, a job's token to that job alone. Requests are
validated, limited in size and rate, and refused from outdated attempts. Every refusal is
``{"detail": "one sentence"}``.
"""

from __future__ import annotations

from pipollux_sched.controller.commands import UnavailableError

from .app import create_app, end_waiting
from .limits import Limits
from .request_bodies import BODY_LIMIT

__all__ = ["BODY_LIMIT", "Limits", "UnavailableError", "create_app", "end_waiting"]
