"""Sizes and durations as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from pipollux_utils.text import spell_duration
from pipollux_utils.units import check_seconds, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 2**33),
        ("8Gi", 2**33),
        ("8 GB", 8 * 10**9),
        ("0.5KiB", 512),
        ("7", 7),
        (9, 9),
        ("3B", 3),
        ("2TiB", 2**41),
        ("1kB", 1000),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-8GiB", "8Gib", "8 G B", "1e3", True, -1, 1.5, None])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90.0), ("45 m", 2700.0), ("1.5h", 5400.0), ("2d", 172800.0), ("7", 7.0), (9, 9.0)],
)
def test_durations(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (1799.6, "30 min"),
        (7199, "120 min"),
        (7200, "2 h"),
    ],
)
def test_durations_are_spelt(seconds: float, text: str) -> None:
    assert spell_duration(seconds) == text


@pytest.mark.parametrize("text", ["", "h", "1 week", "-1h", "1e3", True, 0, -1, float("nan")])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match=r"not a duration|not above 0"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["36501d", 1e300, float("inf"), f"{10**30}h"])
def test_a_duration_that_nobody_waits_for(text: Any) -> None:
    with pytest.raises(ValueError, match="is more than 100 years; give a duration such as 36h"):
        parse_duration(text)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e300, 604_801.0])
def test_times_that_a_scheduler_does_not_wait(seconds: float) -> None:
    check_seconds(interval=0.1, grace=604_800.0)
    with pytest.raises(ValueError, match=r"interval is .*; give seconds above 0 and up to 604800"):
        check_seconds(interval=seconds)
