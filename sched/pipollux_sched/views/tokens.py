"""Views of users' tokens."""

from __future__ import annotations

from typing import Self

from pipollux_sched.spec.tokens import Role
from pipollux_sched.store import Store
from pipollux_sched.store.tokens import TokenRecord

from .models import View


class TokenView(View):
    """A user's token: its role, the only team that it may submit jobs for, and the system user that
    its jobs run as; null: any team, the scheduler's user.
    """

    name: str
    role: Role
    team: str | None
    run_as: str | None
    created_at: float

    @classmethod
    def of(cls, record: TokenRecord) -> Self:
        """Return the view of a token."""
        role = Role(record.role)
        return cls(
            name=record.name,
            role=role,
            team=record.team,
            run_as=record.run_as,
            created_at=record.created_at,
        )


class MadeToken(View):
    """A new token: the `token` is shown only here.

    `note`: a warning about the permissions of the user's jobs; empty: none.
    """

    name: str
    role: Role
    team: str | None
    run_as: str | None
    created_at: float
    token: str
    note: str


def list_tokens(store: Store) -> list[TokenView]:
    """Return the tokens of users, by name."""
    return [TokenView.of(record) for record in store.tokens.all()]
