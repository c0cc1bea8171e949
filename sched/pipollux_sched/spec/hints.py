"""Validation of hints: excessive numbers are refused before any computation.

`SchedHints` checks only the form. A million stages, or steps of a billion years, would be
well-formed, but cost the scheduler its memory or all jobs their allocations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from pipollux_perfmodel import HintsError, SchedHints

MOST_SAMPLES = 2**22
"""Largest batch size: all sizes up to it may be tried, which takes memory."""
MOST = {
    "numStages": 1024,
    "numMicrobatches": 2**20,
    "maxProfiledReplicas": 2**20,
    "initBatchSize": MOST_SAMPLES,
    "localBszBounds": MOST_SAMPLES,
    "globalBatchSize": MOST_SAMPLES,
    "maxBatchSize": MOST_SAMPLES,
    "remainingSamples": 1e18,
    "trainedSamples": 1e18,
    "memoryLimit": 1e18,
    "perfParams.growth_n": 16,
}
"""Largest magnitude by key; a network's time grows with a power of the replicas."""
_HAS_LIMITS = {name.rpartition(".")[0] for name in MOST} - {""}
"""Keys of objects that contain a key with its own limit."""
MOST_GRADIENT = 1e60
"""Largest squared norm and variance of a gradient; an exploding gradient may still be reported."""
MOST_NUMBER = 1e18
"""Largest magnitude of any other number: seconds, bytes, samples."""


def read_hints(body: Mapping[str, Any]) -> SchedHints:
    """Return the hints in decoded JSON; raise `HintsError` for a number beyond its limit."""
    for key, value in body.items():
        _check(key, value, MOST_GRADIENT if key == "gradParams" else MOST_NUMBER)
    return SchedHints.from_json_object(body)


def _read(value: Any) -> SchedHints:
    """Return the hints; errors keep the wording of `SchedHints`."""
    if isinstance(value, SchedHints):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping, as in {initBatchSize: 64}")
    try:
        return read_hints(value)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("hints: ")) from None


HintsField = Annotated[SchedHints, BeforeValidator(_read)]
"""Hints as a field of a pydantic model, or as the body of a request."""


def _check(key: str, value: Any, most: float) -> None:
    most = MOST.get(key, most)
    if isinstance(value, dict | list):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            # Hints have hundreds of numbers, and building a name costs more than checking one.
            if type(child) not in (int, float) or abs(child) > most or key in _HAS_LIMITS:
                _check(f"{key}.{name}", child, most)
    elif isinstance(value, int | float) and abs(value) > most:
        text = str(value) if isinstance(value, float) or abs(value) < 2**63 else "far too large"
        raise HintsError(f"hints: {key:.100} is {text}; at most {most} is allowed")
