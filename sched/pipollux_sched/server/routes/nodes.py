"""Nodes, and the cluster that they are, with the admin's token."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pipollux_sched.server.dependencies import ControlDep, NeedsAdmin, StoreDep
from pipollux_sched.server.request_bodies import JsonRoute
from pipollux_sched.server.schemas import Deciding, refusals
from pipollux_sched.store import NodeCondition
from pipollux_sched.views.cluster import list_nodes
from pipollux_sched.views.models import NodeDetails


class NodeChange(BaseModel):
    """What becomes of a node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    condition: Annotated[
        Literal["ready", "draining", "dead"], Field(description="'ready', 'draining' or 'dead'")
    ]
    reason: Annotated[
        str,
        StringConstraints(max_length=500, strip_whitespace=True, pattern=r"^[^\x00-\x1f\x7f]*$"),
        Field(description="a text of one line and at most 500 characters"),
    ] = ""


router = APIRouter(
    tags=["nodes"], dependencies=[NeedsAdmin], responses=refusals(404, 413), route_class=JsonRoute
)


@router.get("/nodes", response_model=list[NodeDetails], summary="All nodes")
def nodes(store: StoreDep) -> list[NodeDetails]:
    """Their slots and who holds them, their condition, and what the cluster file says of them."""
    return list_nodes(store)


@router.put(
    "/nodes/{name}", response_model=NodeDetails, summary="Drain a node, or say that it is dead"
)
def set_node(name: str, store: StoreDep, control: ControlDep, node: NodeChange) -> NodeDetails:
    """`draining`: jobs leave; `dead`: they start elsewhere; `ready`: it is there again."""
    control.set_node(name, NodeCondition(node.condition), node.reason)
    return next(found for found in list_nodes(store) if found.name == name)


@router.post("/decisions", status_code=202, response_model=Deciding, summary="Decide now")
def decide(control: ControlDep) -> dict[str, str]:
    """The allocator weighs all jobs at once, and not only at the next interval."""
    control.decide()
    return {"status": "deciding"}
