"""Authentication by token. The token of a job grants access to that job only."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from fastapi import HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials
from starlette.concurrency import run_in_threadpool

from pipollux_sched.spec.tokens import Role
from pipollux_sched.store import JobRecord, Store, UnknownJobError
from pipollux_sched.store.tokens import digest_of

from .limits import REPLICAS_OF_A_RATE, Limits, RateLimit, TooManyRequestsError
from .roles import Caller


class Auth:
    """Authorizes requests by their token, and counts them against the rate limits."""

    def __init__(self, store: Store, admin_token: str, limits: Limits) -> None:
        self._store = store
        self._callers: Mapping[str, Caller] = {}
        self._read_at = -1
        self._admin_token = admin_token
        self._jobs = RateLimit(limits.job_rate, limits.job_burst)
        self._admin = RateLimit(limits.admin_rate, limits.admin_burst)
        self._wrong = RateLimit(limits.wrong_rate, limits.wrong_burst)

    def identify(
        self, request: Request, credentials: HTTPAuthorizationCredentials | None
    ) -> Caller:
        """Return the sender of a request; refuse everyone but the admin and users with a token."""
        if self._is_admin(credentials):
            self._admin.check("admin", "the admin token")
            return Caller("admin", Role.ADMIN)
        digest = "" if credentials is None else digest_of(credentials.credentials)
        caller = self._users().get(digest)
        if caller is None:
            raise self._refused(
                request,
                "this needs the scheduler's admin token, or one that an admin made with "
                "`pipollux tokens create`",
            )
        self._admin.check(f"user {caller.name}", f"the token of {caller.name!r}")
        return caller

    def _users(self) -> Mapping[str, Caller]:
        """Return the users by the digests of their tokens, which reveal nothing.

        Tokens change only through the same store object, so they are read again only after a
        change.
        """
        tokens = self._store.tokens
        if self._read_at != (changes := tokens.num_changes):
            self._callers = {
                one.digest: Caller(one.name, Role(one.role), one.team, one.run_as)
                for one in tokens.all()
            }
            self._read_at = changes  # last: if reading fails, revoked tokens must not stay valid
        return self._callers

    def account_of(self, user: str) -> str | None:
        """Return the system user that the jobs of a user run as; None: unknown."""
        return next((one.run_as for one in self._users().values() if one.name == user), None)

    def knows(self, credentials: HTTPAuthorizationCredentials | None) -> bool:
        """Return whether a token is the admin's or a user's, and not revoked."""
        if credentials is None:
            return False
        return self._is_admin(credentials) or digest_of(credentials.credentials) in self._users()

    async def admit_job(
        self, name: str, request: Request, credentials: HTTPAuthorizationCredentials | None
    ) -> None:
        """Refuse everyone but the job of this name and the admin."""
        if self._is_admin(credentials):
            self._admin.check("admin", "the admin token")
            return
        job = await self._job(name)
        # Without the admin's token, the answer must not reveal which jobs exist.
        if job is None or credentials is None or not equal(credentials.credentials, job.token):
            raise self._refused(request, f"this needs the token of job {name!r}")
        self._jobs.check(name, f"job {name!r}", _share(job))

    async def admits_own_token(self, name: str, token: str) -> bool:
        """Return whether a token is the job's and its rate allows one more request."""
        job = await self._job(name)
        if job is None or not equal(token, job.token):
            return False
        return self._jobs.take(name, 1.0 / _share(job)) == 0.0

    async def _job(self, name: str) -> JobRecord | None:
        return self._store.present.get(name) or await run_in_threadpool(self._find, name)

    def _find(self, name: str) -> JobRecord | None:
        try:
            return self._store.present.find(name)
        except UnknownJobError:
            return None

    def _is_admin(self, credentials: HTTPAuthorizationCredentials | None) -> bool:
        return credentials is not None and equal(credentials.credentials, self._admin_token)

    def _refused(self, request: Request, what: str) -> Exception:
        """Refuse a wrong token: 401, or 429 after too many from this address.

        Valid tokens are still accepted from the address: all jobs of a machine share it, and a job
        that guesses tokens must not lock out the others.
        """
        address = request.client.host if request.client else "an unknown address"
        seconds = self._wrong.take(address)
        if seconds > 0.0:
            who = f"requests with a wrong token from {address}"
            return TooManyRequestsError(who, self._wrong.rate, seconds)
        detail = f"{what}, as in the header 'Authorization: Bearer TOKEN'"
        return HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})


def _share(job: JobRecord) -> float:
    membership = job.state.membership
    return max((len(membership.replicas) + len(membership.joining)) / REPLICAS_OF_A_RATE, 1.0)


def equal(given: str, wanted: str) -> bool:
    """Compare tokens in constant time."""
    return hmac.compare_digest(given.encode(), wanted.encode())
