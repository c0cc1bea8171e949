"""Real services that some tests need, which `.ci/services` installs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def service_missing(reason: str) -> NoReturn:
    """Skip a test for want of a service; in continuous integration it fails.

    Args:
        reason: what is not there, such as "there is no Chromium".
    """
    if os.environ.get("CI", "").lower() in ("", "0", "false"):
        pytest.skip(f"{reason}; .ci/services installs it")
    pytest.fail(f"{reason}, and in continuous integration nothing may be left out", pytrace=False)
