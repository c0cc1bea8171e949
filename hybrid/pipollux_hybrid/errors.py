"""What goes wrong inside a job, as a small tree of exceptions.

::

    PipolluxError
    ├── ConfigurationError (also ValueError)   an argument or environment variable is wrong
    ├── CheckpointError                        a checkpoint cannot be written or read
    └── SynchronizationError                   gradients cannot be averaged as the loop uses them
"""

from __future__ import annotations

__all__ = ["CheckpointError", "ConfigurationError", "PipolluxError", "SynchronizationError"]


class PipolluxError(Exception):
    """Everything this package raises on its own account."""


class ConfigurationError(PipolluxError, ValueError):
    """An argument or an environment variable is wrong; the message says what is allowed."""


class CheckpointError(PipolluxError):
    """A checkpoint cannot be written or read; the message names the file."""


class SynchronizationError(PipolluxError, RuntimeError):
    """The training loop uses the model in a way whose gradients cannot be averaged rightly."""
