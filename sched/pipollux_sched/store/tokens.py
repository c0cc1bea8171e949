"""The tokens of users; only digests are stored, without salt, as tokens are long and random."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from pipollux_sched.spec.tokens import NewToken, Role

from . import journal
from .database import Database
from .errors import TokenExistsError, UnknownTokenError
from .tables import MetaRow

_MARK = "token:"
PREFIX = "plx_"
"""Prefix of tokens, by which people and secret scanners recognize them."""


@dataclass(frozen=True)
class TokenRecord:
    """A user's token, without the token itself."""

    name: str
    role: str
    team: str | None
    created_at: float
    digest: str
    run_as: str | None = None
    """The system user that the user's jobs run as; None: the scheduler's user."""


class TokenRecords:
    """The tokens of a store."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self.num_changes = 0
        """Number of tokens that this object has created or revoked."""

    def create(self, new: NewToken) -> tuple[TokenRecord, str]:
        """Create a token and return it, because it is not stored; or raise `TokenExistsError`."""
        secret = PREFIX + secrets.token_urlsafe(32)
        now = self._clock()
        record = TokenRecord(new.name, new.role.value, new.team, now, digest_of(secret), new.run_as)
        with self._database.write() as session:
            if session.get(MetaRow, _MARK + new.name) is not None:
                raise TokenExistsError(
                    f"{new.name!r} has a token; revoke it first, with: "
                    f"pipollux tokens revoke {new.name}"
                )
            session.add(MetaRow(key=_MARK + new.name, value=json.dumps(asdict(record))))
            self._log(session, now, record, "made")
        self.num_changes += 1
        return record, secret

    def revoke(self, name: str) -> TokenRecord:
        """Revoke a token, or raise `UnknownTokenError`."""
        with self._database.write() as session:
            row = session.get(MetaRow, _MARK + name)
            if row is None:
                raise UnknownTokenError(f"no token is named {name!r}; see: pipollux tokens")
            record = TokenRecord(**json.loads(row.value))
            session.delete(row)
            self._log(session, self._clock(), record, "revoked")
        self.num_changes += 1
        return record

    def all(self) -> list[TokenRecord]:
        """Return all tokens, by name."""
        query = select(MetaRow).where(MetaRow.key.startswith(_MARK)).order_by(MetaRow.key)
        with self._database.read() as session:
            return [TokenRecord(**json.loads(row.value)) for row in session.scalars(query)]

    def _log(self, session: Session, now: float, record: TokenRecord, what: str) -> None:
        data = {"name": record.name, "role": Role(record.role).value, "what": what}
        journal.log(session, now, "token", None, None, data)


def digest_of(secret: str) -> str:
    """Return the stored digest of a token."""
    return hashlib.sha256(secret.encode()).hexdigest()
