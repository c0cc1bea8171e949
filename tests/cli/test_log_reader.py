"""Reading logs while they are written, and renamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipollux_agent.supervisor import RotatingLog
from pipollux_sched.backend.replica.last_words import last_lines
from pipollux_sched.cli.logs import LogLine, LogReader, harmless
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


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[tuple[Path, LogReader]]:
    """The log of a replica, and what reads it."""
    state_dir = StateDir(tmp_path)
    path = state_dir.log("toy", 1, 0)
    path.parent.mkdir(parents=True)
    with Store(state_dir.database, create=True) as store:
        yield path, LogReader(LocalReader(store, state_dir), "toy", None, None)


def test_a_renamed_log_is_read_first(toy: tuple[Path, LogReader]) -> None:
    path, reader = toy
    log = RotatingLog(path, limit=800_000)
    written = [f"line {number:07d}\n" for number in range(100_000)]
    log.write("".join(written[:80_000]).encode())
    log.write("".join(written[80_000:]).encode())
    log.close()
    assert path.stat().st_size < 800_000
    assert [f"{line.line}\n" for line in reader.read()] == written


def test_a_line_marks_what_is_gone(toy: tuple[Path, LogReader]) -> None:
    """For those who read it late, and for those who follow it and are too slow."""
    path, reader = toy
    log = RotatingLog(path, limit=10)
    log.write(b"one\n")
    assert [line.line for line in reader.read()] == ["one"]
    for line in (b"two\n", b"three\n", b"four\n", b"five\n", b"six\n", b"seven\n", b"eight\n"):
        log.write(line)
    log.close()
    gone = "[pipollux: {} bytes of output are missing here, as only the end of a long log is kept]"
    kept = ["six", "seven", "eight"]
    assert [line.line for line in reader.read()] == [gone.format(20), *kept]
    late = LogReader(reader._reader, "toy", None, None)
    assert [line.line for line in late.read()] == [gone.format(24), *kept]


def test_a_progress_bar_is_shown_while_it_is_drawn(toy: tuple[Path, LogReader]) -> None:
    path, reader = toy
    log = RotatingLog(path, limit=1000)
    log.write(b"begin\r\n\r 10%\r 20%")
    assert [(line.line, line.end) for line in reader.read()] == [
        ("begin", b"\r\n"),
        ("", b"\r"),
        (" 10%", b"\r"),
    ]
    log.write(b"\r 30%\r")
    assert [(line.raw, line.harmless) for line in reader.read()] == [(b" 20%\r", " 20%\r")]
    log.write(b"\nend\r")
    log.close()
    assert [line.raw for line in reader.read()] == [b" 30%\r\n"]
    assert [line.line for line in reader.rest()] == ["end"]


def test_bars_of_several_replicas_are_lines_of_their_own() -> None:
    line = LogLine(1, 2, b" 10%", b"\r", several=True)
    assert (line.raw, line.harmless) == (b"[1.2]  10%\n", "[1.2]  10%\n")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("plain \t text, caf\u00e9", "plain \t text, caf\u00e9"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07a\x1b]52;c;cm0gLXJm\x1b\\b", "ab"),
        ("\x1b[2J\x1b[1;1Hover\x1b[A\x1b[K", "over"),
        ("\x9b2Ja\x9d0;t\x9cb", "ab"),
        ("\x1b[6n\x1b[c\x1bcx\x1bP+q544e\x1b\\y", "xy"),
        ("a\x08\x07\x7f\x00b\x1b", "a" + 4 * "\ufffd" + "b\ufffd"),
    ],
)
def test_a_terminal_gets_text_and_colours_alone(written: str, shown: str) -> None:
    assert harmless(written) == shown
