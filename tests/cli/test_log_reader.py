"""Reading logs while they are written, and moved aside."""

from __future__ import annotations

from pathlib import Path

from pipollux_sched.backend.replica.last_words import last_lines
from pipollux_sched.backend.replica.runner import RotatingLog
from pipollux_sched.cli.logs import LogReader
from pipollux_sched.cli.reader import LocalReader
from pipollux_sched.store import StateDir, Store


def test_no_line_is_lost_or_told_twice_when_a_log_is_moved_aside(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path)
    path = state_dir.log("toy", 1, 0)
    path.parent.mkdir(parents=True)
    with Store(state_dir.database, create=True) as store:
        reader = LogReader(LocalReader(store, state_dir), "toy", None, None)
        log = RotatingLog(path, limit=19)
        log.write(b"one\ntwo\nthr")
        assert [line.line for line in reader.read()] == ["one", "two"]
        log.write(b"ee\nfour\n")
        log.write(b"five\n")
        assert path.read_bytes() == b"five\n"
        assert [line.line for line in reader.read()] == ["three", "four", "five"]
        assert list(reader.read()) == []
        assert last_lines(path, 3) == ["three", "four", "five"]
        log.write(b"six\nand")
        log.close()
        assert [line.line for line in reader.read()] == ["six"]
        assert [line.line for line in reader.rest()] == ["and"]
