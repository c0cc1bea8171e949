"""Tokens of users, and their roles."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pipollux_utils.validation import problem_at

from .names import Name, UserName


class Role(StrEnum):
    """The role of a token; each role includes the preceding ones."""

    VIEWER = "viewer"
    """Read everything except tokens."""
    USER = "user"
    """Submit jobs, and manage one's own jobs."""
    ADMIN = "admin"
    """Do everything."""

    def allows(self, needed: Role) -> bool:
        """Return whether this role includes another one."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


def _not_admin(name: str) -> str:
    if name == "admin":
        raise ValueError("'admin' has the token in admin.token; give the name of a user")
    return name


class NewToken(BaseModel):
    """A token to create."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[UserName, AfterValidator(_not_admin)] = Field(description="the name of a user")
    role: Role = Field(description="'viewer', 'user' or 'admin'")
    team: Name | None = Field(default=None, description="the name of a team")
    """The only team that the user may submit jobs for; None: any team of the user."""
    run_as: UserName | None = Field(default=None, description="a user of the machine")
    """The system user that the user's jobs run as; None: the scheduler's user."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.run_as is not None and self.role is not Role.USER:
            raise problem_at(
                ("run_as",),
                f"'{self.run_as}' is for tokens of the role 'user', and this is of the role "
                f"'{self.role.value}'; leave it out",
            )
        return self
