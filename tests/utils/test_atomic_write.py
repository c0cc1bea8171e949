"""Results go where a user's path leads, and never replace what is no regular file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipollux_utils.atomic_write import write_output

WRITE = (
    "import sys, pathlib\n"
    "from pipollux_utils.atomic_write import write_output\n"
    "print('before', flush=True)\n"
    "write_output(pathlib.Path(sys.argv[1]), b'content')\n"
    "print(' after', flush=True)\n"
)


def test_a_file_keeps_its_permissions_and_a_new_one_has_the_umasks(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "folder" / "new"
    old.write_text("before")
    old.chmod(0o640)
    umask = os.umask(0o027)
    try:
        for path in (old, new):
            write_output(path, b"content")
    finally:
        os.umask(umask)
    assert old.read_bytes() == new.read_bytes() == b"content"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o640, 0o640]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "old"]


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link, dangling = tmp_path / "folder/target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("before")
    link.symlink_to("folder/target")
    dangling.symlink_to("folder/new")
    for path in (link, dangling):
        write_output(path, b"content")
        assert path.is_symlink()
    assert target.read_bytes() == (tmp_path / "folder/new").read_bytes() == b"content"


def test_a_fifo_is_written_into(tmp_path: Path) -> None:
    fifo, found = tmp_path / "fifo", bytearray()
    os.mkfifo(fifo)
    content = os.urandom(1 << 18)  # more than it holds at once
    reader = threading.Thread(target=lambda: found.extend(fifo.read_bytes()))
    reader.start()
    write_output(fifo, content)
    reader.join(60.0)
    assert found == content
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_written_into(tmp_path: Path, name: str) -> None:
    """Where it is a file, what is printed after that is in the same file."""
    output = tmp_path / "output"
    with output.open("wb") as file:
        subprocess.run([sys.executable, "-c", WRITE, name], stdout=file, check=True, timeout=120.0)
        assert os.fstat(file.fileno()).st_ino == output.stat().st_ino
    assert output.read_bytes() == b"before\ncontent after\n"
    piped = subprocess.run(
        [sys.executable, "-c", WRITE, name], stdout=subprocess.PIPE, check=True, timeout=120.0
    )
    assert piped.stdout == b"before\ncontent after\n"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, b"content")
