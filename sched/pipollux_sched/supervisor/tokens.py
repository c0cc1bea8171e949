"""Who may ask: the admin everything, a job what concerns itself."""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from pipollux_sched.store import JobRecord, StateDir, Store, UnknownJobError

from .limits import Limits, RateLimit, TooManyRequestsError

_job_scheme = HTTPBearer(
    scheme_name="jobToken",
    description="The token of the job in the path; its processes find it in PIPOLLUX_TOKEN.",
    auto_error=False,
)
_admin_scheme = HTTPBearer(
    scheme_name="adminToken",
    description="The admin's token, which stands in `admin.token` in the state directory.",
    auto_error=False,
)

AsJob = Annotated[HTTPAuthorizationCredentials | None, Depends(_job_scheme)]
AsAdmin = Annotated[HTTPAuthorizationCredentials | None, Depends(_admin_scheme)]


async def _admitted(request: Request) -> JobRecord:
    job: JobRecord = request.state.job
    return job


AdmittedJob = Annotated[JobRecord, Depends(_admitted)]
"""The job that a path names, as it was when its token was checked."""


class Gate:
    """Lets requests in by their token, and counts them against the limits.

    Args:
        store: knows the tokens of the jobs.
        state_dir: named to those who lack the admin's token.
        admin_token: opens everything.
        limits: how many requests are answered.
    """

    def __init__(self, store: Store, state_dir: StateDir, admin_token: str, limits: Limits) -> None:
        self._store = store
        self._state_dir = state_dir
        self._admin_token = admin_token
        self._jobs = RateLimit(limits.job_rate, limits.job_burst)
        self._admin = RateLimit(limits.admin_rate, limits.admin_burst)
        self._wrong = RateLimit(limits.wrong_rate, limits.wrong_burst)

    async def admit_admin(self, request: Request, credentials: AsAdmin) -> None:
        """Let the admin in, and nobody else."""
        if not self._is_admin(credentials):
            raise self._refused(
                request, f"this needs the admin token, which {self._state_dir.server} holds"
            )
        self._admin.check("admin", "the admin token")

    def admit_job(self, name: str, request: Request, by_job: AsJob, by_admin: AsAdmin) -> None:
        """Let the job of this name in, or the admin; `AdmittedJob` is then the job."""
        request.state.job = self._job(name, request, by_job or by_admin)

    def _job(
        self, name: str, request: Request, credentials: HTTPAuthorizationCredentials | None
    ) -> JobRecord:
        if self._is_admin(credentials):
            self._admin.check("admin", "the admin token")
            return self._store.job(name)
        try:
            record = self._store.job(name)
        except UnknownJobError:
            record = None  # who does not know the admin's token is not told what jobs there are
        if (
            record is None
            or credentials is None
            or not equal(credentials.credentials, record.token)
        ):
            raise self._refused(request, f"this needs the token of job {name!r}")
        self._jobs.check(name, f"job {name!r}")
        return record

    def _is_admin(self, credentials: HTTPAuthorizationCredentials | None) -> bool:
        return credentials is not None and equal(credentials.credentials, self._admin_token)

    def _refused(self, request: Request, what: str) -> Exception:
        """Refuse a wrong token: 401, and 429 where there were too many from this address.

        Those who have the right one are still let in from there: all jobs of one machine come from
        one address, and one that guesses must not lock the others out.
        """
        address = request.client.host if request.client else "an unknown address"
        seconds = self._wrong.take(address)
        if seconds > 0.0:
            who = f"requests with a wrong token from {address}"
            return TooManyRequestsError(who, self._wrong.rate, seconds)
        detail = f"{what}, as in the header 'Authorization: Bearer TOKEN'"
        return HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})


def equal(given: str, wanted: str) -> bool:
    """Compare tokens in a time that does not tell how much of them is right."""
    return hmac.compare_digest(given.encode(), wanted.encode())
