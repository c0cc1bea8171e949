"""Forecasts as text."""

from __future__ import annotations

from datetime import datetime

from pipollux_sched.views.models import EstimateView, ForecastView
from pipollux_utils.text import DASH, spell_age


def short_span(estimate: EstimateView | None, now: float) -> str:
    """Return an 80 % interval as times from now, for a column of a table.

    >>> short_span(EstimateView(low=60.0, median=90.0, high=7200.0), now=0.0)
    '1m–2h'
    >>> short_span(EstimateView(low=60.0, median=90.0, high=None), now=0.0)
    'over 1m'
    >>> short_span(EstimateView(low=60.0, median=90.0, high=7200.0), now=7202.0)
    'overdue'
    """
    if estimate is None or estimate.low is None:
        return DASH
    if _is_over(estimate, now):
        return "overdue"
    low = _coarse(estimate.low - now)
    if estimate.high is None:
        return f"over {low}"
    high = _coarse(estimate.high - now)
    return high if low == high else f"{low}–{high}"


def _is_over(estimate: EstimateView, now: float) -> bool:
    """Return whether the whole interval is in the past, beyond the rounding of what is shown."""
    return estimate.high is not None and estimate.high < now - 1


def _coarse(seconds: float) -> str:
    """Return a duration in its largest unit, with one more figure below ten hours and days."""
    seconds = max(seconds, 0.0)
    if seconds < 60:
        return f"{seconds:.0f}s"
    if seconds < 3600:
        return f"{seconds / 60:.0f}m"
    unit, size = ("h", 3600.0) if seconds < 48 * 3600 else ("d", 86400.0)
    return f"{seconds / size:.2g}{unit}" if seconds < 100 * size else f"{seconds / size:.0f}{unit}"


def forecast_lines(found: ForecastView, now: float) -> list[tuple[str, str]]:
    """Return a forecast as titles and texts; without one, the reason.

    >>> end = EstimateView(low=60.0, median=90.0, high=None)
    >>> forecast_lines(ForecastView(made_at=0.0, start=None, end=end), 30.0)[1]
    ('Forecast made', '30s ago')
    >>> never = EstimateView(low=None, median=None, high=None)
    >>> why = "it waits for job a to fail, and forecasts assume that jobs succeed"
    >>> forecast_lines(ForecastView(made_at=0.0, start=never, end=never, note=why), 30.0)[0][0]
    'No forecast'
    """
    if found.note and found.end.low is None:
        return [("No forecast", found.note)]
    lines = [] if found.start is None else [("Starts", spell_estimate(found.start, now))]
    lines.append(("Ends", spell_estimate(found.end, now)))
    if found.note:
        lines.append(("Forecast note", found.note))
    return [*lines, ("Forecast made", f"{spell_age(now - found.made_at)} ago")]


def spell_estimate(estimate: EstimateView, now: float) -> str:
    """Return an estimate in words, by the clock and from now."""
    low, median, high = estimate.low, estimate.median, estimate.high
    if low is None:
        return "not known"
    if high is not None and _is_over(estimate, now):
        return f"overdue since {_clock(high, now)}"
    if high is not None and max(high - now, 0) - max(low - now, 0) < 1:
        return "now" if high <= now + 1 else f"{_clock(high, now)} (in {spell_age(high - now)})"
    until = "later" if high is None else _clock(high, now)
    likely = "" if median is None else f", median {_clock(median, now)}"
    return f"between {_clock(low, now)} and {until} (in {short_span(estimate, now)}){likely}"


def _clock(moment: float, now: float) -> str:
    when, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(now).date()
    return when.strftime("%H:%M:%S" if when.date() == today else "%Y-%m-%d %H:%M")
