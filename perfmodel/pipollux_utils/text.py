"""Formatting of numbers, times and names for pages and terminals.

Names and messages come from users, so `clean` protects terminals and XML parsers: it removes
control characters, lone surrogates and characters that reverse the direction of text. Pages group
the thousands of a number (`grouped`, `amount`), terminals do not (`number`).
"""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"
DASH = "\N{EN DASH}"

_BREAKS = re.compile("[ \t\r\n\v\f\x85\u2028\u2029]+")
_UNPRINTABLE = {"Cc", "Cs", "Co", "Cn"}
_BIDIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_NOTHING = 1e-7
"""Seconds below which a step time counts as zero; the model's own zero is 1e-8."""


def clean(text: object, limit: int | None = None) -> str:
    r"""Return `text` on one line without control characters, cut to `limit` characters.

    >>> clean("a\x1b[31mb\nc")
    'a�[31mb c'
    >>> clean("a-very-long-name", limit=8)
    'a-very-…'
    """
    out = []
    for char in _BREAKS.sub(" ", str(text)).strip():
        if unicodedata.category(char) in _UNPRINTABLE or char in _BIDIRECTIONAL:
            out.append("\N{REPLACEMENT CHARACTER}")
        else:
            out.append(char)
    line = "".join(out)
    if limit is not None and len(line) > limit:
        return line[: max(limit - 1, 0)] + "…"
    return line


def first_line(text: str) -> str:
    """Return the first line of a message, without log lines after it."""
    return text.partition("\n")[0]


def number(value: float | None, digits: int = 3, separator: str = "") -> str:
    """Return `value` with `digits` significant digits, with an exponent only for tiny values.

    >>> number(0.012345), number(3.14159), number(1234.5), number(None)
    ('0.0123', '3.14', '1234', '–')
    """
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - magnitude)
    return f"{value:,.{decimals}f}".replace(",", separator)


def grouped(value: float | None, digits: int = 3) -> str:
    """Return a number as `number` does, with thin spaces between thousands.

    >>> grouped(1234.5)
    '1\u202f234'
    """
    return number(value, digits, THIN_SPACE)


def rounded(value: float) -> str:
    """Return a number with three significant digits, at most two of them decimals.

    >>> rounded(1234.5), rounded(1.2345), rounded(0.0123)
    ('1234', '1.23', '0.01')
    """
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{decimals}f}"


def amount(value: float | None) -> str:
    """Return a whole number with thin spaces between thousands.

    >>> amount(1391), amount(None)
    ('1\u202f391', '–')
    """
    if value is None or not math.isfinite(value):
        return DASH
    return f"{round(value):,}".replace(",", THIN_SPACE)


def plain(value: float) -> str:
    """Return a round number, such as a tick mark's, with the digits it needs.

    >>> plain(2.0), plain(0.25)
    ('2', '0.25')
    """
    text = grouped(value, 6)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def percent(share: float | None) -> str:
    """Return a share in [0, 1] as a percentage: two digits, or one decimal below ten percent."""
    if share is None or not math.isfinite(share):
        return DASH
    value = 100 * share
    text = f"{value:.1f}" if 0 < abs(value) < 9.95 else f"{value:.0f}"
    return f"{text}{THIN_SPACE}%"


def error_percent(error: float) -> str:
    """Return a relative error as a percentage with one decimal.

    >>> error_percent(0.0123)
    '1.2 %'
    """
    return f"{100 * error:.1f} %"


def clock(seconds: float) -> str:
    """Return a time since the start as minutes and seconds, with hours if there are any.

    >>> clock(5), clock(185), clock(3700)
    ('0:05', '3:05', '1:01:40')
    """
    whole = round(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def duration(seconds: float | None, digits: int = 2) -> str:
    """Return a duration with its unit; seconds below a minute have `digits` digits.

    >>> duration(0.0123), duration(4.2), duration(185.0)
    ('12.3\u202fms', '4.2\u202fs', '3\u202fmin 5\u202fs')
    """
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 0.9995:
        return f"{grouped(seconds * 1000)}{THIN_SPACE}ms"
    if seconds < 59.95:
        return f"{grouped(seconds, digits)}{THIN_SPACE}s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}{THIN_SPACE}h {minutes}{THIN_SPACE}min"
    tail = f" {secs}{THIN_SPACE}s" if secs else ""
    return f"{minutes}{THIN_SPACE}min{tail}"


def seconds(value: float) -> str:
    """Return a step time in s, ms or µs; below 0.1 µs it is 0 s.

    >>> seconds(0.01234), seconds(1e-8)
    ('12.3 ms', '0 s')
    """
    if abs(value) < _NOTHING:
        return "0 s"
    size, unit = next((one for one in _UNITS if abs(value) >= one[0]), _UNITS[-1])
    return f"{rounded(value / size)} {unit}"


def spell_duration(length: float) -> str:
    """Return a duration, rounded to a whole number of a suitable unit.

    >>> spell_duration(45.2), spell_duration(1800.0), spell_duration(36 * 3600.0)
    ('45 s', '30 min', '36 h')
    """
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if length >= 2 * size:
            return f"{length / size:.0f} {unit}"
    return f"{length:.0f} s"


def spell_age(age: float) -> str:
    """Return an age as in ``42s``, ``3m07s``, ``5h12m``, ``3d04h``."""
    minutes, left = divmod(max(int(age), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{left:02d}s" if minutes else f"{left}s"


def spell_moment(moment: float | None, now: float | None = None) -> str:
    """Return a clock time and its distance from now."""
    if moment is None:
        return DASH
    apart = (time.time() if now is None else now) - moment
    when = datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
    return f"{when} ({spell_age(apart)} ago)" if apart >= 0 else f"{when} (in {spell_age(-apart)})"


def count(how_many: int, what: str, plural: str | None = None) -> str:
    """Return a count and its noun: `1 replica`, `2 replicas`."""
    noun = what if how_many == 1 else plural or f"{what}s"
    return f"{amount(how_many)} {noun}"


def listing(words: Sequence[str]) -> str:
    """Join words as in a sentence: `a`, `a and b`, `a, b and c`."""
    if len(words) <= 1:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def spell_nodes(nodes: Sequence[str]) -> str:
    """Return the nodes of an allocation, each once with its count, in the given order.

    >>> spell_nodes(["node-b", "node-a", "node-a"])
    'node-b, node-a ×2'
    """
    counts = Counter(nodes).items()
    return ", ".join(name if many == 1 else f"{name} ×{many}" for name, many in counts) or DASH


def placements(nodes: Sequence[str]) -> list[str]:
    """Return the nodes of an allocation, each once, with its replicas if there are several."""
    parts = []
    for node in dict.fromkeys(nodes):
        replicas = nodes.count(node)
        parts.append(clean(node) + (f" × {replicas}" if replicas > 1 else ""))
    return parts


def placement(nodes: Sequence[str]) -> str:
    """Return an allocation as text: each node once, with its replicas if there are several.

    >>> placement(["node-0", "node-1", "node-1"])
    'node-0, node-1 × 2'
    """
    return ", ".join(placements(nodes)) or DASH
