"""The package as a whole: its examples are true, its names are public, it needs no torch."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import pipollux_perfmodel

PACKAGE = "pipollux_perfmodel"
FOUND = pkgutil.walk_packages(pipollux_perfmodel.__path__, f"{PACKAGE}.")
MODULES = [module.name.removeprefix(f"{PACKAGE}.") for module in FOUND if not module.ispkg]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(f"{PACKAGE}.{name}")
    assert doctest.testmod(module).failed == 0


def test_every_public_name_exists_and_says_what_it_is() -> None:
    for name in pipollux_perfmodel.__all__:
        assert getattr(pipollux_perfmodel, name).__doc__, name


def test_imports_neither_torch_nor_a_cluster() -> None:
    code = (
        "import sys, pipollux_perfmodel; "
        "print([m for m in ('torch', 'pipollux_sched', 'pipollux_hybrid') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert result.stdout.strip() == "[]"
