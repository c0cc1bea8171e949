"""Tokens of users, and the roles that they give."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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
