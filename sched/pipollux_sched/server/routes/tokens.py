"""Routes of users' tokens."""

from __future__ import annotations

from fastapi import APIRouter

from pipollux_sched.server.dependencies import NeedsRole, ServicesDep, StoreDep
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.schemas import refusals
from pipollux_sched.spec.tokens import NewToken
from pipollux_sched.views.tokens import MadeToken, TokenView, list_tokens

router = APIRouter(
    prefix="/tokens",
    tags=["tokens"],
    dependencies=[NeedsRole],
    responses=refusals(404, 409, 413),
    route_class=JsonRoute,
)


@router.get("", response_model=list[TokenView], summary="List the tokens of users")
def tokens(store: StoreDep) -> list[TokenView]:
    """Return the users with tokens, their roles and teams; tokens themselves are not stored."""
    return list_tokens(store)


@router.post("", status_code=201, response_model=MadeToken, summary="Create a token for a user")
def create_token(services: ServicesDep, token: NewToken) -> MadeToken:
    """Create a token, which only this answer contains; 409 if the user has one."""
    note = services.control.check_token(token)
    record, secret = services.store.tokens.create(token)
    return MadeToken(**TokenView.of(record).to_dict(), token=secret, note=note)


@router.delete("/{name}", response_model=TokenView, summary="Revoke a user's token")
def revoke_token(name: str, store: StoreDep) -> TokenView:
    """Revoke a token: the next request with it is refused."""
    return TokenView.of(store.tokens.revoke(name))
