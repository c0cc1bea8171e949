"""The nodes and replicas of an engine, cached while its cluster does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from .base import ClusterUnavailableError, Engine, Listing, Node

_LOG = logging.getLogger(__name__)
NODES_INTERVAL = 1.0
"""Seconds between two reads of the nodes."""


class ClusterWatch:
    """The last known nodes, and each listing once; raises `ClusterUnavailableError`."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self.nodes: Mapping[str, Node] = dict(engine.nodes())
        """The nodes by name: a new mapping each time, so that readers need no lock."""
        self._looked_at = clock()
        self._away = False
        self._version = -1

    def look(self) -> bool:
        """Read the nodes if it is time to; return whether they were read."""
        now = self._clock()
        if now < self._looked_at + NODES_INTERVAL:
            return False
        self._looked_at = now
        try:
            self.nodes = dict(self._engine.nodes())
        except ClusterUnavailableError as error:
            self._note_away(error)
            return False
        return True

    def listing(self) -> Listing | None:
        """Return a listing, or None if there is none newer than the last."""
        try:
            listing = self._engine.listing()
        except ClusterUnavailableError as error:
            self._note_away(error)
            return None
        if self._away:
            _LOG.warning("the cluster answers again")
        self._away = False
        newer = listing.version > self._version
        self._version = max(self._version, listing.version)
        return listing if newer else None

    def first_listing(self) -> Listing:
        """Return a listing for a start or takeover; older ones are ignored from then on."""
        listing = self._engine.listing()
        self._version = max(self._version, listing.version)
        return listing

    def _note_away(self, error: ClusterUnavailableError) -> None:
        if not self._away:
            _LOG.warning("%s; replicas keep running until it answers again", error)
        self._away = True
