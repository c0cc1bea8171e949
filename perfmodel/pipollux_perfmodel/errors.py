"""The root of what goes wrong in a way that a user can do something about.

::

    PipolluxError
    ├── InputError (also ValueError)   what a user wrote cannot be used: files, options, parameters
    └── …                              `pipollux_hybrid.errors`, `pipollux_sched.errors`

It is in the package that all others build on; it imports nothing, so that any of them may.
"""

from __future__ import annotations


class PipolluxError(Exception):
    """What a user can do something about.

    Args:
        problems: sentences, each of which says what is wrong, and what to do.

    Example:
        >>> str(PipolluxError("node-a: slots: 0 is not allowed; it must be at least 1"))
        'node-a: slots: 0 is not allowed; it must be at least 1'
    """

    exit_code = 1
    """What a command ends with."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence each."""
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        return "\n".join(self.problems)


class InputError(PipolluxError, ValueError):
    """What a user wrote cannot be used; a sentence names the place, the value and the remedy."""

    exit_code = 2
