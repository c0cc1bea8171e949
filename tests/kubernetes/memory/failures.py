"""Failures on purpose: what the API server in memory does to requests instead of answering them."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

from .requests import Request

DROP = "drop"
"""The connection ends without an answer, before anything was done."""
LOSE = "lose"
"""What is asked is done, and the connection ends without an answer."""
CUT = "cut"
"""A stream ends in the middle, after `after` events."""


@dataclass
class Failure:
    """What happens to some requests.

    Args:
        what: `DROP`, `LOSE` or `CUT`, or the HTTP status of the answer, such as 410, 429 or 500.
        methods: of which requests, such as "POST PATCH"; "" means any.
        path: a regular expression that is looked for in the path.
        times: how many requests; None: all that come.
        delay: seconds to wait before.
        after: events that a stream shows before it is cut.
    """

    what: str | int | None = None
    methods: str = ""
    path: str = ""
    times: int | None = 1
    delay: float = 0.0
    after: int = 0

    def means(self, request: Request) -> bool:
        """Whether this happens to a request."""
        method = not self.methods or request.method in self.methods.split()
        streams = request.query.get("watch") in ("true", "1") or request.path.endswith("/log")
        return method and (self.what != CUT or streams) and bool(re.search(self.path, request.path))


class Failures:
    """The failures that are to come, and how many have come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: list[Failure] = []
        self.happened = 0
        """How many requests have met a failure."""

    def add(self, failure: Failure) -> None:
        """Have something happen from now on."""
        with self._lock:
            self._failures.append(failure)

    def clear(self) -> None:
        """Let nothing more happen."""
        with self._lock:
            self._failures.clear()

    def meet(self, request: Request) -> Failure | None:
        """Return what happens to a request that has come, if anything does."""
        with self._lock:
            for failure in self._failures:
                if failure.means(request):
                    self.happened += 1
                    if failure.times is not None:
                        failure.times -= 1
                        if failure.times <= 0:
                            self._failures.remove(failure)
                    return failure
        return None
