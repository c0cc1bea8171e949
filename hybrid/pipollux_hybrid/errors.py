"""The exceptions of a job, and checks of arguments.

::

    PipolluxError (`pipollux_perfmodel.errors`)
    ├── ConfigurationError (also ValueError)   an argument or environment variable is wrong
    ├── CheckpointError                        a checkpoint cannot be written or read
    └── SynchronizationError                   gradients cannot be averaged as the loop uses them
        ├── PeerLostError                      another replica has ended, or does not answer
        │   └── ReplicaBrokenError             another process of this replica has
        └── BrokenPipelineError                the process of another stage has
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipollux_perfmodel.errors import PipolluxError

__all__ = [
    "Allowed",
    "BrokenPipelineError",
    "CheckpointError",
    "ConfigurationError",
    "PeerLostError",
    "PipolluxError",
    "ReplicaBrokenError",
    "SynchronizationError",
    "at_least",
    "check_values",
    "is_sequence",
    "is_whole",
    "switch",
]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
LONGEST = 60
"""Maximum length in characters of a value in a message."""


class ConfigurationError(PipolluxError, ValueError):
    """An argument or an environment variable is wrong; the message says what is allowed."""


class CheckpointError(PipolluxError):
    """A checkpoint cannot be written or read; the message names the file."""


class SynchronizationError(PipolluxError, RuntimeError):
    """The training loop uses the model in a way whose gradients cannot be averaged correctly."""


class PeerLostError(SynchronizationError):
    """Another replica has ended or does not answer, so a collective has failed."""


class ReplicaBrokenError(PeerLostError):
    """Another process of this replica has ended or does not answer, so the replica ends."""


class BrokenPipelineError(SynchronizationError):
    """The process of another stage has ended or does not answer."""


class Allowed(NamedTuple):
    """The allowed values of an argument."""

    holds: Callable[[Any], bool]
    """Returns whether a value is allowed; it must accept any value."""
    words: str
    """The rest of the sentence after ``name=value:``, with the allowed values and a remedy."""


def check_values(table: Mapping[str, Allowed], values: Mapping[str, Any]) -> None:
    """Refuse the first value that its table does not allow.

    Raises:
        ConfigurationError: Names the argument, its value and the allowed values.
    """
    for name, allowed in table.items():
        if not allowed.holds(values[name]):
            raise ConfigurationError(f"{_told(name, values[name])}: {allowed.words}")


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_sequence(value: Any) -> bool:
    """Return whether a value is a sequence such as a list or a tuple, and not a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def at_least(least: float, words: str, *, whole: bool = False) -> Allowed:
    """Return the check for a finite number of at least a bound; an integer if ``whole``."""

    def holds(value: Any) -> bool:
        number = is_whole(value) or (isinstance(value, float) and not whole)
        return number and math.isfinite(value) and value >= least

    return Allowed(holds, words)


def switch(words: str = "True or False is needed") -> Allowed:
    """Return the check for a bool."""
    return Allowed(lambda value: isinstance(value, bool), words)


def _told(name: str, value: Any) -> str:
    if isinstance(value, type):
        return f"{name} is the class {value.__name__}"
    items = [*value, *value.values()] if isinstance(value, dict) else value
    if not isinstance(value, (list, tuple, dict)):
        items = [value]
    if all(isinstance(item, PLAIN) for item in items) and len(repr(value)) <= LONGEST:
        return f"{name}={value!r}"
    kind = type(value).__name__
    article = "an" if kind[0] in "AEIOU" else "a"
    return f"{name} is {article} {kind}"
