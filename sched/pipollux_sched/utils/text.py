"""Numbers, times and names as a reader sees them: one way of writing each, for pages and terminals.

Names and messages come from users, so `clean` is what stands between them and a terminal or an XML
parser: it takes out control characters, lone surrogates and characters that turn the line around.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"
DASH = "\N{EN DASH}"

_UNPRINTABLE = {"Cc", "Cs", "Co", "Cn"}
_BIDIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: object, limit: int | None = None) -> str:
    r"""Return `text` on one line without control characters, cut to `limit` characters.

    >>> clean("a\x1b[31mb\nc")
    'a�[31mb c'
    >>> clean("a-very-long-name", limit=8)
    'a-very-…'
    """
    out = []
    for char in str(text):
        if char in "\n\t\r":
            out.append(" ")
        elif unicodedata.category(char) in _UNPRINTABLE or char in _BIDIRECTIONAL:
            out.append("\N{REPLACEMENT CHARACTER}")
        else:
            out.append(char)
    line = "".join(out).strip()
    if limit is not None and len(line) > limit:
        return line[: limit - 1] + "…"
    return line


def number(value: float | None, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits and thin spaces between thousands.

    >>> number(0.012345), number(3.14159), number(None)
    ('0.0123', '3.14', '–')
    """
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - magnitude)
    return f"{value:,.{decimals}f}".replace(",", THIN_SPACE)


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
    text = number(value, 6)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def percent(share: float | None) -> str:
    """Return a share in [0, 1] as a percentage: two digits, or one decimal below ten percent."""
    if share is None or not math.isfinite(share):
        return DASH
    value = 100 * share
    text = f"{value:.1f}" if 0 < abs(value) < 9.95 else f"{value:.0f}"
    return f"{text}{THIN_SPACE}%"


def clock(seconds: float) -> str:
    """Return a moment of the run as minutes and seconds, with hours when there are any.

    >>> clock(5), clock(185), clock(3700)
    ('0:05', '3:05', '1:01:40')
    """
    whole = round(max(0.0, seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def duration(seconds: float | None, digits: int = 2) -> str:
    """Return a length of time with its unit; seconds below a minute have `digits` digits.

    >>> duration(0.0123), duration(4.2), duration(185.0)
    ('12.3\u202fms', '4.2\u202fs', '3\u202fmin 5\u202fs')
    """
    if seconds is None or not math.isfinite(seconds):
        return DASH
    if seconds < 0.9995:
        return f"{number(seconds * 1000)}{THIN_SPACE}ms"
    if seconds < 59.95:
        return f"{number(seconds, digits)}{THIN_SPACE}s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}{THIN_SPACE}h {minutes}{THIN_SPACE}min"
    tail = f" {secs}{THIN_SPACE}s" if secs else ""
    return f"{minutes}{THIN_SPACE}min{tail}"


def count(how_many: int, what: str, plural: str | None = None) -> str:
    """Return a count and its noun: `1 replica`, `2 replicas`."""
    noun = what if how_many == 1 else plural or f"{what}s"
    return f"{amount(how_many)} {noun}"


def listing(words: Sequence[str]) -> str:
    """Join words as in a sentence: `a`, `a and b`, `a, b and c`."""
    if len(words) <= 1:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def placements(nodes: Sequence[str]) -> list[str]:
    """Return the nodes of an allocation, each once, with how many replicas when more than one."""
    parts = []
    for node in dict.fromkeys(nodes):
        replicas = nodes.count(node)
        parts.append(clean(node) + (f" × {replicas}" if replicas > 1 else ""))
    return parts


def placement(nodes: Sequence[str]) -> str:
    """Return an allocation in words: each node once, with how many replicas when more than one.

    >>> placement(["node-0", "node-1", "node-1"])
    'node-0, node-1 × 2'
    """
    return ", ".join(placements(nodes)) or DASH
