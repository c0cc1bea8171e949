"""Tokens of users, and the roles that they give."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from pipollux_utils.validation import problem_at

from .names import Name, UserName


class Role(StrEnum):
    """What a token allows; each role allows what those before it do."""

    VIEWER = "viewer"
    """To read everything but tokens."""
    USER = "user"
    """To submit jobs, and to manage one's own."""
    ADMIN = "admin"
    """Everything."""

    def allows(self, needed: Role) -> bool:
        """Tell whether this role allows what another one is needed for."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


def _not_admin(name: str) -> str:
    if name == "admin":
        raise ValueError("'admin' has the token in admin.token; give the name of a user")
    return name


class NewToken(BaseModel):
    """A token that is to be made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[UserName, AfterValidator(_not_admin)] = Field(description="the name of a user")
    role: Role = Field(description="'viewer', 'user' or 'admin'")
    team: Name | None = Field(default=None, description="the name of a team")
    """The only team that it may submit for; None: any that has its user."""
    run_as: UserName | None = Field(default=None, description="a user of the machine")
    """The user of the machine as which its jobs run; None: the scheduler's own."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.run_as is not None and self.role is not Role.USER:
            raise problem_at(
                ("run_as",),
                f"'{self.run_as}' is for tokens of the role 'user', and this is of the role "
                f"'{self.role.value}'; leave it out",
            )
        return self
