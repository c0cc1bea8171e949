"""Routes of notifications: the channels of users, and deliveries."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from pipollux_sched.server.dependencies import CallerDep, ControlDep, NeedsRole, StoreDep
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.roles import Caller
from pipollux_sched.server.schemas import refusals
from pipollux_sched.spec.names import UserName
from pipollux_sched.spec.notify import NewChannel
from pipollux_sched.spec.tokens import Role
from pipollux_sched.views.notifications import (
    ChannelView,
    MadeChannel,
    NotificationsView,
    list_notifications,
)

_User = Annotated[UserName | None, Query(description="The user; none: the sender.")]

router = APIRouter(
    prefix="/notifications",
    tags=["notifications"],
    dependencies=[NeedsRole],
    responses=refusals(404, 409, 413),
    route_class=JsonRoute,
)


def _user_of(caller: Caller, asked: str | None) -> str | None:
    """Return the user whose channels a request is about; None: those for jobs of no user."""
    if caller.role is Role.ADMIN:
        return asked
    if asked not in (None, caller.name):
        raise HTTPException(403, f"the channels of {asked!r} are for them and admins; leave it out")
    return caller.name


@router.get("", response_model=NotificationsView, summary="List channels and notifications")
def notifications(store: StoreDep, caller: CallerDep) -> NotificationsView:
    """Return the channels of the sender, without secrets, and the last notifications to them or
    about the sender's jobs; for admins, of all users.
    """
    return list_notifications(store, caller.name, all_users=caller.role is Role.ADMIN)


@router.post("/channels", status_code=201, response_model=MadeChannel, summary="Add a channel")
def add_channel(control: ControlDep, caller: CallerDep, channel: NewChannel) -> MadeChannel:
    """Add a channel for the sender's jobs, or an admin's for a user; 409 if there is one.

    A webhook without `secret` gets one, which only this answer contains.
    """
    mine = channel.model_copy(update={"user": _user_of(caller, channel.user)})
    rule, secret = control.notifications.add(mine)
    return MadeChannel(channel=ChannelView.of(rule), secret=secret)


@router.delete("/channels/{name}", response_model=ChannelView, summary="Remove a channel")
def remove_channel(
    name: str, control: ControlDep, caller: CallerDep, user: _User = None
) -> ChannelView:
    """Remove a channel with the notifications that were not delivered to it yet."""
    return ChannelView.of(control.notifications.remove(_user_of(caller, user), name))


@router.post("/channels/{name}/test", response_model=ChannelView, summary="Test a channel")
def try_channel(
    name: str, control: ControlDep, caller: CallerDep, user: _User = None
) -> ChannelView:
    """Send a test notification to a channel; `GET /notifications` shows what became of it."""
    return ChannelView.of(control.notifications.test(_user_of(caller, user), name))
