"""What a store does, it does in each kind of database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sched.store.stores import DATABASES, make_place


@pytest.fixture(params=DATABASES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a store may be made: the test is run for each kind of database."""
    return make_place(request, tmp_path)
