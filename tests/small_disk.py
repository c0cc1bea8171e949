"""A disk that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.services import service_missing


@contextmanager
def small_disk(folder: Path, size: str = "256k") -> Iterator[None]:
    """Mount a small disk at a folder; skip the test where that is not allowed."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        service_missing("there is no mount")
    if mounted.returncode:
        service_missing(f"no disk can be mounted: {mounted.stderr.strip()}", "run pytest as root")
    try:
        yield
    finally:
        # Whoever looked at it last may still have it open; it must not stay in any case.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**12))
