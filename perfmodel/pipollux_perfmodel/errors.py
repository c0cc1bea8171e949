"""The root of errors that a user can act on.

::

    PipolluxError
    ├── InputError (also ValueError)   invalid user input: files, options, parameters
    └── …                              `pipollux_hybrid.errors`, `pipollux_sched.errors`

This module imports nothing, so that every package may import it.
"""

from __future__ import annotations


class PipolluxError(Exception):
    """An error that a user can act on.

    Args:
        problems: sentences, each with a problem and its remedy.

    Example:
        >>> str(PipolluxError("node-a: slots: 0 is not allowed; it must be at least 1"))
        'node-a: slots: 0 is not allowed; it must be at least 1'
    """

    exit_code = 1
    """Exit status of a command after this error."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence per problem."""
        return tuple(map(str, self.args))

    def __str__(self) -> str:
        return "\n".join(self.problems)


class InputError(PipolluxError, ValueError):
    """Invalid user input; a sentence names the location, the value and the remedy."""

    exit_code = 2
