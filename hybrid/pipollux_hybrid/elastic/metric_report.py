"""Metrics of the script, by which the trials of a sweep are compared and pruned."""

from __future__ import annotations

import math

from torch import Tensor

from pipollux_hybrid.errors import ConfigurationError
from pipollux_hybrid.job.context import context
from pipollux_hybrid.telemetry.metrics import Metrics

from .epoch import epoch_state


def report_metric(*, step: int | None = None, **values: Tensor | float) -> None:
    """Report metrics, such as the accuracy on a validation set.

    The values of replica 0 count, so average them over the replicas first. The last value of a
    trial is its result; a pruner compares the values of trials at equal steps. Without a scheduler,
    this does nothing.

    Example::

        pipollux.report_metric(accuracy=correct / total)

    Args:
        step: When the values were measured; a later report of the same step replaces them. By
            default, the number of epochs that have begun.
        values: Values by name. One that is not finite is reported as missing.

    Raises:
        ConfigurationError: There is no value, a name has more than 100 characters or others than
            letters of ASCII, digits and ``_``, or the step is not a whole number of at least 0.
    """
    if not values:
        raise ConfigurationError("report_metric() has no value; give one, as in accuracy=0.9")
    from pipollux_protocol.messages import MAX_METRIC_NAME  # imports pydantic

    bad = next((name for name in values if not _is_name(name, MAX_METRIC_NAME)), None)
    if bad is not None:
        raise ConfigurationError(
            f"'{bad[:40]}' is not the name of a metric; use at most {MAX_METRIC_NAME} letters of "
            "ASCII, digits and '_'"
        )
    if step is None:
        state = epoch_state(context())
        step = state.epoch + state.entered
    elif isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigurationError(f"step={step!r} of a metric is not a whole number of at least 0")
    numbers = {name: float(value) for name, value in values.items()}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    context().component(Metrics).reporter.add_metrics(step, finite)


def _is_name(text: str, longest: int) -> bool:
    return text.isascii() and text.isidentifier() and len(text) <= longest
