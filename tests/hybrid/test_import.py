"""What importing the package costs: torch, and little else."""

from __future__ import annotations

import subprocess
import sys

import pipollux
import pipollux_hybrid

CODE = """
import sys
import torch
before = set(sys.modules)
import pipollux
heavy = {"autograd", "httpx", "pydantic", "rich", "scipy", "torch._dynamo"}
heavy &= set(sys.modules) - before
assert not heavy, f"imported before anybody needs it: {sorted(heavy)}"
import pipollux_perfmodel
for name in pipollux_perfmodel.__all__:
    assert getattr(pipollux_perfmodel, name) is not None, name
    assert not isinstance(getattr(pipollux_perfmodel, name), type(sys)), name
assert set(pipollux_perfmodel.__all__) <= set(dir(pipollux_perfmodel))
"""


def test_heavy_libraries_are_imported_when_they_are_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_scripts_import_has_the_same_names() -> None:
    assert pipollux.__all__ == pipollux_hybrid.__all__
    for name in pipollux.__all__:
        assert getattr(pipollux, name) is getattr(pipollux_hybrid, name)
