"""A driver without GPUs: NVML's library made of `fake_nvml.c`, with the GPUs that a test writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.services import service_missing

SOURCE = Path(__file__).with_name("fake_nvml.c")
GIB = 2**30


def gpu(number: int, **values: object) -> str:
    """Return the line of a GPU; `values` replace those of a healthy one."""
    known: dict[str, object] = {"uuid": uuid(number), "name": "NVIDIA-H200", "total": 141 * GIB}
    return f"gpu {_pairs(known | values)}\n"


def uuid(number: int) -> str:
    """Return the UUID of a GPU."""
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


def mig(number: int, parent: int = 0) -> str:
    """Return the line of a slice of the GPU above."""
    known = {"uuid": slice_uuid(number, parent), "gi": number + 7, "ci": 0, "total": 17 * GIB}
    return f"slice {_pairs(known)}\n"


def slice_uuid(number: int, parent: int = 0) -> str:
    """Return the UUID of a slice."""
    return f"MIG-{parent:04x}{number:04x}-5555-6666-7777-888888888888"


def process(pid: int, memory: int = GIB) -> str:
    """Return the line of a process on the GPU or slice above."""
    return f"process {_pairs({'pid': pid, 'memory': memory})}\n"


def _pairs(values: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


class FakeNvml:
    """The driver of this machine, as processes that are started from now on see it."""

    def __init__(self, library: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = file
        self.set(gpu(0))
        folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(folders))
        monkeypatch.setenv("FAKE_NVML", str(file))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def set(self, *lines: str) -> None:
        """Replace the GPUs; a library that is being initialized sees all lines, or none."""
        aside = self._file.with_suffix(".new")
        aside.write_text("".join(lines))
        aside.replace(self._file)


def build(folder: Path) -> Path:
    """Compile the library."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        service_missing("there is no C compiler to make an NVML of")
    library = folder / "libnvidia-ml.so.1"
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([str(compiler), *flags, "-o", library, SOURCE], check=True, timeout=120)
    return library
