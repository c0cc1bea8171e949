"""What can be wrong with a user's measurements or parameters."""

from __future__ import annotations


class ModelingError(ValueError):
    """Data that cannot be used; its text is for the user, one sentence a problem.

    Args:
        problems: sentences, each naming the place, the value, and what is allowed.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: tuple[str, ...] = problems
        """One sentence each."""
